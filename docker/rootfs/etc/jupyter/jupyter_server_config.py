# JupyterLab in the station. The port is published on 127.0.0.1 unless BIND_ADDRESS says otherwise.
import hashlib
import os
import warnings
from pathlib import Path

from jupyter_server.serverapp import JupyterServerAuthWarning
from jupyterlab_server.licenses_handler import APIHandler, LicensesHandler

c = get_config()  # noqa: F821  (Jupyter provides it)

c.ServerApp.ip = "0.0.0.0"  # inside the container; who reaches it is decided where the port is published
c.ServerApp.port = 8888
c.ServerApp.port_retries = 0
c.ServerApp.open_browser = False
c.ServerApp.root_dir = "/workspace"
if not os.access("/workspace", os.W_OK) and os.access("/workspace/notebooks", os.W_OK):
    # the launcher's notebooks go to where they can be saved
    c.ServerApp.preferred_dir = "/workspace/notebooks"
c.ServerApp.allow_remote_access = True  # the host's name is the user's affair: an address, a tunnel, a machine's name
c.ServerApp.terminals_enabled = True
c.ServerApp.quit_button = False
c.ServerApp.shutdown_no_activity_timeout = 0

token = Path("/run/trainstation/jupyter_token").read_text().strip()
c.IdentityProvider.token = token
c.ServerApp.allow_unauthenticated_access = False  # also for extensions that forgot to ask for the token
# Each of those is good for a page of warnings in the log, though the line above has settled it.
warnings.filterwarnings("ignore", category=JupyterServerAuthWarning)
c.PasswordIdentityProvider.allow_password_change = False  # a password would live on when the token is changed
# Browsers stay logged in when the container is made anew, and no longer than the token is the same.
c.ServerApp.cookie_secret = hashlib.sha256(b"cookies of " + token.encode()).digest()

# TensorBoard listens inside the container only; the way to it leads through Jupyter and its token.
c.ServerProxy.servers = {
    "tensorboard": {
        "command": [
            "tensorboard",
            "--logdir=/workspace/runs",
            "--host=127.0.0.1",
            "--port={port}",
            "--path_prefix={base_url}tensorboard",
        ],
        "absolute_url": True,
        "timeout": 60,
        "launcher_entry": {"title": "TensorBoard"},
    }
}
c.ResourceUseDisplay.track_cpu_percent = True


# Refused for want of a token, JupyterLab's page of licences never answers: its own finish() is a coroutine, which the
# code that writes errors does not await. Here it answers like the rest.
def finish(self, chunk=None, *, _mime_type="application/json"):
    self.update_api_activity()
    self.set_header("Content-Type", _mime_type)
    return super(APIHandler, self).finish(chunk)


LicensesHandler.finish = finish

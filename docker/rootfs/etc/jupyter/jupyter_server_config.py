# JupyterLab in the station. The port is published on 127.0.0.1 unless BIND_ADDRESS says otherwise.
import hashlib
import hmac
import os
import re
import secrets
import shutil
import warnings
from pathlib import Path

from jupyter_server.base.handlers import AuthenticatedFileHandler, JupyterHandler
from jupyter_server.files.handlers import FilesHandler
from jupyter_server.serverapp import JupyterServerAuthWarning, ServerWebApplication
from jupyter_server_proxy.handlers import ProxyHandler
from jupyterlab_server.handlers import LabHandler
from jupyterlab_server.licenses_handler import APIHandler, LicensesHandler
from tornado.web import Application, HTTPError, decode_signed_value

c = get_config()  # noqa: F821  (Jupyter provides it)

c.ServerApp.ip = "0.0.0.0"  # inside the container; who reaches it is decided where the port is published
c.ServerApp.port = 8888
c.ServerApp.port_retries = 0
c.ServerApp.open_browser = False
c.ServerApp.root_dir = "/workspace"
if not os.access("/workspace", os.W_OK) and os.access("/workspace/notebooks", os.W_OK):
    # the launcher's notebooks go to where they can be saved
    c.FileContentsManager.preferred_dir = "notebooks"
c.ServerApp.allow_remote_access = True  # the host's name is the user's affair: an address, a tunnel, a machine's name
c.ServerApp.terminals_enabled = True
# The page opens in notebooks/, and a terminal would start there; paths in the documentation are the checkout's. One
# that was opened in another folder stays there.
to_the_checkout = '[ "$PWD" != /workspace/notebooks ] || cd /workspace; exec bash --login'
c.ServerApp.terminado_settings = {"shell_command": ["/bin/bash", "-c", to_the_checkout]}
c.ServerApp.quit_button = False
c.ServerApp.shutdown_no_activity_timeout = 0

token = Path("/run/trainstation/jupyter_token").read_text().strip()
c.IdentityProvider.token = token
c.ServerApp.extra_template_paths = ["/etc/jupyter/templates"]  # the login page
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

# Parts of the page that have nothing to show: without a language server (the image has none; one that a user installs
# is there after the next start), and without a GPU.
c.ServerApp.jpserver_extensions, without = {}, []
if not any(map(shutil.which, ("pylsp", "jedi-language-server", "pyright-langserver", "basedpyright-langserver"))):
    c.ServerApp.jpserver_extensions["jupyter_lsp"] = False
    without += ["@jupyterlab/lsp-extension", "@jupyterlab/notebook-extension:language-server"]
    without += ["@jupyterlab/fileeditor-extension:language-server"]
if os.environ.get("STATION_GPUS") == "none":
    c.ServerApp.jpserver_extensions["jupyterlab_nvdashboard"] = False
    without += ["jupyterlab-nvdashboard"]


def page_config(handler, config):
    config["disabledExtensions"] += without
    return config


c.ServerApp.tornado_settings = {"page_config_hook": page_config}


# Refused for want of a token, JupyterLab's page of licences never answers: its own finish() is a coroutine, which the
# code that writes errors does not await. Here it answers like the rest.
def finish(self, chunk=None, *, _mime_type="application/json"):
    self.update_api_activity()
    self.set_header("Content-Type", _mime_type)
    return super(APIHandler, self).finish(chunk)


LicensesHandler.finish = finish


# Without the token a proxied page answers with the way to the login page: JupyterHandler sends it, and ProxyHandler
# would send it once more, which fails.
async def prepare(self):
    is_websocket = self.request.headers.get("Upgrade", "").lower() == "websocket"
    await JupyterHandler.prepare(self, _redirect_to_login=not is_websocket)


ProxyHandler.prepare = prepare


# A bookmark has no referer, and a file that is asked for without one is refused, for other sites could read it so. The
# browser says when it was the person who asked, and no page can say that; over plain HTTP to another machine it says
# nothing.
def check_referer(self):
    if self.request.headers.get("Sec-Fetch-Site") != "none" and not JupyterHandler.check_referer(self):
        raise HTTPError(403, "This link comes from outside JupyterLab: open the file in its file browser")
    return True


AuthenticatedFileHandler.check_referer = FilesHandler.check_referer = check_referer


# Tornado reads the body of a request into memory before anybody asks for the token. So a request without token or login
# cookie may bring no more than a login form takes; with one of them, uploads are as large as they always were.
MOST_WITHOUT_TOKEN = 64 * 1024


def is_known(request):
    """Whether a request has the token, in its header or address, or the cookie of a login."""
    given = [value.decode("utf-8", "replace") for value in request.query_arguments.get("token", [])]
    header = re.match(r"(?:token|bearer)\s+(.+)", request.headers.get("Authorization", ""), re.IGNORECASE)
    given += [header[1]] if header else []
    if any(hmac.compare_digest(one.encode(), token.encode()) for one in given):
        return True
    return any(
        name.startswith("username-") and decode_signed_value(c.ServerApp.cookie_secret, name, cookie.value)
        for name, cookie in request.cookies.items()
    )


def find_handler(self, request, **kwargs):
    if not is_known(request):
        request.connection.set_max_body_size(MOST_WITHOUT_TOKEN)
    return Application.find_handler(self, request, **kwargs)


ServerWebApplication.find_handler = find_handler


# Each browser has tabs and terminals of its own: JupyterLab keeps them by the name of a workspace, and would give all
# browsers the one that is called default.
COOKIE_OF_WORKSPACE = "trainstation-workspace"
open_lab = LabHandler.get


def get(self, mode=None, workspace=None, tree=None):
    if workspace is None and self.current_user:
        mine = self.get_cookie(COOKIE_OF_WORKSPACE, "")
        if not re.fullmatch(r"auto-[0-9a-f]{8}", mine):
            mine = f"auto-{secrets.token_hex(4)}"
            self.set_cookie(
                COOKIE_OF_WORKSPACE, mine, path=self.base_url, expires_days=365, httponly=True, samesite="Lax"
            )
        workspace = f"/workspaces/{mine}"
    return open_lab(self, mode, workspace, tree)


LabHandler.get = get

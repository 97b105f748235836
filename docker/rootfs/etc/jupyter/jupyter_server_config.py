# JupyterLab and the page with the runs (train/web) in the station. The port is published on 127.0.0.1 unless
# BIND_ADDRESS says otherwise.
import contextlib
import hashlib
import hmac
import importlib
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

c.ServerApp.ip = "0.0.0.0"  # inside the container; BIND_ADDRESS decides who reaches the published port
c.ServerApp.port = 8888
c.ServerApp.port_retries = 0
c.ServerApp.open_browser = False
c.ServerApp.root_dir = "/workspace"
# This person's copy of the course. Open there, so that new notebooks lie where they can be saved.
chinese = os.environ.get("STATION_LANG") == "zh_CN"
course = "projects/course/zh" if chinese else "projects/course"
if os.access(f"/workspace/{course}", os.W_OK):
    c.FileContentsManager.preferred_dir = course
if chinese:
    c.LabApp.app_settings_dir = "/etc/jupyter/zh_CN"  # a default: the menu Settings changes it
c.ServerApp.allow_remote_access = True  # the user may open any name: an address, a tunnel, a machine's name
c.ServerApp.terminals_enabled = True
# The page opens in the course, and a terminal would start there. Paths in the documentation start at the checkout's
# root, so change to it. A terminal that was opened in another folder stays there.
to_the_checkout = f'[ "$PWD" != /workspace/{course} ] || cd /workspace; exec bash --login'
c.ServerApp.terminado_settings = {"shell_command": ["/bin/bash", "-c", to_the_checkout]}
# A login opens the page. If train/ has an error, a login opens JupyterLab, and the log has the error.
if os.environ.get("STATION_LANDING") != "lab":
    with contextlib.suppress(Exception):
        importlib.import_module("train.web.handlers")
        c.LabApp.default_url = "/train/"
c.ServerApp.quit_button = False
c.ServerApp.shutdown_no_activity_timeout = 0
# A trash in the home volume would free no space, and a run's folder would be copied there as a whole.
c.FileContentsManager.delete_to_trash = False
c.FileContentsManager.always_delete_dir = True
# A forgotten kernel holds memory, also of a GPU, as long as it lives. An open browser tab does not count as use.
c.MappingKernelManager.cull_idle_timeout = int(os.environ.get("KERNEL_IDLE_HOURS") or 24) * 3600  # 0: never
c.MappingKernelManager.cull_connected = True

token = Path("/run/trainstation/jupyter_token").read_text().strip()
c.IdentityProvider.token = token
c.IdentityProvider.cookie_options = {"samesite": "Lax"}  # other sites' requests come without the login
c.ServerApp.extra_template_paths = ["/etc/jupyter/templates"]  # the login page
c.ServerApp.allow_unauthenticated_access = False  # also for extensions that forgot to ask for the token
# Each such extension would print a page of warnings, although the line above already protects it.
warnings.filterwarnings("ignore", category=JupyterServerAuthWarning)
c.PasswordIdentityProvider.allow_password_change = False  # a password would stay valid after a change of the token
# Browsers stay logged in when the container is created again, until the token changes.
c.ServerApp.cookie_secret = hashlib.sha256(b"cookies of " + token.encode()).digest()

# TensorBoard listens inside the container only. People reach it through Jupyter and its token.
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
    },
    # Only a tile in the launcher: without command and port nothing is proxied.
    "page": {
        "launcher_entry": {
            "title": "训练" if chinese else "Runs",
            "path_info": "train/",
            "icon_path": "/etc/jupyter/runs.svg",
        },
    },
}
warnings.filterwarnings("ignore", message="Server proxy page does not have a command")
c.ResourceUseDisplay.track_cpu_percent = True

# Turn off parts of the page that have nothing to show: without a language server (the image has none, but a user may
# install one), and without a GPU.
c.ServerApp.jpserver_extensions, without = {"train.web": True}, []
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


c.ServerApp.tornado_settings = {"page_config_hook": page_config, "xsrf_cookie_kwargs": {"samesite": "Lax"}}


# Without a token, JupyterLab's page of licences never answers: its own finish() is a coroutine, and the code that
# writes errors does not await it. This version answers like the other pages.
def finish(self, chunk=None, *, _mime_type="application/json"):
    self.update_api_activity()
    self.set_header("Content-Type", _mime_type)
    return super(APIHandler, self).finish(chunk)


LicensesHandler.finish = finish


# Without the token a proxied page redirects to the login page. JupyterHandler sends the redirect. ProxyHandler would
# send it a second time and fail.
async def prepare(self):
    is_websocket = self.request.headers.get("Upgrade", "").lower() == "websocket"
    await JupyterHandler.prepare(self, _redirect_to_login=not is_websocket)


ProxyHandler.prepare = prepare


# JupyterLab refuses a request for a file without a referer, because another site could read the file. A bookmark has no
# referer. So we also accept a request that the browser marks as the person's own (Sec-Fetch-Site), which no page can
# do. Browsers do not send that mark over plain HTTP to another machine.
def check_referer(self):
    if self.request.headers.get("Sec-Fetch-Site") != "none" and not JupyterHandler.check_referer(self):
        raise HTTPError(403, "This link comes from outside JupyterLab: open the file in its file browser")
    return True


AuthenticatedFileHandler.check_referer = FilesHandler.check_referer = check_referer


# Tornado reads the body of a request into memory before the token is checked. So a request without token or login
# cookie may be no larger than a login form. Other requests keep Jupyter's limit.
MOST_WITHOUT_TOKEN = 64 * 1024  # bytes


def is_known(request):
    """Check whether a request has the token, in its header or address, or the cookie of a login."""
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


# Notebooks of the course belong to git: `git pull` must not meet one with other outputs.
def refuse_the_originals(path, **_):
    folder, name = os.path.split(os.path.relpath(path, "/workspace"))
    if folder in ("notebooks", "notebooks/zh") and Path("/workspace/notebooks/zh", name).exists():
        copy = "projects/course" + folder.removeprefix("notebooks")
        raise HTTPError(403, f"{folder}/{name} is the original: open your copy, {copy}/{name}")


c.FileContentsManager.pre_save_hook = refuse_the_originals
warnings.filterwarnings("ignore", message="Overriding existing pre_save_hook")  # Jupyter executes this file twice

# Give each browser its own tabs and terminals. JupyterLab keeps them under the name of a workspace, and would give all
# browsers the workspace "default". A browser that comes for the first time sees the first notebook of the course.
COOKIE_OF_WORKSPACE = "trainstation-workspace"
WELCOME = f"{course}/01-the-station.ipynb"
open_lab = LabHandler.get


def get(self, mode=None, workspace=None, tree=None):
    if workspace is None and self.current_user:
        mine = self.get_cookie(COOKIE_OF_WORKSPACE, "")
        if not re.fullmatch(r"auto-[0-9a-f]{8}", mine):
            mine = f"auto-{secrets.token_hex(4)}"
            self.set_cookie(
                COOKIE_OF_WORKSPACE, mine, path=self.base_url, expires_days=365, httponly=True, samesite="Lax"
            )
            is_plain = tree is None and mode != "doc" and "reset" not in self.request.query_arguments
            if is_plain and Path("/workspace", WELCOME).is_file():
                self.redirect(f"{self.base_url}lab/workspaces/{mine}/tree/{WELCOME}")
                return None
        workspace = f"/workspaces/{mine}"
    return open_lab(self, mode, workspace, tree)


LabHandler.get = get

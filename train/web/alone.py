"""`train web`: the page alone, in a server of Jupyter without kernels, terminals, files or JupyterLab."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import socket
from pathlib import Path

from jupyter_server.serverapp import ServerApp
from traitlets.config import Config

from .. import screen
from ..errors import Refused
from ..run import durable, ownership
from . import handlers

ADDRESS = "127.0.0.1"


class _Server(ServerApp):
    """A server that has only the page and its login."""

    no_browser_open_file = True

    default_services = ("auth", "security")  # type: ignore[assignment]

    def load_config_file(self, suppress_errors: bool = True) -> None:  # type: ignore[override]
        """Read no configuration: it could open the server to others."""

    def write_server_info_file(self) -> None:
        """Write no file with the token beside ours."""


def serve(runs: Path, port: int) -> None:
    """Serve until a signal ends this process.

    Raises:
        Refused: the port is taken.
    """
    _check_free(port)
    token = _token()
    server = _Server(config=Config({
        "ServerApp": {
            "ip": ADDRESS, "port": port, "port_retries": 0, "open_browser": False, "default_url": "/train/",
            "answer_yes": True, "allow_root": True,
            "root_dir": str(next(place for place in (runs, *runs.parents) if place.is_dir())),
            "terminals_enabled": False, "allow_unauthenticated_access": False,
            "cookie_secret": hashlib.sha256(b"cookies of " + token.encode()).digest(), "log_level": "ERROR",
        },
        "IdentityProvider": {"token": token, "cookie_options": {"samesite": "Lax"}},
        "PasswordIdentityProvider": {"allow_password_change": False, "hashed_password": ""},
    }))  # fmt: skip
    server.initialize(argv=[], find_extensions=False)
    handlers.add(server.web_app, runs, has_lab=False)
    screen.say(f"the page: http://{ADDRESS}:{port}/train/?token={token}")
    screen.say("it is for this machine only; end it with Ctrl-C")
    server.start()


def _check_free(port: int) -> None:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((ADDRESS, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise Refused(f"port {port} is taken; give another one: train web --port N") from None
            raise Refused(f"port {port}: {error.strerror}; give another one: train web --port N") from None


def _token() -> str:
    """Return this user's token, from a file that only the user can read."""
    path = ownership.state_folder() / "web-token"
    try:
        known = durable.read_bytes(path).decode("ascii", "replace").strip()
        if len(known) >= 32 and known.isalnum() and not path.stat().st_mode & 0o077:
            return known
    except FileNotFoundError:
        pass
    token = secrets.token_hex(24)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(token + "\n")
    return token

"""`train web`: the page alone."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys

import psutil
import pytest
from web import Web

from tests.ports import free_port
from tests.train.conftest import Station

pytestmark = pytest.mark.never_forgiven
NOT_THERE = (
    "lab", "tree", "terminals/1", "api/kernels", "api/kernelspecs", "api/contents", "api/terminals", "api/sessions",
    "api/config/a", "api/shutdown", "files/run.json", "view/a", "nbconvert/html/a.ipynb", "api/events",
)  # fmt: skip


@pytest.mark.parametrize("path", NOT_THERE)
def test_nothing_else_answers(path: str, web: Web) -> None:
    assert web.ask("GET", f"/{path}", headers=web.with_token).status == 404
    assert web.ask("POST", f"/{path}", "x=1", web.with_token).status in (404, 405)


def test_the_token_is_in_no_argument_and_only_its_user_reads_it(web: Web) -> None:
    token = web.token.read_text().strip()
    assert len(token) >= 32 and f"http://127.0.0.1:{web.port}/train/?token={token}" in web.log.read_text()
    assert stat.S_IMODE(web.token.stat().st_mode) == 0o600
    assert token not in " ".join(psutil.Process(web.process.pid).cmdline())
    listening = [one.laddr.ip for one in psutil.Process(web.process.pid).net_connections() if one.status == "LISTEN"]
    assert listening == ["127.0.0.1"]


def test_the_login_leads_to_the_page(web: Web) -> None:
    answer = web.ask("GET", f"/?token={web.token.read_text().strip()}")
    assert answer.status == 302 and answer.headers["Location"].startswith("/train/")


def test_a_taken_port_is_named_in_a_line(station: Station) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        done = station("web", "--port", taken.getsockname()[1])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is taken" in done.stderr and "--port N" in done.stderr


def test_without_jupyter_server_a_line_says_so(station: Station) -> None:
    hidden = "import sys; sys.modules['jupyter_server'] = None; from train.cli import main; main(['web'])"
    done = subprocess.run(
        [sys.executable, "-c", hidden], env=os.environ | station.environment(), cwd=station.folder,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "pip install" in done.stderr

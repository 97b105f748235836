"""docker/uplot.py takes one file from the npm registry or NPM_MIRROR, and only that one."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docker" / "uplot.py"


class Other(http.server.BaseHTTPRequestHandler):
    """A mirror that sends something else."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"something else")


def fetch(folder: Path, mirror: str) -> str:
    done = subprocess.run(
        [sys.executable, SCRIPT, folder], env=os.environ | {"NPM_MIRROR": mirror, "NO_PROXY": "127.0.0.1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert not folder.exists()
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_another_file_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        said = fetch(tmp_path / "new", f"http://127.0.0.1:{server.server_port}/")
        server.shutdown()
    assert said.endswith("/uplot/-/uplot-1.6.32.tgz is not the file whose SHA-512 is in docker/uplot.py")


def test_a_mirror_that_does_not_answer_is_named(tmp_path: Path) -> None:
    for mirror in ("http://127.0.0.1:9", "mirror.invalid"):
        assert f"could not be fetched from {mirror}/uplot/" in fetch(tmp_path / "new", mirror)

"""The page in the server of JupyterLab, as in the station."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from web import Web

from tests.ports import free_port
from tests.train.conftest import Station
from tests.waiting import eventually

pytestmark = pytest.mark.never_forgiven


class Lab(Web):
    """A JupyterLab with the page, whose folder is that of a station."""

    def __init__(self, station: Station, folder: Path) -> None:
        self.port, self.token, self.log = free_port(), folder / "token", folder / "lab.log"
        self.token.write_text("a" * 40)
        config = folder / "jupyter_server_config.py"
        config.write_text(
            f'c.IdentityProvider.token = "{"a" * 40}"\nc.ServerApp.jpserver_extensions = {{"train.web": True}}\n'
            'c.ServerApp.base_url = "/some/where/"\nc.LabApp.default_url = "/some/where/train/"\n'
        )
        # without the configuration and the runs of this machine, which may be a station
        mine = {"HOME": str(folder), "JUPYTER_NO_CONFIG": "1", "TRAIN_RUNS": str(station.runs)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={self.port}",
                 "--ServerApp.port_retries=0", f"--config={config}", f"--ServerApp.root_dir={station.folder}"],
                env=os.environ | station.environment() | mine,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True,
            )  # fmt: skip
        eventually("JupyterLab answers", self._answers)

    def ask(self, method: str, path: str, body: str = "", headers: dict[str, str] | None = None):  # type: ignore[no-untyped-def]
        return super().ask(method, f"/some/where{path}", body, headers)


@pytest.fixture(scope="module")
def lab(shown: Station, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(shown, tmp_path_factory.mktemp("lab"))
    yield made
    made.close()


def test_the_login_leads_to_the_page_and_the_page_to_lab(lab: Lab) -> None:
    answer = lab.ask("GET", f"/?token={'a' * 40}")
    assert answer.status == 302 and answer.headers["Location"].startswith("/some/where/train/")
    page = lab.get("")
    assert (
        page.status == 200
        and 'href="/some/where/lab"' in page.text
        and 'href="/some/where/train/run/' in page.text  # of one of the runs of this session
    )
    assert lab.get("run/done").status == lab.get("api/run/done").status == 200
    assert lab.ask("GET", "/lab", headers=lab.with_token).status == 200


def test_a_picture_is_a_link_to_jupyters_files(lab: Lab, shown: Station) -> None:
    copy = shown.runs / "pictured"
    shutil.copytree(shown.runs / "done", copy)
    (copy / "images").mkdir()
    (copy / "images" / "sample-step-00000010.png").write_bytes(b"png")
    (link,) = lab.get("api/run/pictured").json["lists"]["pictures"]
    assert link["link"] == "/some/where/files/runs/pictured/images/sample-step-00000010.png"
    headers = lab.with_token | {"Referer": f"http://127.0.0.1:{lab.port}/some/where/train/run/pictured"}
    assert lab.ask("GET", link["link"].removeprefix("/some/where"), headers=headers).text == "png"
    shutil.rmtree(copy)


@pytest.mark.parametrize("path", ["", "run/done", "latest", "api/home", "static/0/page.js", "do/stop/done"])
def test_without_the_token_nothing_answers_there_either(path: str, lab: Lab) -> None:
    assert lab.ask("GET", f"/train/{path}").status == (403 if path.startswith(("api", "static")) else 302)
    assert lab.ask("POST", f"/train/{path}", "x=1").status == 403
    assert lab.post("do/stop/done", has_xsrf=False).status == 403 and lab.post("do/stop/done").status == 404

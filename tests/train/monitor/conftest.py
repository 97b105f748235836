"""The real exporter and the real Prometheus, both on free ports of the loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from monitored import Exporter, Prometheus

from tests.cuda import standin
from tests.cuda.cards import Cards


@pytest.fixture
def exporters(tmp_path: Path) -> Iterator[Callable[..., Exporter]]:
    """Starts exporters, and ends them with the test."""
    made: list[Exporter] = []

    def make(runs: Path, *arguments: str, env: dict[str, str] | None = None) -> Exporter:
        made.append(Exporter(runs, tmp_path / f"exporter-{len(made)}.log", *arguments, env=env))
        return made[-1]

    yield make
    for exporter in made:
        exporter.close()


def _missing(why: str) -> NoReturn:
    """Fails in CI, which tests everything; elsewhere what a machine lacks is skipped: dev installs no packages."""
    pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with prometheus and promtool: this system's, or out of Debian's package, which is not installed."""
    found = shutil.which("prometheus")
    if found and shutil.which("promtool", path=str(Path(found).parent)):
        return Path(found).parent
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        pytest.skip("there is no prometheus, nor a package archive of Debian's to take it from")
    folder = tmp_path_factory.mktemp("prometheus")
    download = ["apt-get", "download", "prometheus"]
    done = subprocess.run(download, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        subprocess.run(["apt-get", "update"], capture_output=True, check=False)
        done = subprocess.run(download, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        _missing(f"prometheus cannot be had: {done.stderr[-300:]}")
    (package,) = folder.glob("*.deb")
    subprocess.run(["dpkg", "-x", package, folder], check=True)
    return folder / "usr" / "bin"


@pytest.fixture
def gpus(tmp_path: Path) -> Cards:
    """Two GPUs, which a stand-in for the driver tells of."""
    if lacks := standin.lacks():
        pytest.skip(lacks)
    return Cards(tmp_path, 2, name='Stand-in_"A"')


@pytest.fixture
def prometheus(tools: Path, tmp_path: Path) -> Iterator[Callable[[int], Prometheus]]:
    made: list[Prometheus] = []

    def make(exporter: int) -> Prometheus:
        folder = tmp_path / f"prometheus-{len(made)}"
        folder.mkdir()
        made.append(Prometheus(tools, folder, exporter))
        return made[-1]

    yield make
    for server in made:
        server.close()

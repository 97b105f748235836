"""The real exporter and the real Prometheus, both on free ports of the loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from monitored import Exporter, Gpus, Prometheus

GRAFANA = "grafana-foundation-sdk==1769699379!11.6.0"
"""The newest one for dashboards of this kind, which Grafana 12 reads as they are."""


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


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with prometheus and promtool: this system's, or out of Debian's package, which is not installed."""
    found = shutil.which("prometheus")
    if found and shutil.which("promtool", path=str(Path(found).parent)):
        return Path(found).parent
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        pytest.skip("there is no prometheus, nor a package archive of Debian's to take it from")
    folder = tmp_path_factory.mktemp("prometheus")
    for attempt in range(2):
        done = subprocess.run(["apt-get", "download", "prometheus"], cwd=folder, capture_output=True, check=False)
        if done.returncode == 0:
            break
        if attempt or os.geteuid():  # root alone may read the lists of packages anew
            why = f"prometheus cannot be had: {done.stderr.decode()[-300:]}"
            pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
        subprocess.run(["apt-get", "update"], capture_output=True, check=False)
    (package,) = folder.glob("*.deb")
    subprocess.run(["dpkg", "-x", package, folder], check=True)
    return folder / "usr" / "bin"


@pytest.fixture(scope="session")
def grafana(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the models of dashboards that Grafana publishes (Apache-2.0), made from its own schemas."""
    folder = tmp_path_factory.mktemp("grafana")
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", GRAFANA]
    for command in ([sys.executable, "-m", "venv", folder], install):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            why = f"{GRAFANA} cannot be had: {(done.stderr or done.stdout)[-300:]}"
            pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    return python


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a library that stands for the driver's; see nvml.c."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler to make a stand-in for the driver's library with")
    folder = tmp_path_factory.mktemp("nvml")
    source, library = Path(__file__).with_name("nvml.c"), folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True)
    return folder


@pytest.fixture
def gpus(nvml: Path, tmp_path: Path) -> Gpus:
    return Gpus(nvml, tmp_path)


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

"""JupyterLab and sshd are up, come back alone when they die, and runs do not notice."""

import re
import time

import pytest
import requests
from conftest import Station, steps_on
from jupyter import Client

from tests.waiting import eventually


def test_make_up_on_a_fresh_clone_ends_healthy_and_prints_how_to_get_in(station: Station) -> None:
    printed = station.first_up.stdout
    assert station.health() == "healthy"
    eventually("the engine has seen it", station.healthy)
    assert "HTTP 000" not in station.log
    name = station.project.replace("_", "-")
    assert f"http://{name}.localhost:{station.jupyter_port}/?token={station.token}" in printed
    assert station.url in printed
    assert all(words in printed for words in ("TensorBoard", "make shell", "01-the-station"))
    assert " ".join(station.ssh_words) in printed
    assert "CPU: GPUS=none says so" in printed
    assert "train launch digits" in printed


def test_proxied_pages_without_the_token_lead_to_the_login_and_leave_no_traceback(station: Station) -> None:
    before = station.log.count("Traceback")
    for path in ("/tensorboard/", "/proxy/9477/", "/proxy/absolute/9477/metrics"):
        answer = requests.get(station.url + path, allow_redirects=False, timeout=30)
        assert (answer.status_code, answer.headers["Location"][:12]) == (302, "/login?next=")
        upgrade = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "AA",
        }
        assert requests.get(station.url + path, headers=upgrade, timeout=30).status_code == 403
    assert station.log.count("Traceback") == before


@pytest.mark.turns
def test_killed_services_come_back_alone_and_training_goes_on(station: Station, endless_run: str) -> None:
    for service, other in (("jupyter", "sshd"), ("sshd", "jupyter"), ("keeper", "sshd")):
        pid, other_pid = station.service_pid(service), station.service_pid(other)
        station.root("kill", "-KILL", str(pid))
        eventually(f"{service} is back", lambda service=service, pid=pid: station.service_pid(service) not in (0, pid))
        assert station.service_pid(other) == other_pid
        eventually("the service answers", lambda service=service: _answers(station, service))
    steps_on(station, endless_run)


@pytest.mark.turns
def test_a_login_opens_jupyterlab_while_the_page_has_an_error(station: Station) -> None:
    def lands() -> str:
        station.root("kill", "-KILL", str(station.service_pid("jupyter")))
        eventually("JupyterLab is back", lambda: _answers(station, "jupyter"))
        return requests.get(station.url, allow_redirects=False, timeout=30).headers["Location"]

    broken = station.folder / "train" / "web" / "handlers.py"
    text = broken.read_text()
    broken.write_text(f"{text}raise ValueError('not today')\n")
    try:
        assert lands().startswith("/lab")
        assert "not today" in station.log
    finally:
        broken.write_text(text)
    assert lands().startswith("/train/")


CULLS = """
from traitlets.config.loader import PyFileConfigLoader
found = PyFileConfigLoader("/etc/jupyter/jupyter_server_config.py").load_config().MappingKernelManager
print(found.cull_idle_timeout, found.cull_connected)
"""


def test_jupyterlab_deletes_at_once_and_ends_unused_kernels_after_a_day(station: Station) -> None:
    """A trash would free nothing, and a run's gigabytes would be copied into the home volume."""
    station.dev("bash", "-c", "mkdir -p projects/gone/deep && echo >projects/gone/deep/file")
    Client(station).request("DELETE", "/api/contents/projects/gone")
    assert not (station.folder / "projects" / "gone").exists()
    assert station.dev("ls", "/home/dev/.local/share/Trash", check=False).returncode != 0
    for hours, seconds in (("", 86400), ("2", 7200)):
        shown = station.dev("env", f"KERNEL_IDLE_HOURS={hours}", "python3", "-c", CULLS).stdout
        assert shown == f"{seconds} True\n"


def test_commands_that_cannot_work_inside_name_the_stations_way(station: Station) -> None:
    for command in ("apt-get install ffmpeg", "apt install ffmpeg", "sudo ls", "conda install numpy"):
        done = station.ssh(command, check=False)
        assert done.returncode == 1 and done.stderr.startswith(f"{command.split()[0]}: ")
        assert "pip install NAME" in done.stderr and 'EXTRA_APT="NAME"' in done.stderr
    assert "apt" in station.root("apt-get", "--version").stdout  # who builds on this image is root


def _answers(station: Station, service: str) -> bool:
    if service == "keeper":
        return station.service_pid(service) != 0
    if service == "sshd":
        return station.ssh("true", check=False).returncode == 0
    try:
        return requests.get(f"{station.url}/login", timeout=5).ok
    except requests.RequestException:
        return False


CONTROL = ("supervisorctl", "-c", "/etc/trainstation/supervisord.conf")


def test_health_says_which_service_does_not_answer(station: Station) -> None:
    station.root(*CONTROL, "stop", "jupyter")
    try:
        assert station.health() == "JupyterLab does not answer on port 8888"
        assert "health: JupyterLab does not answer on port 8888" in station.log
    finally:
        station.root(*CONTROL, "start", "jupyter")
    station.wait_healthy()


def test_health_notices_a_stopped_keeper(station: Station) -> None:
    pid = str(station.service_pid("keeper"))
    station.root("kill", "-STOP", pid)
    try:
        for path in ("/run/supervisord.pid", "/home/dev/.local/state/trainstation/keeper"):  # time goes by
            station.root("touch", "--date", "31 seconds ago", path)
        assert station.health().startswith("the keeper gives no sign of life")
    finally:
        station.root("kill", "-CONT", pid)
    station.wait_healthy()


def test_keeper_and_exporter_run_again_by_themselves_once_train_is_mended(station: Station) -> None:
    broken = [station.folder / "train" / name for name in ("launcher/keeper.py", "monitor/prometheus.py")]
    whole = [path.read_text() for path in broken]
    try:
        for path, text in zip(broken, whole, strict=True):
            path.write_text(f"{text}\ndef (\n")
        for service in ("keeper", "exporter"):
            station.root("kill", "-KILL", str(station.service_pid(service)))
        eventually("both have failed", lambda: station.log.count(" does not run: SyntaxError: ") == 2)
        assert re.fullmatch(r"the keeper does not run: SyntaxError: .*\(keeper.py, line \d+\)", station.health())
        time.sleep(6)  # they have tried again
        assert station.log.count("trying again every few seconds") == 2
    finally:
        for path, text in zip(broken, whole, strict=True):
            path.write_text(text)
            eventually("the mended one runs", lambda: "keeper" not in station.health(), 20)
    eventually("the other one runs", lambda: station.health() == "healthy", 20)


def test_what_dev_writes_below_run_takes_no_room_from_root(station: Station) -> None:
    station.dev("dd", "if=/dev/zero", "of=/run/dev/big", "bs=1M", check=False)
    try:
        assert station.health().startswith("/run/dev is full")
        station.root("dd", "if=/dev/zero", "of=/run/probe", "bs=1M", "count=8")
    finally:
        station.root("rm", "-f", "/run/probe", "/run/dev/big")
    station.wait_healthy()


def test_health_notices_gpus_that_are_asked_for_and_gone(station: Station) -> None:
    done = station.root("env", "STATION_GPUS=all", "station-health", check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("GPUs (all) were asked for, but nvidia-smi fails")
    station.wait_healthy()


def test_health_notices_a_full_disk(station: Station) -> None:
    done = station.root("env", "MIN_FREE_MB=1000000000", "station-health", check=False)
    assert done.returncode == 1
    assert "MB left: remove runs" in done.stdout
    station.wait_healthy()


def test_the_mounted_package_wins(station: Station) -> None:
    done = station.dev("python", "-c", "import train; print(train.__file__)", check=True)
    assert done.stdout.strip() == "/workspace/train/__init__.py"
    changed = station.folder / "train" / "__init__.py"
    text = changed.read_text()
    changed.write_text(text + "\nNEW = 42\n")
    try:
        assert station.ssh("python -c 'import train; print(train.NEW)'").stdout == "42\n"
    finally:
        changed.write_text(text)


def test_two_processes_share_more_memory_than_dockers_default(station: Station) -> None:
    """Loader workers hand tensors over in /dev/shm; 64 MB, Docker's default, makes them die."""
    code = (
        "import torch\n"
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Big(Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i): return torch.full((32 << 20,), i, dtype=torch.uint8)\n"
        "print(sum(int(b[0, 0]) for b in DataLoader(Big(), batch_size=4, num_workers=2)))\n"
    )
    assert station.dev("python", "-c", code).stdout.strip() == "4"


def test_there_is_what_compiled_models_are_built_with(station: Station) -> None:
    """torch.compile calls the C++ compiler at run time, with OpenMP and Python's headers."""
    include = "$(python3 -c 'import sysconfig; print(sysconfig.get_paths()[\"include\"])')"
    source = "printf '#include <Python.h>\\n#include <omp.h>\\n'"
    station.dev("bash", "-c", f'{source} | g++ -x c++ -shared -fPIC -fopenmp -I"{include}" -o /tmp/compiled.so -')


def test_packages_a_person_adds_survive_a_new_container(station: Station) -> None:
    (station.folder / "requirements-extra.txt").write_text("einops==0.8.1\n")
    try:
        station.root(*CONTROL, "start", "packages")  # as each start of the container does
        eventually("the package is installed", lambda: "requirements-extra.txt is installed" in station.log)
        station.compose("up", "--detach", "--force-recreate", "--no-build")
        station.wait_healthy()
        assert station.ssh("python -c 'import einops; print(einops.__version__)'").stdout == "0.8.1\n"
    finally:
        (station.folder / "requirements-extra.txt").unlink()


def test_the_single_node_script_trains_to_the_end(station: Station) -> None:
    done = station.ssh("/workspace/scripts/run-single-node.sh digits --name single --epochs 1")
    assert "single finished" in done.stdout + done.stderr
    assert station.show("single")["world_size"] == 2

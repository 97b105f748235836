"""What is wrong is said in one line that names the remedy, and nothing half made is left."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Station, run

from tests.waiting import eventually

pytestmark = pytest.mark.never_forgiven


@pytest.fixture(scope="module")
def fresh(station: Station, make_station: Callable[..., Station]) -> Station:
    """A checkout beside the one that the image was built from: only what is wrong keeps its station from starting."""
    return make_station("bad")


def refused(station: Station, **settings: str) -> str:
    """The one line that `make up` with these settings says. Checks that nothing was made."""
    before = sorted(path.name for path in station.folder.iterdir())
    env = {**station.env, **settings}
    done = run("make", "-s", "up", cwd=station.folder, env=env, check=False)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(lines) == 1, done.stderr
    assert sorted(path.name for path in station.folder.iterdir()) == before
    nothing_left(station)
    return lines[0]


def nothing_left(station: Station) -> None:
    for kind in ("container", "volume", "network"):
        every = ["-a"] if kind == "container" else []
        listed = run("docker", kind, "ls", "-q", *every, "--filter", f"name={station.project}")
        assert listed.stdout == "", f"a {kind} was left"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"GPUS": "0"}, "GPUS=0"),
        ({"GPUS": "0,,1"}, "GPUS=0,,1"),
        ({"GPUS": "all"}, "GPUS=all, but the engine"),
        ({"BIND_ADDRESS": "300.1.1.1"}, "BIND_ADDRESS=300.1.1.1 is no"),
        ({"BIND_ADDRESS": "192.0.2.1"}, "192.0.2.1"),
        ({"JUPYTER_PORT": "70000"}, "Invalid hostPort: 70000"),
        ({"SSH_PORT": "http"}, "Invalid hostPort: http"),
        ({"MEMORY": "lots"}, "invalid size: 'lots'"),
        ({"SHM_SIZE": "big"}, "invalid size: 'big'"),
        ({"CPUS": "9999"}, "this machine has"),
        ({"PIDS_LIMIT": "3"}, "it is a number from 500"),
        ({"MIN_FREE_MB": "99999999"}, "MB left, less than MIN_FREE_MB=99999999"),
        ({"DATASETS_DIR": "/nowhere/data"}, "DATASETS_DIR=/nowhere/data is no folder"),
        ({"RUNS_DIR": "/etc/hostname"}, "is no folder"),
        ({"CA_BUNDLE": "/etc/hostname"}, "holds no certificate"),
        ({"STATION_EXPORTER": "maybe"}, "STATION_EXPORTER=maybe: it is on or off"),
        ({"STATION_LANG": "de"}, "STATION_LANG=de: it is en or zh_CN"),
        ({"STATION_LANDING": "tree"}, "STATION_LANDING=tree: it is page or lab"),
        (
            {"NPM_MIRROR": "mirror.invalid"},
            "NPM_MIRROR=mirror.invalid is no address: it begins with http:// or https://",
        ),
        (
            {"BASE_IMAGE": "REPLACE_WITH_A_MIRROR/debian"},
            "BASE_IMAGE=REPLACE_WITH_A_MIRROR/debian in .env is a placeholder",
        ),
        ({"HF_ENDPOINT": "https://REPLACE_WITH_A_MIRROR"}, "HF_ENDPOINT=https://REPLACE_WITH_A_MIRROR in .env is"),
        ({"STATION_IMAGE": "of-nobody/station:1"}, "STATION_IMAGE=of-nobody/station:1 is neither here nor"),
        ({"PROTECT_CHECKOUT": "True"}, "PROTECT_CHECKOUT=True: it is true or false"),
        ({"CLUSTER_ADDRESS": "10.0.0.51"}, "CLUSTER_NETWORK"),
        ({"CLUSTER_NETWORK": "no-such", "CLUSTER_ADDRESS": "10.0.0.51"}, "no-such is no network of this engine"),
        ({"SSH_PUBLIC_KEY": "/nowhere/key.pub"}, "cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_setting_that_cannot_be_meant(fresh: Station, settings: dict[str, str], words: str) -> None:
    assert words in refused(fresh, **settings)


@pytest.mark.parametrize("name", ["JUPYTER_PORT", "SSH_PORT"])
def test_a_port_that_is_taken(fresh: Station, name: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        said = refused(fresh, **{name: port})
    assert f"port {port} is taken" in said
    assert name in said


def test_a_private_key_in_the_place_of_a_public_one(fresh: Station, tmp_path: Path) -> None:
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "pair"))
    assert "holds no public key" in refused(fresh, SSH_PUBLIC_KEY=str(tmp_path / "pair"))


def test_an_index_with_a_password(fresh: Station) -> None:
    said = refused(fresh, PIP_INDEX_URL="https://me:hush@index.invalid/simple")
    assert "PIP_INDEX_URL" in said
    assert "hush" not in said


def test_a_data_folder_that_is_not_there_without_make(fresh: Station) -> None:
    env = {**fresh.env, "DATASETS_DIR": "/nowhere/data"}
    files = ("-f", "docker-compose.yml", "-f", "docker-compose.cpu.yml")
    done = run("docker", "compose", *files, "up", "-d", "--no-build", cwd=fresh.folder, env=env, check=False)
    run("docker", "compose", *files, "down", "--volumes", cwd=fresh.folder, env=env)
    assert done.returncode != 0
    assert "bind source path does not exist: /nowhere/data" in done.stderr
    assert not Path("/nowhere").exists()


FORKS = """
import subprocess
begun = []
try:
    for _ in range(1000):
        begun.append(subprocess.Popen(["sleep", "60"]))
except OSError:
    pass
for one in begun:
    one.kill()
print(len(begun))
"""


def test_limits_hold_inside(make_station: Callable[..., Station]) -> None:
    station = make_station("limited", MEMORY="2g", CPUS="1.5", PIDS_LIMIT="600", SHM_SIZE="1g")
    station.make("up")
    limits = "{{.HostConfig.Memory}} {{.HostConfig.NanoCpus}} {{.HostConfig.PidsLimit}} {{.HostConfig.ShmSize}}"
    assert station.inspect(limits) == f"{2 << 30} 1500000000 600 {1 << 30}"
    assert 400 < int(station.dev("python3", "-c", FORKS).stdout) < 600
    memory = {
        one["check"]: one["seen"] for one in json.loads(station.dev("train", "doctor", "--json", check=False).stdout)
    }
    assert memory["memory"].startswith("2 GiB in this container")
    (station.folder / "projects" / "eats.py").write_text("x = bytearray(b'1') * (3 << 30)\n")
    station.dev("train", "launch", "--script", "projects/eats.py", "--name", "eats")
    eventually("it has died", lambda: station.show("eats").get("state") == "failed")
    assert "the limit of 2 GiB of its container or control group" in str(station.show("eats")["reason"])
    station.make("down")


def test_runs_that_another_user_owns(fresh: Station, tmp_path: Path) -> None:
    """Only inside is it seen that dev may not write there; the reason comes out, and the container goes away."""
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o755)
    os.chown(theirs, 999, 999)
    env = {**fresh.env, "RUNS_DIR": str(theirs)}
    done = run("make", "-s", "up", cwd=fresh.folder, env=env, check=False, timeout=1500)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(lines) == 1
    assert "cannot write to /workspace/runs, which belongs to user 999" in lines[0]
    nothing_left(fresh)
    assert list(theirs.iterdir()) == []


def test_without_an_engine_one_line_names_the_ways_out(fresh: Station) -> None:
    said = refused(fresh, DOCKER_HOST="unix:///nowhere/docker.sock")
    assert "make engine" in said and "make demo" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tmpfs", "/workspace/runs:size=10m"), "MB left: free some, or lower MIN_FREE_MB"),
        (("-e", "DEV_UID=0"), "DEV_UID=0: dev cannot be root"),
        (("-e", "DEV_GID=4294967295"), "both are numbers"),
        (("-e", "GPUS=2"), "with docker compose alone set GPU_IDS=0,1"),
        (("--user", "1234"), "root must start the services: leave out --user"),
        (
            ("--cap-drop", "ALL"),
            "root lacks capabilities in this container: add --cap-add CHOWN --cap-add DAC_OVERRIDE",
        ),
        (("--read-only",), "is read-only: leave out --read-only"),
        (("--tmpfs", "/workspace:ro"), "/workspace is not writable: is it mounted read-only? Runs need a folder"),
        (
            ("-e", "LD_LIBRARY_PATH=/usr/lib:/workspace/lib"),
            "/workspace/lib: root's programs would load it",
        ),
        (("-e", "LD_PRELOAD=/home/dev/x.so"), "/home/dev/x.so: root's programs would load it"),
    ],
)
def test_a_container_started_by_hand_refuses_too(fresh: Station, options: tuple[str, ...], said: str) -> None:
    done = run("docker", "run", "--rm", *options, "trainstation:runtime", check=False)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("ERROR: ld.so")]
    assert (done.returncode, len(lines)) == (2, 1), done.stderr
    assert said in lines[0]
    assert done.stdout == ""


NEEDED = ("SETUID", "SETGID", "CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SYS_CHROOT")


@pytest.mark.parametrize(
    "options",
    [
        ("--user", "1234", "--cap-drop", "ALL", "--read-only"),
        ("--cap-drop", "ALL", *(f"--cap-add={name}" for name in NEEDED), "--security-opt", "no-new-privileges"),
    ],
)
def test_what_a_command_prints_is_all_that_is_on_stdout(fresh: Station, options: tuple[str, ...]) -> None:
    line = "echo $((6 * 7)) as $(id -u); cd /workspace"
    done = run("docker", "run", "--rm", *options, "trainstation:runtime", "bash", "-c", line)
    assert done.stdout == f"42 as {'1234' if '--user' in options else '1000'}\n"


def test_full_places_inside_do_not_keep_the_services_from_starting(make_station: Callable[..., Station]) -> None:
    """/tmp and the home folder are full to the last byte; the way in is needed all the more."""
    station = make_station("full")
    full = {"tmpfs": ["/tmp:size=64k", "/run:mode=755,size=64m,nosuid,nodev"]}
    home = {"driver": "local", "driver_opts": {"type": "tmpfs", "device": "tmpfs", "o": "size=1m"}}
    override = station.folder.parent / "full.yml"
    override.write_text(json.dumps({"services": {"station": full}, "volumes": {"home": home}}))
    files = [word for f in ("docker-compose.yml", "docker-compose.cpu.yml", str(override)) for word in ("-f", f)]
    run("docker", "compose", *files, "up", "-d", "--no-build", cwd=station.folder, env=station.env)
    station.wait_healthy()
    dd = "dd if=/dev/zero of=$place/full bs=1k 2>/dev/null"
    fill = f"for place in /tmp /home/dev; do {dd}; df --output=avail $place | tail -n 1; done"
    assert station.dev("bash", "-c", fill).stdout.split() == ["0", "0"]
    run("docker", "restart", "--time", "5", station.container)  # /tmp is empty again, home is not
    station.dev("bash", "-c", fill)
    station.wait_healthy()
    assert station.ssh("echo in").stdout == "in\n"

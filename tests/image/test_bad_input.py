"""What is wrong is said in one line that names the remedy, and nothing half made is left."""

import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Station, run


@pytest.fixture(scope="module")
def fresh(station: Station, make_station: Callable[..., Station]) -> Station:
    """A checkout beside the one that the image was built from: only what is wrong keeps its station from starting."""
    return make_station("bad")


def refused(station: Station, **settings: str) -> str:
    """`make up` with these settings: the one line it says. Checks that nothing was made."""
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


@pytest.mark.parametrize("gpus", ["0", "-1", "two", "0,,1", ",1", "1.5", "all,0", "2 3"])
def test_gpus_that_mean_nothing(fresh: Station, gpus: str) -> None:
    assert f"GPUS={gpus}" in refused(fresh, GPUS=gpus)


def test_gpus_where_the_engine_has_none(fresh: Station) -> None:
    assert "GPUS=all, but the engine" in refused(fresh, GPUS="all")


@pytest.mark.parametrize("address", ["localhost", "300.1.1.1", "1.2.3", "::1", "127.0.0.1:80"])
def test_an_address_that_is_none(fresh: Station, address: str) -> None:
    assert f"BIND_ADDRESS={address} is no address" in refused(fresh, BIND_ADDRESS=address)


def test_an_address_this_machine_does_not_have(fresh: Station) -> None:
    assert "192.0.2.1" in refused(fresh, BIND_ADDRESS="192.0.2.1")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"CLUSTER_ADDRESS": "10.0.0.51"}, "set CLUSTER_NETWORK"),
        ({"CLUSTER_NETWORK": "no-such"}, "CLUSTER_ADDRESS=: it is the address"),
        (
            {"CLUSTER_NETWORK": "no-such", "CLUSTER_ADDRESS": "10.0.0.256"},
            "CLUSTER_ADDRESS=10.0.0.256: it is the address",
        ),
        (
            {"CLUSTER_NETWORK": "no-such", "CLUSTER_ADDRESS": "10.0.0.08"},
            "CLUSTER_ADDRESS=10.0.0.08: it is the address",
        ),
        ({"CLUSTER_NETWORK": "no-such", "CLUSTER_ADDRESS": "10.0.0.51"}, "no-such is no network of this engine"),
        ({"CLUSTER_NETWORK": "--help", "CLUSTER_ADDRESS": "10.0.0.51"}, "--help is no network of this engine"),
        ({"CLUSTER_NETWORK": "bridge", "CLUSTER_ADDRESS": "172.17.0.9"}, "bridge is the engine's own"),
    ],
)
def test_a_network_of_machines_that_cannot_be_had(fresh: Station, settings: dict[str, str], words: str) -> None:
    assert words in refused(fresh, **settings)


@pytest.mark.parametrize("name", ["JUPYTER_PORT", "SSH_PORT"])
@pytest.mark.parametrize("port", ["0", "70000", "http"])
def test_a_port_that_is_none(fresh: Station, name: str, port: str) -> None:
    assert f"{name}={port}" in refused(fresh, **{name: port})


@pytest.mark.parametrize("name", ["JUPYTER_PORT", "SSH_PORT"])
def test_a_port_that_is_taken(fresh: Station, name: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        said = refused(fresh, **{name: port})
    assert f"port {port} is taken" in said
    assert name in said


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("MEMORY", "lots", "it is a size such as 64g"),
        ("MEMORY", "10m", "1g or more"),
        ("SHM_SIZE", "big", "it is a size such as 16g"),
        ("CPUS", "two", "it is a number of processors"),
        ("CPUS", "9999", "this machine has"),
        ("CPUS", "0.0", "it is a number of processors"),
        ("PIDS_LIMIT", "3", "it is a number from 512"),
    ],
)
def test_a_limit_that_cannot_be_meant(fresh: Station, name: str, value: str, words: str) -> None:
    line = refused(fresh, **{name: value})
    assert f"{name}={value}: " in line and words in line


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
    """Shared memory that is more than half of the memory becomes half of it, and make up says so."""
    station = make_station("limited", MEMORY="2g", CPUS="1.5", PIDS_LIMIT="600", SHM_SIZE="3g")
    printed = station.make("up").stdout
    assert "SHM_SIZE=3g is more than half of the memory (2048 MB): it becomes 1024m" in printed
    limits = "{{.HostConfig.Memory}} {{.HostConfig.NanoCpus}} {{.HostConfig.PidsLimit}} {{.HostConfig.ShmSize}}"
    assert station.inspect(limits) == f"{2 << 30} 1500000000 600 {1 << 30}"
    assert 400 < int(station.dev("python3", "-c", FORKS).stdout) < 600
    station.make("down")


def test_a_data_folder_that_is_not_there(fresh: Station) -> None:
    assert "DATASETS_DIR=/nowhere/data is no folder" in refused(fresh, DATASETS_DIR="/nowhere/data")


def test_a_data_folder_that_is_not_there_without_make(fresh: Station) -> None:
    env = {**fresh.env, "DATASETS_DIR": "/nowhere/data"}
    files = ("-f", "docker-compose.yml", "-f", "docker-compose.cpu.yml")
    done = run("docker", "compose", *files, "up", "-d", "--no-build", cwd=fresh.folder, env=env, check=False)
    run("docker", "compose", *files, "down", "--volumes", cwd=fresh.folder, env=env)
    assert done.returncode != 0
    assert "bind source path does not exist: /nowhere/data" in done.stderr
    assert not Path("/nowhere").exists()


def key_files(folder: Path) -> dict[str, str]:
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "pair"))
    (folder / "garbage.pub").write_text("not a key\n")
    return {
        str(folder / "missing.pub"): "cannot be read",
        str(folder): "cannot be read",
        str(folder / "pair"): "is a private key",
        str(folder / "garbage.pub"): "holds no public key",
    }


def test_a_key_file_that_is_no_public_key(fresh: Station, tmp_path: Path) -> None:
    for path, reason in key_files(tmp_path).items():
        assert reason in refused(fresh, SSH_PUBLIC_KEY=path)


def test_an_index_with_a_password(fresh: Station) -> None:
    said = refused(fresh, PIP_INDEX_URL="https://me:hush@index.invalid/simple")
    assert "PIP_INDEX_URL" in said
    assert "hush" not in said


def test_certificates_that_are_none(fresh: Station) -> None:
    assert "holds no certificate" in refused(fresh, CA_BUNDLE="/etc/hostname")


def test_runs_that_are_no_folder(fresh: Station, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is no folder" in refused(fresh, RUNS_DIR=str(tmp_path / "file"))


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


def test_too_little_space(fresh: Station) -> None:
    assert "MB left, less than MIN_FREE_MB=99999999" in refused(fresh, MIN_FREE_MB="99999999")


def start(*options: str) -> subprocess.CompletedProcess[str]:
    """The image by itself, as other tools than make and compose start it."""
    return run("docker", "run", "--rm", *options, "trainstation:runtime", "true", check=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tmpfs", "/workspace/runs:size=10m"), "MB left: free some, or lower MIN_FREE_MB"),
        (("--tmpfs", "/workspace/runs:ro"), "/workspace/runs is not writable: is it mounted read-only?"),
        (("-e", "DEV_UID=me"), "DEV_UID=me"),
        (("-e", "DEV_UID=0"), "nobody works as root in here"),
        (("-e", "DEV_UID=00"), "nobody works as root in here"),
        (("-e", "DEV_UID=4294967296"), "both are numbers"),
        (("-e", "DEV_GID=4294967295"), "both are numbers"),
        (("-e", "GPUS=2"), "with docker compose alone say GPU_IDS=0,1"),
        (("-e", "GPUS=two"), "GPUS=two: it is all, none, a count"),
        (("-e", "MIN_FREE_MB=lots"), "MIN_FREE_MB=lots is no number"),
    ],
)
def test_a_container_started_by_hand_refuses_too(fresh: Station, options: tuple[str, ...], said: str) -> None:
    done = start(*options)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("jupyter_token", "short", "has to be 16 or more"),
        ("jupyter_token", "with blank in it, and long", "has to be 16 or more"),
        ("authorized_keys", "not a key\n", "holds no public key"),
    ],
)
def test_secret_files_that_cannot_be_meant(fresh: Station, tmp_path: Path, name: str, text: str, said: str) -> None:
    secrets = tmp_path / "workspace" / ".secrets"
    secrets.mkdir(parents=True)
    (secrets / name).write_text(text)
    done = start("-v", f"{tmp_path}/workspace:/workspace")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert [path.name for path in (tmp_path / "workspace").rglob("*")] == [".secrets", name]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--user", "1234"), "the services are started by root, who becomes user dev: leave out --user"),
        (("--cap-drop", "ALL"), "root may do too little in here: add --cap-add CHOWN --cap-add DAC_OVERRIDE"),
        (("--cap-drop", "SETUID"), "root may do too little in here: add --cap-add SETUID, as"),
        (("--read-only",), "is read-only: leave out --read-only"),
        (("--tmpfs", "/workspace:ro"), "/workspace is not writable: is it mounted read-only? Runs need a folder"),
        (("-e", "LD_LIBRARY_PATH=/usr/lib:/workspace/lib"), "LD_LIBRARY_PATH names /workspace/lib, which root"),
        (("-e", "LD_PRELOAD=/home/dev/x.so"), "LD_PRELOAD names /home/dev/x.so, which root"),
    ],
)
def test_services_that_cannot_be_started_say_why(fresh: Station, options: tuple[str, ...], said: str) -> None:
    done = run("docker", "run", "--rm", *options, "trainstation:runtime", check=False)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("ERROR: ld.so")]
    assert (done.returncode, len(lines)) == (2, 1), done.stderr
    assert said in lines[0]
    assert done.stdout == ""


NEEDED = ("SETUID", "SETGID", "CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SYS_CHROOT")


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--user", "1234"),
        ("--user", "1234", "--cap-drop", "ALL", "--read-only"),
        ("--cap-drop", "ALL", *(f"--cap-add={name}" for name in NEEDED), "--security-opt", "no-new-privileges"),
        ("--tmpfs", "/tmp:size=4k", "--env", "HTTP_PROXY=http://proxy.invalid:3128"),
        (
            "--env",
            "BASH_ENV=/nowhere",
            "--env",
            "PYTHONPATH=/nowhere",
            "--env",
            "TRAIN_RUNS=/tmp/runs",
            "--tmpfs",
            "/tmp",
        ),
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
    up = ("docker", "compose", *files, "up", "-d", "--no-build")
    run(*up, cwd=station.folder, env=station.env)
    station.wait_healthy()
    dd = "dd if=/dev/zero of=$place/full bs=1k 2>/dev/null"
    fill = f"for place in /tmp /home/dev; do {dd}; df --output=avail $place | tail -n 1; done"
    assert station.dev("bash", "-c", fill).stdout.split() == ["0", "0"]
    run("docker", "restart", "--time", "5", station.container)  # /tmp is empty again, home is not
    station.dev("bash", "-c", fill)
    station.wait_healthy()
    assert station.ssh("echo in").stdout == "in\n"

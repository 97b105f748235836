"""Checks of packages, limits, disk, clock and network: each fails for real where it can, and passes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from machines import by_name, machine, program

from tests.train.verbs import install, plug_in
from train import infiniband
from train.doctor import disk, host, network, packages
from train.doctor.finding import NOT_APPLICABLE, OK, PROBLEM, WARNING, Finding, as_text, exit_code
from train.doctor.machine import Machine
from train.nodes import address

ROOT = Path(__file__).parents[3]


def doctor(*arguments: str, cwd: Path, env: dict[str, str] | None = None, before: str = "") -> dict[str, Finding]:
    """What `train doctor --json` finds, after a line of shell in its own shell."""
    outer = {key: value for key, value in os.environ.items() if not key.startswith("TRAIN_")}
    command = f'{before}\nexec "{sys.executable}" -m train doctor --json {" ".join(arguments)}'
    done = subprocess.run(
        ["bash", "-c", command], cwd=cwd, env=outer | {"PYTHONPATH": str(ROOT)} | (env or {}), capture_output=True,
        text=True, check=False, timeout=120,
    )  # fmt: skip
    findings = [Finding(**each) for each in json.loads(done.stdout)]
    assert done.returncode == exit_code(findings), done.stderr
    return by_name(findings)


def test_a_healthy_machine_is_well(tmp_path: Path) -> None:
    bad = [finding for finding in doctor(cwd=tmp_path).values() if finding.verdict == PROBLEM]
    assert not [finding for finding in bad if finding.check not in ("Docker", "docker compose", "docker buildx")]


def test_it_imports_no_torch() -> None:
    """Versions come from metadata: importing torch alone takes seconds. Nor what a host's Python 3.8 has not."""
    loaded = "print(*{'torch', 'numpy', 'pydantic', 'tomllib'} & set(sys.modules))"
    code = f"import sys, train.cli, train.commands.parser, train.commands.doctor; {loaded}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []


def test_the_hosts_python_may_know_nothing_but_its_standard_library(tmp_path: Path) -> None:
    # -I -S: no site-packages, nothing of the environment
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from train.cli import main; main(['doctor', '--json'])"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode in (0, 1) and not done.stderr, done.stderr
    assert {each["check"] for each in json.loads(done.stdout)} >= {"shared memory", "clock", "room on disk"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rendezvous", "node0"],
        ["--job", "--rendezvous", "localhost:29400"],
        ["everything"],
    ],
)
def test_a_wrong_request_is_refused_in_a_line(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "train", "doctor", *arguments],
        cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


# packages


def test_a_second_cudnn_before_torchs_own(tmp_path: Path) -> None:
    (tmp_path / "libcudnn.so.8").touch()
    finding = doctor(cwd=tmp_path, env={"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"})["LD_LIBRARY_PATH"]
    assert finding.verdict == PROBLEM
    assert "two cuDNNs" in finding.seen
    # the remedy, pasted
    mended = doctor(cwd=tmp_path, env={"LD_LIBRARY_PATH": str(tmp_path)}, before=finding.remedy)
    assert mended["LD_LIBRARY_PATH"].verdict == OK


def test_a_torch_without_cuda_where_gpus_are_wanted(tmp_path: Path) -> None:
    home, folder = tmp_path, tmp_path / "other"
    info = folder / "torch-2.7.1+cpu.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.7.1+cpu\n")
    (folder / "torch").mkdir()
    # as its wheel has it
    (folder / "torch" / "version.py").write_text("__version__ = '2.7.1+cpu'\ncuda: Optional[str] = None\n")
    finding = doctor(cwd=home, env={"STATION_GPUS": "all", "PYTHONPATH": f"{folder}:{ROOT}"})["torch"]
    assert finding.verdict == PROBLEM
    assert "without CUDA" in finding.seen


def test_a_torchvision_for_another_torch(tmp_path: Path) -> None:
    info = tmp_path / "torchvision-0.20.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.20.1\n")
    findings = doctor(cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert findings["torchvision"].verdict == PROBLEM
    assert "0.22" in findings["torchvision"].remedy


def test_kernels_of_wheels() -> None:
    assert packages.capabilities("12.6") == ((5, 0), (9, 0))
    assert packages.capabilities("12.8")[1] >= (12, 0)
    assert packages.capabilities("13.0")[0] == (7, 5)


# limits


def test_few_open_files(tmp_path: Path) -> None:
    finding = doctor(cwd=tmp_path, before="ulimit -Sn 256")["open files"]
    assert finding.verdict == PROBLEM
    mended = doctor(cwd=tmp_path, before=f"ulimit -Sn 256; {finding.remedy}")
    assert mended["open files"].verdict == OK


def test_locked_memory_matters_where_infiniband_is(tmp_path: Path) -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "from pathlib import Path; from train.doctor import limits; from train.doctor.machine import Machine\n"
        "found = limits.checks(Machine({}, Path(sys.argv[1])))\n"
        "print(*[each.verdict for each in found if each.check == 'locked memory'])"
    )
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "dev/shm").mkdir(parents=True)
    for root, verdict in ((tmp_path, PROBLEM), (Path("/"), OK)):
        if root == Path("/") and Machine().list("/sys/class/infiniband"):
            continue
        done = subprocess.run(
            [sys.executable, "-c", code, str(root)], capture_output=True, text=True, cwd=ROOT, check=True
        )
        assert done.stdout.strip() == verdict


# disk


def test_a_folder_of_runs_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    finding, _clock = disk.checks(Machine(), tmp_path / "runs")
    assert finding.verdict == PROBLEM


def test_a_folder_of_runs_of_somebody_else() -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from train.doctor import disk; from train.doctor.machine import Machine\n"
        "if os.geteuid() == 0: os.setuid(65534)  # whom modes keep out\n"
        "found = next(disk.checks(Machine(), Path(sys.argv[1]))); print(found.verdict, found.seen, found.remedy)"
    )
    with tempfile.TemporaryDirectory() as folder:  # not pytest's, whose parents nobody else may enter
        Path(folder).chmod(0o555)
        command = [sys.executable, "-c", code, folder]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        Path(folder).chmod(0o755)
    assert done.stdout.startswith(PROBLEM), done.stderr
    assert "chown" in done.stdout


def test_what_a_folder_lies_on(tmp_path: Path) -> None:
    mounts = (
        "22 1 0:20 / / rw - overlay overlay rw\n23 22 0:21 / /workspace/runs rw - ext4 /dev/sda1 rw\n"
        "24 22 0:22 / /fast rw - tmpfs tmpfs rw\n"
    )
    inside = machine(tmp_path, {"proc/self/mountinfo": mounts}, TRAINSTATION_IMAGE="1")
    assert disk.mount_of(inside, Path("/workspace/runs/a")) == ("/workspace/runs", "ext4")
    assert disk.mount_of(inside, Path("/workspace/runs2")) == ("/", "overlay")
    assert disk._file_system(inside, Path("/workspace/runs")).verdict == OK
    assert disk._file_system(inside, Path("/fast")).verdict == WARNING
    assert disk._file_system(inside, Path("/home")).verdict == WARNING


# clock


def test_a_clock_that_has_gone_backwards(tmp_path: Path) -> None:
    record = tmp_path / "run" / "run.json"
    record.parent.mkdir()
    record.touch()
    assert by_name(list(disk.checks(Machine(), tmp_path)))["clock"].verdict == OK
    os.utime(record, (time.time() + 7200, time.time() + 7200))
    assert by_name(list(disk.checks(Machine(), tmp_path)))["clock"].verdict == PROBLEM


# network


def names(place: str, **environ: str) -> dict[str, Finding]:
    return by_name(list(network.checks(Machine(environ), address.parse(place))))


def test_a_name_that_does_not_resolve() -> None:
    finding = names("no-such-host.invalid:29400")["rendezvous name"]
    assert finding.verdict == PROBLEM
    assert "/etc/hosts" in finding.remedy


def test_a_port_here_is_free_where_one_can_listen_on_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert names(f"127.0.0.1:{port}")["rendezvous port"].verdict == WARNING  # the run's own node 0, or in its way
    assert "is free" in names(f"127.0.0.1:{port}")["rendezvous port"].seen


def test_a_host_whose_name_is_its_loopback() -> None:
    finding = network._loopback(address.Place("node0", 29400), "127.0.1.1", True)
    assert finding.verdict == PROBLEM
    assert "no other machine can reach" in finding.seen


def test_the_interface_that_leads_there_and_one_that_does_not() -> None:
    assert names("127.0.0.1:29400")["interface"].seen.startswith("lo ")
    assert names("[::1]:29400")["rendezvous name"].verdict == OK or not socket.has_ipv6
    wrong = names("127.0.0.1:29400", NCCL_SOCKET_IFNAME="=eth7", GLOO_SOCKET_IFNAME="lo")
    assert wrong["NCCL_SOCKET_IFNAME"].verdict == PROBLEM
    assert wrong["NCCL_SOCKET_IFNAME"].remedy == "export NCCL_SOCKET_IFNAME==lo"
    assert wrong["GLOO_SOCKET_IFNAME"].verdict == OK
    # of gloo's value the doctor and gloo itself say the same: tests/train/test_variables.py
    for value in ("^docker", "=lo", "l"):
        (alone,) = [
            one for one in network.names_of_interfaces(Machine({"GLOO_SOCKET_IFNAME": value})) if one.check[0] == "G"
        ]
        assert alone.verdict == (OK if value == "l" else PROBLEM)


def test_infiniband(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine(tmp_path)
    assert network._infiniband(here).seen == "none; NCCL uses TCP"
    plug_in(tmp_path, {"mlx5_0": "1: DOWN"})
    assert network._infiniband(here).verdict == PROBLEM and "no port is active" in network._infiniband(here).seen
    plug_in(tmp_path, {"mlx5_0": "4: ACTIVE"})
    monkeypatch.setattr(infiniband, "LIBRARIES", ("libibverbs-of-nobody.so",))
    without = network._infiniband(here)
    assert without.verdict == PROBLEM and "libibverbs-of-nobody.so: cannot open" in without.seen
    assert without.remedy == "sudo apt-get install libibverbs1 ibverbs-providers"
    install(tmp_path, monkeypatch, "mlx5_9")
    assert "libibverbs knows only mlx5_9" in network._infiniband(here).seen
    install(tmp_path, monkeypatch, "mlx5_0")
    assert network._infiniband(here) == Finding("InfiniBand", OK, "NCCL uses mlx5_0:1 (200 Gb/sec (4X HDR))")
    assert network._infiniband(machine(tmp_path, NCCL_IB_DISABLE="1")).verdict == WARNING
    nccl, gloo = network.names_of_interfaces(here, "eth0")
    assert nccl.seen == "not set, because NCCL uses mlx5_0:1" and "export" in gloo.seen
    (tmp_path / "dev/infiniband/uverbs0").rename(tmp_path / "dev/infiniband/other")
    assert "cannot open" in network._infiniband(here).seen
    (tmp_path / "dev/infiniband/other").unlink()
    inside = network._infiniband(machine(tmp_path, TRAINSTATION_IMAGE="1"))
    assert "this container has no /dev/infiniband" in inside.seen and inside.remedy.startswith("make up")


# the host

_INFO = '{"ServerVersion": "28.1.1", "Runtimes": {"runc": {}, "nvidia": {}}, "CgroupDriver": "systemd"}'
"""Of `docker info`, what is read."""
_CARD = {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03\n"}


def engine(
    folder: Path, info: str, compose: str = "2.29.1", buildx: str = "github.com/docker/buildx v0.16.1 34c19"
) -> None:
    (folder / "info.json").write_text(info)
    script = f"""case "$1 $2" in
        info*) cat {folder}/info.json ;;
        "compose version") echo {compose} ;;
        "buildx version") [ "{buildx}" ] && echo {buildx} ;;
    esac"""
    program(folder, "docker", script)


def on_host(folder: Path, files: dict[str, str] | None = None) -> dict[str, Finding]:
    here = machine(folder, files)
    here.environ = (
        {**here.environ, "PATH": str(folder / "bin") + ":/bin"} if (folder / "bin" / "cat").exists() else here.environ
    )
    return by_name(list(host.checks(here)))


def test_an_engine_that_can_carry_the_station(tmp_path: Path) -> None:
    engine(tmp_path, _INFO)
    findings = on_host(tmp_path)
    assert {finding.verdict for finding in findings.values()} == {OK, NOT_APPLICABLE}, findings


def test_an_engine_that_does_not_answer(tmp_path: Path) -> None:
    # as docker 20.10 prints it
    words = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
    engine(tmp_path, json.dumps({"ServerErrors": [words]}))
    assert on_host(tmp_path)["Docker"].verdict == PROBLEM
    words = "Got permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock"
    engine(tmp_path, json.dumps({"ServerErrors": [words]}))
    assert "usermod" in on_host(tmp_path)["Docker"].remedy


def test_an_old_compose_and_no_buildx(tmp_path: Path) -> None:
    engine(tmp_path, _INFO, compose="2.10.2", buildx="")
    findings = on_host(tmp_path)
    assert findings["docker compose"].verdict == findings["docker buildx"].verdict == PROBLEM


def test_an_old_engine_whose_containers_neighbours_reach(tmp_path: Path) -> None:
    engine(tmp_path, _INFO.replace("28.1.1", "20.10.24+dfsg1"))
    found = on_host(tmp_path)["neighbours"]
    assert (found.verdict, found.remedy.split("  #")[0]) == (WARNING, "sudo make engine")
    program(tmp_path, "iptables", "exit 1")
    assert on_host(tmp_path, {"run/trainstation-firewall": ""})["neighbours"].verdict == WARNING  # the rule is gone
    program(tmp_path, "iptables", "echo 'Permission denied (you must be root)' >&2; exit 4")
    assert on_host(tmp_path)["neighbours"].verdict == OK
    program(tmp_path, "iptables", '[ "$*" = "-w 5 -C DOCKER-USER -j TRAINSTATION" ]')
    assert "a firewall rule blocks" in on_host(tmp_path)["neighbours"].seen
    engine(tmp_path, '{"ServerVersion": "20.10.24", "SecurityOptions": ["name=seccomp", "name=rootless"]}')
    assert on_host(tmp_path)["neighbours"].verdict == NOT_APPLICABLE


def test_gpus_that_containers_do_not_get(tmp_path: Path) -> None:
    engine(tmp_path, _INFO)
    assert "not installed" in on_host(tmp_path, _CARD)["container toolkit"].seen
    program(tmp_path, "nvidia-ctk", "echo NVIDIA Container Toolkit CLI version 1.16.2")
    findings = on_host(tmp_path)
    assert findings["container toolkit"].verdict == OK
    assert findings["GPUs stay"].verdict == WARNING
    assert "native.cgroupdriver=cgroupfs" in findings["GPUs stay"].remedy
    (tmp_path / "dev/char").mkdir(parents=True)
    (tmp_path / "dev/char/195:0").symlink_to("/dev/nvidia0")
    assert on_host(tmp_path)["GPUs stay"].verdict == OK
    (tmp_path / "dev/char/195:0").unlink()
    engine(tmp_path, _INFO.replace('"systemd"', '"cgroupfs"'))
    assert "cgroupfs" in on_host(tmp_path)["GPUs stay"].seen
    engine(tmp_path, _INFO.replace(', "nvidia": {}', ""))
    assert "nvidia-ctk runtime configure" in on_host(tmp_path)["container toolkit"].remedy


# how it is shown


def test_a_finding_on_80_columns_and_its_remedy_whole() -> None:
    remedy = "sudo " + "x" * 100
    shown = as_text([Finding("a", OK, "word " * 40), Finding("bb", PROBLEM, "seen", remedy)], 80)
    lines = shown.splitlines()
    assert all(len(line) <= 80 for line in lines if "try:" not in line)
    assert f"try: {remedy}" in shown
    assert lines[-1] == "2 checks: 1 problem"


def test_a_full_disk_is_no_lack_of_locks_and_a_read_only_one_no_lack_of_rights(tmp_path: Path) -> None:
    place = tmp_path / "my runs"
    place.mkdir()
    code = (
        "import sys; from pathlib import Path\n"
        "from train.doctor import disk; from train.doctor.machine import Machine\n"
        "for found in disk.checks(Machine({}), Path(sys.argv[1])): "
        "print(found.check, found.verdict, found.remedy, sep='|')"
    )

    def findings(mount: str) -> dict[str, list[str]]:
        script = f'mount -t tmpfs {mount} none "$1" && {{ touch "$1/a" "$1/b"; shift; exec "$@"; }}'
        done = subprocess.run(
            ["unshare", "-rm", "bash", "-c", script, "-", str(place), sys.executable, "-c", code, str(place)],
            capture_output=True, text=True, cwd=ROOT, check=False,
        )  # fmt: skip
        if "|" not in done.stdout:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()[-200:]}")
        return {line.split("|")[0]: line.split("|")[1:] for line in done.stdout.splitlines()}

    full = findings("-o size=8G,nr_inodes=2")
    assert full["room on disk"][0] == PROBLEM
    assert full["room on disk"][1].endswith(f"train rm --runs '{place}' NAME")
    assert full["file locks"][0] == NOT_APPLICABLE
    fixed = findings("-o ro,size=8G")["folder of runs"]
    assert fixed[0] == PROBLEM
    assert "chown" not in fixed[1]


def test_what_others_have_said_steers_no_terminal() -> None:
    text = as_text([Finding("GPUs", PROBLEM, "nvidia-smi: \x1b]0;owned\x07\x1b[2J", "rm '\x1b[2J'")], 80)
    assert "\x1b" not in text and "\x07" not in text

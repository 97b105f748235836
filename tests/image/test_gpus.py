"""Which GPUs the engine is asked for, and the image with the CUDA compiler; neither needs a GPU.

The engine hands GPUs out by calling nvidia-container-runtime-hook. Here that name is a script that writes down what a
container is to get, on the PATH of a second engine that only these tests use. The station's image there is an empty
one: what is tested is the way from GPUS in `make up` through the compose file to the engine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import Station, base_image, run

from tests.waiting import eventually

pytestmark = pytest.mark.turns

HOOK = """#!/bin/sh
# The state on stdin names the bundle, whose configuration holds the container's environment.
[ "$1" = prestart ] || exit 0
bundle=$(sed -n 's/.*"bundle":"\\([^"]*\\)".*/\\1/p')
grep -o 'NVIDIA_VISIBLE_DEVICES=[^"]*' "$bundle/config.json" >>{record}
"""

ALONE = 'ip link set lo up; exec dockerd --iptables=false "$@"'

# Healthy at once, and with what `make up` wants from a station: commands, the host key, a token.
EMPTY = """
FROM {base}
RUN cd /usr/local/bin && printf '#!/bin/sh\\necho healthy\\n' >station-health && chmod 755 station-health
RUN mkdir -p /etc/trainstation/hostkeys && echo ssh-ed25519 AAAA >/etc/trainstation/hostkeys/ssh_host_ed25519_key.pub
HEALTHCHECK --interval=1s CMD true
ENTRYPOINT echo 0123456789abcdef >/etc/trainstation/private/secrets/jupyter_token; exec sleep infinity
STOPSIGNAL SIGKILL
"""


@dataclass
class Engine:
    host: str
    record: Path

    @property
    def asked_for(self) -> list[str]:
        return self.record.read_text().split() if self.record.exists() else []


@pytest.fixture(scope="module")
def base(station: Station) -> str:
    run("docker", "tag", base_image(), "trainstation-test:base")  # a digest is no name in another engine
    return "trainstation-test:base"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, base: str) -> Iterator[Engine]:
    if os.getuid() != 0:
        pytest.fail("a second engine takes root: run make test-image as root")
    folder = tmp_path_factory.mktemp("engine")
    record = folder / "record"
    hook = folder / "bin" / "nvidia-container-runtime-hook"
    hook.parent.mkdir()
    hook.write_text(HOOK.replace("{record}", str(record)))
    hook.chmod(0o755)
    host = f"unix://{folder}/docker.sock"
    names = ["--containerd-namespace", "station-test", "--containerd-plugins-namespace", "station-test-plugins"]
    places = ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
    places += ["--host", host]
    with (folder / "log").open("w") as log:
        daemon = subprocess.Popen(
            # A network of its own: an engine takes the bridge docker0 for its own, and would remove another's.
            ["unshare", "--net", "sh", "-c", ALONE, "-", *places, *names],
            env={**os.environ, "PATH": f"{hook.parent}:{os.environ['PATH']}"},
            stdout=log,
            stderr=log,
        )
    try:
        up = lambda: run("docker", "--host", host, "info", check=False).returncode == 0  # noqa: E731
        eventually(f"the second engine answers; {(folder / 'log').read_text()[-500:]}", up)
        saved = folder / "base.tar"
        run("docker", "save", "-o", str(saved), base)
        run("docker", "--host", host, "load", "-i", str(saved))
        saved.unlink()
        yield Engine(host, record)
    finally:
        daemon.terminate()
        daemon.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def gpu_station(make_station: Callable[..., Station], engine: Engine, base: str) -> Iterator[Station]:
    station = make_station("gpus", DOCKER_HOST=engine.host, MEMLOCK="65536", CUDA_IMAGE=base)
    inputs = run("scripts/station.sh", "inputs", cwd=station.folder, env=station.env).stdout.strip()
    dockerfile = EMPTY.format(base=base)
    build = [
        "docker",
        "--host",
        engine.host,
        "build",
        "-q",
        "--network",
        "none",
        "-t",
        f"trainstation:cuda-{inputs}",
        "-",
    ]
    run(*build, input=dockerfile)
    yield station
    station.make("down", check=False)


@pytest.mark.parametrize(
    ("gpus", "ids"),
    [("", ["all"]), ("2", ["0", "1"]), ("3,1", ["3", "1"])],
)
def test_the_engine_is_asked_for_exactly_these(gpu_station: Station, engine: Engine, gpus: str, ids: list[str]) -> None:
    gpu_station.settings["GPUS"] = gpus
    printed = gpu_station.make("up").stdout
    try:
        assert "GPU: the engine hands out NVIDIA devices" in printed
        assert engine.asked_for[-1] == "NVIDIA_VISIBLE_DEVICES=" + ",".join(ids)
        inspect = "{{json .HostConfig.DeviceRequests}}"
        name = f"{gpu_station.project}-station-1"
        (request,) = json.loads(run("docker", "--host", engine.host, "inspect", "-f", inspect, name).stdout)
        assert request["DeviceIDs"] == ids
        assert request["Capabilities"] == [["gpu"]]
    finally:
        gpu_station.make("down")


@pytest.fixture
def card() -> Iterator[None]:
    """The device file of an InfiniBand card, which is /dev/null's device."""
    folder, file = Path("/dev/infiniband"), Path("/dev/infiniband/uverbs0")
    if file.exists():
        yield  # this machine has a card
        return
    folder.mkdir(exist_ok=True)
    os.mknod(file, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    file.chmod(0o666)
    try:
        yield
    finally:
        file.unlink()
        folder.rmdir()


@pytest.mark.usefixtures("card")
def test_a_station_with_gpus_gets_the_infiniband_cards(gpu_station: Station, engine: Engine) -> None:
    gpu_station.settings["GPUS"] = ""
    printed = gpu_station.make("up").stdout
    try:
        assert "InfiniBand: the station gets /dev/infiniband" in printed
        inside = ("docker", "--host", engine.host, "exec", "--user", "4321", f"{gpu_station.project}-station-1")
        run(*inside, "sh", "-c", "echo >/dev/infiniband/uverbs0")  # user dev may open it
    finally:
        gpu_station.make("down")


BY_SYSTEMD = """#!/bin/sh
[ "$*" != "info -f {{{{.CgroupDriver}}}}" ] || exec echo systemd
exec {docker} "$@"
"""
LINKS = """#!/bin/sh
echo "$@" >>{record}
[ ! -e {record}.fails ]
"""


@pytest.mark.parametrize("fails", [False, True])
def test_the_gpus_are_linked_against_a_daemon_reload_or_it_says_how(
    gpu_station: Station, tmp_path: Path, fails: bool
) -> None:
    record = tmp_path / "record"
    for name, script in (("docker", BY_SYSTEMD), ("nvidia-ctk", LINKS)):
        (tmp_path / name).write_text(script.format(docker=shutil.which("docker"), record=record))
        (tmp_path / name).chmod(0o755)
    if fails:
        Path(f"{record}.fails").touch()
    gpu_station.settings["GPUS"] = ""
    gpu_station.settings["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    try:
        printed = gpu_station.make("up").stdout
        assert record.read_text() == "system create-dev-char-symlinks --create-all\n"
        assert ("native.cgroupdriver=cgroupfs" in printed) == fails == ("GPUs: linked" not in printed)
    finally:
        del gpu_station.settings["PATH"]
        gpu_station.make("down")


# The toolkit's place is taken by an image with CUDA 12.1's own assembler, from its Python package, and a compiler that
# only knows its version: NVIDIA's image cannot be had everywhere, and is 8 GB.
TOOLKIT = """
FROM {base}
COPY ptxas nvcc /usr/local/cuda-12.1/bin/
RUN chmod 755 /usr/local/cuda-12.1/bin/* && mkdir -p /usr/local/cuda-12.1/include /usr/local/cuda-12.1/nvvm \
    /usr/local/cuda-12.1/lib64/stubs && touch /usr/local/cuda-12.1/include/cuda.h
"""
NVCC = "#!/bin/sh\necho 'Cuda compilation tools, release 12.1, V12.1.105'\n"
KERNEL = """
.version 8.1
.target sm_90
.address_size 64
.visible .entry nothing() { ret; }
"""


@pytest.fixture(scope="module")
def cuda(station: Station, base: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Station]:
    """A running container of the target cuda, in the place of the station's own."""
    folder = tmp_path_factory.mktemp("toolkit")
    (toolkit,) = importlib.util.find_spec("nvidia.cuda_nvcc").submodule_search_locations
    shutil.copy(Path(toolkit) / "bin" / "ptxas", folder)
    (folder / "nvcc").write_text(NVCC)
    (folder / "Dockerfile").write_text(TOOLKIT.format(base=base))
    run("docker", "build", "-q", "-t", "trainstation-test:toolkit", str(folder))
    arguments = ["--build-arg", f"BASE_IMAGE={base}", "--build-arg", "CUDA_IMAGE=trainstation-test:toolkit"]
    secret = "id=ca_bundle,src=" + (station.settings.get("CA_BUNDLE") or "/etc/ssl/certs/ca-certificates.crt")
    image = "trainstation-test:cuda"
    build = ["docker", "build", "-q", "--target", "cuda", *arguments, "--secret", secret, "-t", image, "."]
    run(*build, cwd=station.folder, timeout=600)
    override = station.folder / "docker-compose.override.yml"
    override.write_text(f"services: {{station: {{image: '{image}'}}}}\n")
    files = ["-f", str(override)]
    try:
        station.compose(*files, "up", "--detach", "--no-build")
        station.wait_healthy()
        yield station
    finally:
        override.unlink()
        station.make("up")
        run("docker", "image", "rm", image, "trainstation-test:toolkit", check=False)


@pytest.mark.parametrize("way", ["exec", "ssh", "login", "tmux", "make"])
def test_the_cuda_compiler_is_on_the_path_everywhere(cuda: Station, way: str) -> None:
    command = "nvcc --version"
    out = {
        "exec": lambda: cuda.root(*command.split()).stdout,
        "ssh": lambda: cuda.ssh(command).stdout,
        "login": lambda: cuda.ssh(f"bash -lc '{command}'").stdout,
        "tmux": lambda: (
            cuda.ssh(
                # a file says when: the server is gone with its session, and a signal sent through it is lost
                f"rm -f /tmp/nvcc.*; tmux -L nvcc new-session -d '{command} >/tmp/nvcc.out; touch /tmp/nvcc.done'"
                " && until [ -e /tmp/nvcc.done ]; do sleep 0.1; done; cat /tmp/nvcc.out"
            ).stdout
        ),
        "make": lambda: run("scripts/station.sh", "exec", *command.split(), cwd=cuda.folder, env=cuda.env).stdout,
    }[way]()
    assert "release 12.1" in out


def test_cuda_12_1s_assembler_runs_in_the_image(cuda: Station) -> None:
    cuda.ssh(f"echo '{KERNEL}' >/tmp/k.ptx && ptxas -arch=sm_90 /tmp/k.ptx -o /tmp/k.cubin")
    done = cuda.ssh("head -c 4 /tmp/k.cubin")
    assert done.stdout == "\x7fELF"


def test_no_cuda_folder_precedes_pytorchs_own_libraries(cuda: Station) -> None:
    assert cuda.ssh('echo "[$LD_LIBRARY_PATH]"').stdout == "[]\n"
    assert cuda.ssh("python -c 'import torch; print(torch.version.cuda)'").stdout == "12.6\n"


def test_the_driver_that_is_asked_for_is_what_the_wheels_need(station: Station) -> None:
    environment = json.loads(station.inspect("{{json .Config.Env}}"))
    assert "NVIDIA_REQUIRE_CUDA=cuda>=12.1 driver>=525" in environment
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in environment

"""`train doctor` in a healthy station, and in containers that are sabotaged, one thing a test. Remedies are pasted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Station, copy_checkout, run

WORK = "/workspace"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_checkout(tmp_path_factory.mktemp("doctor") / "trainstation", None)


def examined(station: Station, checkout: Path, *options: str, before: str = "true") -> dict[str, dict[str, str]]:
    """What the doctor finds in a container of the station's image with these options, after a line of shell."""
    image = station.inspect("{{.Config.Image}}")
    command = f"{before}\nexec python3 -m train doctor --json --runs {WORK}/runs"
    done = run(
        "docker", "run", "--rm", "--entrypoint", "bash", "--volume", f"{checkout}:{WORK}", "--workdir", WORK,
        "--shm-size", "1g", *options, image, "-c", command, check=False,
    )  # fmt: skip
    findings = {each["check"]: each for each in json.loads(done.stdout)}
    bad = any(each["verdict"] == "problem" for each in findings.values())
    assert done.returncode == int(bad), done.stderr
    return findings


def test_in_a_healthy_station_all_is_well(station: Station) -> None:
    for way in (station.dev("train", "doctor", "--json"), station.ssh("train doctor --json")):
        findings = {each["check"]: each for each in json.loads(way.stdout)}
        ill = [each for each in findings.values() if each["verdict"] not in ("ok", "not applicable")]
        assert ill == []
        assert findings["GPUs"]["verdict"] == "not applicable"
    shown = station.dev("train", "doctor").stdout
    assert shown.splitlines()[-1].endswith("all is well")


def test_several_ranks_in_a_healthy_station(station: Station) -> None:
    findings = json.loads(station.dev("train", "doctor", "--job", "--json").stdout)
    assert [each["check"] for each in findings if each["verdict"] != "ok"] == []


def test_a_tiny_shared_memory(station: Station, checkout: Path) -> None:
    finding = examined(station, checkout, "--shm-size", "64m")["shared memory"]
    assert finding["verdict"] == "problem"
    assert "64 MiB" in finding["seen"]
    assert finding["remedy"].startswith("SHM_SIZE=16g make up")  # what the station has by itself: test_environment.py


def test_a_limit_of_memory(station: Station, checkout: Path) -> None:
    finding = examined(station, checkout, "--memory", "512m")["memory"]
    assert finding["verdict"] == "problem"
    assert "512 MiB" in finding["seen"]
    assert examined(station, checkout, "--memory", "16g", "--memory-swap", "16g")["memory"]["verdict"] == "ok"


def test_a_full_disk(station: Station, checkout: Path) -> None:
    full = "--mount", f"type=tmpfs,target={WORK}/runs,tmpfs-size=1048576"
    findings = examined(station, checkout, *full, before=f"head -c 900000 /dev/zero >{WORK}/runs/full")
    assert findings["room on disk"]["verdict"] == "problem"
    assert findings["file system"]["verdict"] == "warning"  # and it is memory


def test_a_folder_of_runs_of_another(station: Station, checkout: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    place = "--volume", f"{tmp_path}:{WORK}/runs", "--user", "1000:1000"
    finding = examined(station, checkout, *place)["folder of runs"]
    assert finding["verdict"] == "problem"
    remedy = finding["remedy"].removeprefix("sudo ")  # the container's root pastes it
    run("docker", "run", "--rm", "--entrypoint", "bash", *place[:2], station.inspect("{{.Config.Image}}"), "-c", remedy)
    assert examined(station, checkout, *place)["folder of runs"]["verdict"] == "ok"


def test_a_second_cudnn(station: Station, checkout: Path) -> None:
    second = "mkdir -p /opt/cudnn/lib && touch /opt/cudnn/lib/libcudnn.so.8 && export LD_LIBRARY_PATH=/opt/cudnn/lib"
    finding = examined(station, checkout, before=second)["LD_LIBRARY_PATH"]
    assert finding["verdict"] == "problem"
    assert "two cuDNNs" in finding["seen"]
    assert examined(station, checkout, before=f"{second}\n{finding['remedy']}")["LD_LIBRARY_PATH"]["verdict"] == "ok"


def test_a_torch_without_cuda(station: Station, checkout: Path) -> None:
    lines = [
        "other=/opt/other; info=$other/torch-2.7.1+cpu.dist-info; mkdir -p $other/torch $info",
        "printf 'Metadata-Version: 2.1\\nName: torch\\nVersion: 2.7.1+cpu\\n' >$info/METADATA",
        "echo 'cuda: Optional[str] = None' >$other/torch/version.py",
        "export PYTHONPATH=$other STATION_GPUS=all",
    ]
    without = "\n".join(lines)
    findings = examined(station, checkout, before=without)
    assert findings["torch"]["verdict"] == "problem"
    assert findings["GPUs"]["verdict"] == "problem"  # asked for, and not here


def test_a_name_and_a_port_that_are_not_there(station: Station, checkout: Path) -> None:
    image = station.inspect("{{.Config.Image}}")

    def doctor(place: str, *options: str) -> dict[str, dict[str, str]]:
        done = run(
            "docker", "run", "--rm", "--entrypoint", "python3", "--volume", f"{checkout}:{WORK}", "--workdir", WORK,
            *options, image, "-m", "train", "doctor", "--json", "--rendezvous", place, check=False,
        )  # fmt: skip
        return {each["check"]: each for each in json.loads(done.stdout)}

    assert doctor("node0:29400")["rendezvous name"]["verdict"] == "problem"
    loop = doctor("node0:29400", "--add-host", "node0:127.0.1.1")
    assert loop["rendezvous address"]["verdict"] == "problem"
    station_address = station.inspect("{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}")
    network = station.inspect("{{range $name, $_ := .NetworkSettings.Networks}}{{$name}}{{end}}")
    closed = doctor(f"{station_address}:29400", "--network", network)
    assert closed["rendezvous port"]["verdict"] == "warning"
    assert "nobody listens" in closed["rendezvous port"]["seen"]
    there = doctor(f"{station_address}:2222", "--network", network)
    assert there["rendezvous port"]["verdict"] == "ok"
    assert there["interface"]["seen"].startswith("eth0 ")

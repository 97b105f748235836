"""`train doctor` in a healthy station, and in containers that are sabotaged, one thing a test. Remedies are pasted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Station, copy_checkout, run

pytestmark = pytest.mark.turns

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


def test_a_tiny_shared_memory(station: Station, checkout: Path) -> None:
    finding = examined(station, checkout, "--shm-size", "64m")["shared memory"]
    assert finding["verdict"] == "problem"
    assert "64 MiB" in finding["seen"]
    assert finding["remedy"].startswith("SHM_SIZE=16g make up")  # what the station has by itself: test_environment.py


def test_a_limit_of_memory(station: Station, checkout: Path) -> None:
    if run("docker", "info", "--format", "{{.CgroupVersion}}").stdout.strip() != "2":
        pytest.skip("the limits of control groups of version 1 are not read")
    finding = examined(station, checkout, "--memory", "512m")["memory"]
    assert finding["verdict"] == "problem"
    assert "512 MiB" in finding["seen"]
    assert examined(station, checkout, "--memory", "16g", "--memory-swap", "16g")["memory"]["verdict"] == "ok"


def test_nccl_finds_the_library_for_infiniband(station: Station) -> None:
    asks = "from train import infiniband; print(infiniband.cards_of_library())"
    assert station.dev("python3", "-c", asks).stdout == "([], '')\n"  # it loads, and there is no card

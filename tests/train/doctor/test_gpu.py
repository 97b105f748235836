"""Checks of GPUs, on what nvidia-smi has printed elsewhere (recorded/README.md says where)."""

from __future__ import annotations

from pathlib import Path

import pytest
from machines import RECORDED, by_name, machine, nvidia_smi, program

from train.doctor import gpu
from train.doctor.finding import NOT_APPLICABLE, OK, PROBLEM, WARNING, Finding


def found(folder: Path, xml: str, capability: str = "8.0") -> dict[str, Finding]:
    nvidia_smi(folder, xml, capability)
    return by_name(list(gpu.checks(machine(folder, STATION_GPUS="all"))))


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def test_a_healthy_card_is_well(tmp_path: Path) -> None:
    findings = found(tmp_path, recorded("a100.xml"))
    assert {finding.verdict for finding in findings.values()} == {OK}, findings
    assert findings["GPUs"].seen == "1 x NVIDIA A100-SXM4-80GB"
    assert "535.54.03" in findings["driver"].seen
    assert "27 C" in findings["GPU heat"].seen


def test_without_a_card_nothing_is_asked(tmp_path: Path) -> None:
    (finding,) = gpu.checks(machine(tmp_path))
    assert finding.verdict == NOT_APPLICABLE


def test_a_card_without_a_driver(tmp_path: Path) -> None:
    card = {
        "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
    }
    (finding,) = gpu.checks(machine(tmp_path, card))
    assert finding.verdict == PROBLEM
    assert "apt-get install nvidia-driver" in finding.remedy


def test_a_card_that_makes_sound_only_is_none(tmp_path: Path) -> None:
    card = {
        "sys/bus/pci/devices/0000:01:00.1/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:01:00.1/class": "0x040300\n",
    }
    assert not machine(tmp_path, card).has_nvidia_card()


@pytest.mark.parametrize(
    ("said", "word", "remedy"),
    [
        # NVIDIA/nvidia-container-toolkit issue 48; 1227
        ("Failed to initialize NVML: Unknown Error", "daemon-reload", "--force-recreate"),
        # the words of nvidia-smi after an upgrade, quoted in NVIDIA/nvidia-docker issue 1171
        ("Failed to initialize NVML: Driver/library version mismatch", "upgraded", "reboot"),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
            "NVIDIA driver is installed and running.",
            "not loaded",
            "modprobe",
        ),
        ("No devices were found", "No devices were found", "dmesg"),
        ("Unable to determine the device handle for GPU0000:0A:00.0: GPU is lost.", "GPU is lost", "dmesg"),
    ],
)
def test_an_nvidia_smi_that_fails_tells_what_to_do(tmp_path: Path, said: str, word: str, remedy: str) -> None:
    program(tmp_path, "nvidia-smi", f'echo "{said}"; exit 9')
    (finding,) = gpu.checks(machine(tmp_path, STATION_GPUS="all", TRAINSTATION_IMAGE="1"))
    assert finding.verdict == PROBLEM
    assert word in finding.seen
    assert remedy in finding.remedy


def test_an_nvidia_smi_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.doctor.machine._PATIENCE", 0.5)
    program(tmp_path, "nvidia-smi", "exec sleep 600")
    (finding,) = gpu.checks(machine(tmp_path, STATION_GPUS="all"))
    assert finding.verdict == PROBLEM
    assert "did not answer" in finding.seen


def test_an_exit_code_without_a_word_is_understood(tmp_path: Path) -> None:
    here = machine(tmp_path, STATION_GPUS="all")
    program(tmp_path, "nvidia-smi", "exit 9")
    (finding,) = gpu.checks(here)
    assert "modprobe" in finding.remedy


def test_fewer_cards_than_asked_for(tmp_path: Path) -> None:
    nvidia_smi(tmp_path, recorded("a100.xml"), "8.0")
    findings = by_name(list(gpu.checks(machine(tmp_path, STATION_GPUS="0,1,2"))))
    assert findings["GPUs"].verdict == PROBLEM
    assert "requested: 0,1,2; found: 1" in findings["GPUs"].seen


def test_an_old_driver(tmp_path: Path) -> None:
    xml = recorded("a100.xml").replace("535.54.03", "470.57.02")  # the one value that is changed
    assert found(tmp_path, xml)["driver"].verdict == PROBLEM


def test_a_driver_from_610_on_has_new_names_for_versions(tmp_path: Path) -> None:
    xml = recorded("a5000.xml")
    for name, new in (("driver", "kmd"), ("cuda", "cuda_umd")):
        value = xml.partition(f"<{name}_version>")[2].partition("<")[0]
        renamed = f"<{name}_version>[Deprecated]</{name}_version><{new}_version>6{value}</{new}_version>"
        xml = xml.replace(f"<{name}_version>{value}</{name}_version>", renamed)
    driver = found(tmp_path, xml, "8.6")["driver"]
    assert driver.verdict == OK and driver.seen.startswith("6590.44.01, for CUDA up to 61")


def test_a_card_that_the_wheel_has_no_kernels_for(tmp_path: Path) -> None:
    findings = found(tmp_path, recorded("blackwell.xml"), "12.0")
    assert findings["compute capability"].verdict == PROBLEM
    assert "GPU 0 (12.0)" in findings["compute capability"].seen


def test_memory_that_others_have_taken(tmp_path: Path) -> None:
    findings = found(tmp_path, recorded("a5000.xml"), "8.6")
    assert findings["GPU memory"].verdict == WARNING
    assert "GPU 1: 21.9 of 24.0 GiB" in findings["GPU memory"].seen
    assert findings["GPU memory errors"].verdict == OK


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ("<ecc_mode>", "<gpu_reset_status><reset_required>Yes</reset_required></gpu_reset_status><ecc_mode>", PROBLEM),
        ("<dram_uncorrectable>0<", "<dram_uncorrectable>32<", PROBLEM),  # as of an A800 in the field
        ("<pending_retirement>N/A<", "<pending_retirement>Yes<", WARNING),
    ],
)
def test_memory_errors(tmp_path: Path, before: str, after: str, verdict: str) -> None:
    findings = found(tmp_path, recorded("a100.xml").replace(before, after, 1))
    assert findings["GPU memory errors"].verdict == verdict


def test_a_card_that_asks_for_a_reset(tmp_path: Path) -> None:
    xml = recorded("a5000.xml").replace("<gpu_recovery_action>None<", "<gpu_recovery_action>Drain and Reset<")
    findings = found(tmp_path, xml, "8.6")
    assert findings["GPU memory errors"].verdict == PROBLEM
    assert "Drain and Reset" in findings["GPU memory errors"].seen


@pytest.mark.parametrize("kind", ["clocks_event_reason", "clocks_throttle_reason"])  # before driver 535: throttle
def test_a_card_that_is_slowed_by_heat(tmp_path: Path, kind: str) -> None:
    hot = "_sw_thermal_slowdown>Not Active<", "_sw_thermal_slowdown>Active<"
    xml = recorded("a100.xml").replace(*hot).replace("clocks_event_reason", kind)
    findings = found(tmp_path, xml)
    assert findings["GPU heat"].verdict == WARNING
    assert "sw thermal slowdown" in findings["GPU heat"].seen

"""Checks of GPUs, on what nvidia-smi has printed elsewhere (recorded/README.md says where)."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from machines import RECORDED, by_name, machine, nvidia_smi, program

from train.doctor import gpu, job
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
        ("Failed to initialize NVML: Unknown Error", "reloaded", "--force-recreate"),
        # the words of nvidia-smi after an upgrade, quoted in NVIDIA/nvidia-docker issue 1171
        ("Failed to initialize NVML: Driver/library version mismatch", "upgraded", "reboot"),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
            "NVIDIA driver is installed and running.",
            "not loaded",
            "modprobe",
        ),
        ("No devices were found", "off the bus", "dmesg"),
        ("Unable to determine the device handle for GPU0000:0A:00.0: GPU is lost.", "off the bus", "dmesg"),
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
    assert "has not answered" in finding.seen


_HELD = """#!{python}
import ctypes, os, time
libc, own = ctypes.CDLL(None), os.getpid()
ready, done = os.pipe()
child = os.fork()
if child == 0:  # one who traces it and never looks: killed, it is not gone, as in a driver that never answers
    os.setsid()
    assert os.read(ready, 1)
    assert libc.ptrace(0x4206, own, 0, 0) == 0
    time.sleep(30)
    os._exit(0)
libc.prctl(0x59616D61, child, 0, 0, 0)
os.write(done, b"x")
time.sleep(60)
"""


def test_an_nvidia_smi_that_cannot_even_be_killed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.doctor.machine._PATIENCE", 3.0)
    here = machine(tmp_path, STATION_GPUS="all")
    script = tmp_path / "bin" / "nvidia-smi"
    script.write_text(_HELD.format(python=sys.executable))
    script.chmod(0o755)
    began = time.monotonic()
    (finding,) = gpu.checks(here)
    assert time.monotonic() - began < 20
    assert finding.verdict == PROBLEM
    assert "has not answered" in finding.seen
    assert "dmesg" in finding.remedy  # to ask it again would hang again


def test_an_exit_code_without_a_word_is_understood(tmp_path: Path) -> None:
    here = machine(tmp_path, STATION_GPUS="all")
    program(tmp_path, "nvidia-smi", "exit 9")
    (finding,) = gpu.checks(here)
    assert "modprobe" in finding.remedy


def test_figures_that_are_none_are_left_out(tmp_path: Path) -> None:
    odd = "<gpu><temperature><gpu_temp>1.2.3 C</gpu_temp></temperature><ecc_errors><volatile>"
    odd += "<dram_uncorrectable>²</dram_uncorrectable></volatile></ecc_errors></gpu>"
    nvidia_smi(tmp_path, f"<log><driver_version>535</driver_version>{odd}</log>", "8.0")
    findings = by_name(list(gpu.checks(machine(tmp_path, STATION_GPUS="all"))))
    assert findings["GPU heat"].verdict == findings["GPU memory errors"].verdict == OK


def test_fewer_cards_than_asked_for(tmp_path: Path) -> None:
    nvidia_smi(tmp_path, recorded("a100.xml"), "8.0")
    findings = by_name(list(gpu.checks(machine(tmp_path, STATION_GPUS="0,1,2"))))
    assert findings["GPUs"].verdict == PROBLEM
    assert "0,1,2 were asked for, 1 are here" in findings["GPUs"].seen


def test_an_old_driver(tmp_path: Path) -> None:
    xml = recorded("a100.xml").replace("535.54.03", "470.57.02")  # the one value that is changed
    assert found(tmp_path, xml)["driver"].verdict == PROBLEM


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
        ("<dram_uncorrectable>0<", "<dram_uncorrectable>32<", PROBLEM),  # as of an A800 in the field
        ("<pending_retirement>N/A<", "<pending_retirement>Yes<", WARNING),
    ],
)
def test_memory_errors(tmp_path: Path, before: str, after: str, verdict: str) -> None:
    findings = found(tmp_path, recorded("a100.xml").replace(before, after))
    assert findings["GPU memory errors"].verdict == verdict


BEFORE_TURING = """<volatile>
<single_bit><device_memory>7</device_memory><total>7</total></single_bit>
<double_bit><device_memory>{memory}</device_memory><register_file>0</register_file><texture_memory>N/A</texture_memory>
<cbu>0</cbu><total>{total}</total></double_bit>
</volatile>"""
"""What a Tesla V100S with driver 460 has there, shortened."""


@pytest.mark.parametrize(
    ("memory", "total", "seen"),
    [("0", "0", None), ("3", "3", "3 uncorrectable"), ("3", "N/A", "3 uncorrectable"), ("N/A", "2", "2 uncorrectable"),
     ("N/A", "N/A", None)],
)  # fmt: skip
def test_memory_errors_of_cards_before_turing(tmp_path: Path, memory: str, total: str, seen: str | None) -> None:
    counts = BEFORE_TURING.format(memory=memory, total=total)
    finding = found(tmp_path, re.sub(r"(?s)<volatile>.*</volatile>", counts, recorded("a100.xml")))["GPU memory errors"]
    assert finding.verdict == (PROBLEM if seen else OK)
    assert seen is None or finding.seen == f"GPU 0: {seen}"


@pytest.mark.parametrize(
    ("before", "after"),
    [("<pending_retirement>N/A<", "<pending_blacklist>Yes</pending_blacklist><pending_retirement>No<"),
     ("<ecc_mode>", "<gpu_reset_status><reset_required>Yes</reset_required></gpu_reset_status><ecc_mode>")],
)  # fmt: skip
def test_what_older_drivers_say_of_a_card_that_waits_for_a_reset(tmp_path: Path, before: str, after: str) -> None:
    finding = found(tmp_path, recorded("a100.xml").replace(before, after, 1))["GPU memory errors"]
    assert finding.verdict in (WARNING, PROBLEM) and "reset" in finding.seen


SLICE = """<mig_device><index>{index}</index><gpu_instance_id>{instance}</gpu_instance_id>
<ecc_error_count><volatile_count><sram_uncorrectable>{errors}</sram_uncorrectable></volatile_count></ecc_error_count>
<fb_memory_usage><total>19968 MiB</total><reserved>0 MiB</reserved><used>{used} MiB</used></fb_memory_usage>
<bar1_memory_usage><total>32767 MiB</total><used>9000 MiB</used></bar1_memory_usage></mig_device>"""
"""One of four slices of an A100-80GB with driver 535 (the card of a100.xml), shortened."""


def sliced(used: tuple[int, ...], errors: tuple[int, ...] = (0, 0, 0, 0), whole: str = "50 MiB") -> str:
    each = [
        SLICE.format(index=index, instance=index + 3, errors=error, used=of)
        for index, (of, error) in enumerate(zip(used, errors, strict=True))
    ]
    program = (
        "<process_info><gpu_instance_id>4</gpu_instance_id><process_name>/usr/bin/other</process_name></process_info>"
    )
    text = recorded("a100.xml").replace("</mig_mode>", f"</mig_mode><mig_devices>{''.join(each)}</mig_devices>")
    return text.replace(">50 MiB<", f">{whole}<").replace("</gpu>", f"<processes>{program}</processes></gpu>")


@pytest.mark.parametrize("whole", ["5168 MiB", "N/A"])  # inside a container that has slices, the card does not tell
def test_memory_is_told_of_each_slice_of_a_card(tmp_path: Path, whole: str) -> None:
    findings = found(tmp_path, sliced((12, 5120, 12, 12), whole=whole))
    assert findings["GPU memory"].verdict == WARNING
    assert findings["GPU memory"].seen == "in use: GPU 0 slice 1: 5.0 of 19.5 GiB by other"
    assert found(tmp_path, sliced((12, 12, 12, 12), whole=whole))["GPU memory"].verdict == OK


def test_errors_of_slices_are_added_up_and_not_counted_twice(tmp_path: Path) -> None:
    xml, count = sliced((12,) * 4, (0, 2, 0, 1)), "<sram_uncorrectable>{}</sram_uncorrectable>\n\t\t\t\t<dram"
    assert count.format(0) in xml
    for said in ("N/A", 0, 3):  # by the card as a whole
        text = xml.replace(count.format(0), count.format(said))
        assert found(tmp_path, text)["GPU memory errors"].seen == "GPU 0: 3 uncorrectable"


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


def test_how_gpus_are_linked() -> None:
    assert job.topology(recorded("topo-a100.txt")) == "NVLink between all GPUs (NV12)"
    assert "through the processor" in job.topology(recorded("topo-5090.txt"))
    assert job.topology("") == ""

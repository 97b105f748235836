"""Checks of what lies between GPUs: marks of `nvidia-smi topo -p2p`, and trees of sysfs as the kernel lays them out."""

from __future__ import annotations

from pathlib import Path

import pytest
from machines import RECORDED, by_name, machine, program

from train.doctor import gpu, peers
from train.doctor.finding import NOT_APPLICABLE, OK, WARNING, Finding
from train.doctor.machine import Machine

CARDS = ("0000:01:00.0", "0000:02:00.0")
BRIDGES = ("0000:00:01.0", "0000:00:02.0")


def here(folder: Path, mark: str, over_nvlink: str = "NS", **environ: str) -> Machine:
    """A machine with two cards, each below a root port, of which the driver says this."""
    head, legend = r"\t\033[4mGPU0\tGPU1\033[0m\t\n", r"\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n"
    rows = head + r" GPU0\tX\t{0}\t\n GPU1\t{0}\tX\t" + legend
    lines = f"r) printf '{rows.format(mark)}' ;; n) printf '{rows.format(over_nvlink)}' ;;"
    program(folder, "nvidia-smi", f'[ "$1 $2" = "topo -p2p" ] || exit 9\ncase $3 in {lines} esac')
    devices = folder / "sys/bus/pci/devices"
    devices.mkdir(parents=True, exist_ok=True)
    for bridge, card in zip(BRIDGES, CARDS, strict=True):
        place = folder / "sys/devices/pci0000:00" / bridge / card
        place.mkdir(parents=True, exist_ok=True)
        for address, target in ((bridge, place.parent), (card, place)):
            if not (devices / address).exists():
                (devices / address).symlink_to(target)
    return machine(folder, **environ)


def bridges(folder: Path, control: int, size: int = 4096) -> None:
    """Write the configuration of the bridges: error reporting at 0x100, then access control."""
    config = bytearray(4096)
    config[0x100:0x104] = (0x148 << 20 | 1 << 16 | 0x0001).to_bytes(4, "little")
    config[0x148:0x14C] = (1 << 16 | 0x000D).to_bytes(4, "little")
    config[0x14E:0x150] = control.to_bytes(2, "little")
    for bridge in BRIDGES:
        (folder / "sys/bus/pci/devices" / bridge / "config").write_bytes(config[:size])


def found(one: Machine, name: str = "NVIDIA RTX A5000") -> dict[str, Finding]:
    return by_name(list(peers.checks(one, [peers.Gpu(number, name, card) for number, card in enumerate(CARDS)])))


def group(folder: Path, kind: str) -> None:
    for number, card in enumerate(CARDS):
        (folder / f"sys/kernel/iommu_groups/{number}/devices/{card}").mkdir(parents=True, exist_ok=True)
        (folder / f"sys/kernel/iommu_groups/{number}/type").write_text(kind)


def test_cards_that_reach_each_other_are_well(tmp_path: Path) -> None:
    one = here(tmp_path, "OK")
    bridges(tmp_path, 0x0001)
    findings = found(one)
    assert {finding.verdict for finding in findings.values()} == {OK}, findings
    assert findings["peer access"].seen == "1 of 1 pairs of GPUs, 1 of them over PCI"
    assert findings["IOMMU"].seen == "off"
    assert findings["ACS"].seen == "off on the 2 PCI bridges above the GPUs"


def test_a_single_card_is_asked_nothing(tmp_path: Path) -> None:
    assert list(peers.checks(here(tmp_path, "OK"), [peers.Gpu(0, "NVIDIA RTX A5000", CARDS[0])])) == []


def test_a_card_for_which_the_driver_allows_what_it_lacks(tmp_path: Path) -> None:
    finding = found(here(tmp_path, "OK"), "NVIDIA GeForce RTX 4090")["peer access"]
    assert finding.verdict == WARNING
    assert "RTX 4090" in finding.seen and "nccl-tests issue 117" in finding.seen
    assert "train doctor --job" in finding.remedy and "NCCL_P2P_DISABLE=1" in finding.remedy
    assert found(here(tmp_path, "OK"), "NVIDIA GeForce RTX 3090")["peer access"].verdict == OK


@pytest.mark.parametrize(
    ("mark", "over_nvlink", "environ", "says"),
    [
        ("CNS", "NS", {}, "the driver allows none (chipset not supported): NCCL copies through shared memory"),
        ("OK", "OK", {}, "1 of 1 pairs of GPUs, 0 of them over PCI"),
        ("OK", "NS", {"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE is set: GPUs exchange data through shared memory"),
    ],
)
def test_what_lies_between_cards_matters_only_for_peer_access_over_pci(
    tmp_path: Path, mark: str, over_nvlink: str, environ: dict[str, str], says: str
) -> None:
    one = here(tmp_path, mark, over_nvlink, **environ)
    group(tmp_path, "DMA-FQ")
    bridges(tmp_path, 0x001D)
    findings = found(one, "NVIDIA GeForce RTX 4090")
    assert (findings["peer access"].verdict, findings["peer access"].seen) == (OK, says)
    assert findings["IOMMU"].verdict == findings["ACS"].verdict == NOT_APPLICABLE


def test_an_nvidia_smi_that_prints_no_marks(tmp_path: Path) -> None:
    one = here(tmp_path, "OK")
    program(tmp_path, "nvidia-smi", "echo 'unknown option -p2p'; exit 1")
    assert found(one)["peer access"].verdict == NOT_APPLICABLE


@pytest.mark.parametrize(
    ("kind", "command_line", "verdict"),
    [
        ("DMA-FQ", "quiet", WARNING), ("DMA", "iommu=pt", WARNING), ("identity", "quiet", OK),
        ("", "quiet iommu=pt", OK), ("", "quiet", WARNING),
    ],
)  # fmt: skip
def test_an_iommu_that_translates_transfers(tmp_path: Path, kind: str, command_line: str, verdict: str) -> None:
    one = here(tmp_path, "OK")
    group(tmp_path, kind)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cmdline").write_text(f"{command_line}\n")
    finding = found(one)["IOMMU"]
    assert finding.verdict == verdict
    assert verdict == OK or ("nccl issue 257" in finding.seen and "iommu=pt" in finding.remedy)


def test_bridges_that_send_transfers_through_the_cpu(tmp_path: Path) -> None:
    one = here(tmp_path, "OK")
    bridges(tmp_path, 0x001D)  # as on the machine of NVIDIA/nccl issue 2079
    finding = found(one)["ACS"]
    assert finding.verdict == WARNING
    assert f"for b in {' '.join(BRIDGES)}; do sudo setpci" in finding.remedy
    bridges(tmp_path, 0x001D, 64)
    finding = found(one)["ACS"]
    assert finding.verdict == NOT_APPLICABLE and "only root can read it" in finding.seen


def test_addresses_and_persistence_mode_come_from_the_list_of_cards(tmp_path: Path) -> None:
    xml = (RECORDED / "a5000.xml").read_text()
    (tmp_path / "recorded.xml").write_text(
        xml.replace("<ecc_mode>", "<persistence_mode>Disabled</persistence_mode><ecc_mode>")
    )
    matrix = r"\tGPU0\tGPU1\nGPU0\tX\tOK\nGPU1\tOK\tX\n"
    asked = f"topo*r) printf '{matrix}' ;; topo*) exit 1 ;; -q*) cat {tmp_path}/recorded.xml ;; *) exit 1 ;;"
    program(tmp_path, "nvidia-smi", f'case "$*" in {asked} esac')
    (tmp_path / "sys/kernel/iommu_groups/7/devices/0000:81:00.0").mkdir(parents=True)  # both have it in the recording
    findings = by_name(list(gpu.checks(machine(tmp_path, STATION_GPUS="all"))))
    assert findings["IOMMU"].verdict == WARNING
    assert findings["persistence mode"].verdict == WARNING
    assert "nvidia-smi -pm 1" in findings["persistence mode"].remedy

"""The benches print their tables and leave nothing behind. What they measure is not judged here."""

from __future__ import annotations

import os

from tests.train.conftest import Station


def table(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_checkpoint_compares_ways_to_save_with_torch_save_and_the_disk(station: Station) -> None:
    rows = table(station.ok("bench", "checkpoint", "--mb", 3, "--times", 2).stdout)
    assert [row[1] for row in rows[2:]] == [
        "dd conv=fsync", "torch.save", "DCP", "train, synchronous", "train, asynchronous",
    ]  # fmt: skip
    assert all(float(row[5]) > 0 for row in rows[2:])
    assert rows[3][3] == "1.00" and rows[2][6] == "1.00"
    assert os.listdir(station.runs) == []


def test_resume_compares_the_begin_of_an_epoch_with_its_end(station: Station) -> None:
    rows = table(station.ok("bench", "resume", "--samples", 100_000, "--times", 1).stdout)
    assert [row[0] for row in rows[2:]] == ["1", "95"]
    assert all(float(row[2]) > 0 for row in rows[2:])
    assert os.listdir(station.runs) == []


def test_stop_compares_the_flag_that_rides_along_with_plain_ddp(station: Station) -> None:
    rows = table(station.ok("bench", "stop", "--times", 2).stdout)
    assert [row[0] for row in rows[2:]] == ["plain DDP, no stop", "train: rides along", "a reduction of its own"]
    assert all(float(row[1]) > 0 for row in rows[2:])
    assert rows[2][2] == "1.000"
    assert os.listdir(station.runs) == []

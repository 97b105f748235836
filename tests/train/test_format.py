"""Figures in words."""

from __future__ import annotations

from train.format import ago, duration, size


def test_bytes_have_the_unit_that_reads_best() -> None:
    assert [size(n) for n in (5, 2048, 1 << 29, 3 << 29, 1 << 42)] == [
        "5 bytes",
        "2 KiB",
        "512 MiB",
        "1.5 GiB",
        "4 TiB",
    ]


def test_times_have_two_units_at_most() -> None:
    given = (0.0954, 0.9999, 59.9, 59.96, 250, 3600, 12000, 187_200)
    said = ["95 ms", "1.0 s", "59.9 s", "1 min", "4 min 10 s", "1 h", "3 h 20 min", "2 d 4 h"]
    assert [duration(seconds) for seconds in given] == said
    assert [ago(seconds) for seconds in (-1, 5, 90, 7200, 1e6)] == [
        "0 s ago",
        "5 s ago",
        "2 min ago",
        "2 h ago",
        "12 d ago",
    ]

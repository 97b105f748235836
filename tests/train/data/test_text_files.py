"""Many files as one long text that is never in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from train.data.text import Corpus
from train.errors import TrainingFailed

pytestmark = pytest.mark.never_forgiven


def write(folder: Path, count: int) -> tuple[list[tuple[Path, int, int]], bytes]:
    """So many files of 0 to 40 bytes, of which the first and the last byte are left out; and what remains."""
    random = np.random.default_rng(0)
    stretches, expected = [], b""
    for number in range(count):
        content = random.integers(0, 256, random.integers(0, 41), dtype=np.uint8).tobytes()
        path = folder / f"{number:04}.txt"
        path.write_bytes(content)
        stretches.append((path, 1, len(content) - 1))
        expected += content[1:-1]
    return stretches, expected


def test_every_slice_is_that_of_the_files_joined_though_they_are_more_than_are_kept_open(tmp_path: Path) -> None:
    stretches, expected = write(tmp_path, 300)
    corpus = Corpus(stretches)
    assert len(corpus) == len(expected)
    assert bytes(corpus[:]) == expected
    for start, stop in np.random.default_rng(1).integers(0, len(expected) + 10, (300, 2)).tolist():
        assert corpus[start:stop].tobytes() == expected[start:stop], (start, stop)


def test_a_file_that_was_cut_short_is_named_and_kills_nobody(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 10000)
    corpus = Corpus([(path, 0, 10000)])
    assert corpus[9000:9004].tobytes() == b"xxxx"
    path.write_bytes(b"x" * 100)
    with pytest.raises(TrainingFailed, match=r"a\.txt is shorter"):
        corpus[9000:9004]


@pytest.mark.minutes
def test_a_large_text_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 4096 * 300)  # 300 MB
    program = """
import resource, sys
from train.launcher.request import Request, resolve
from train.data.plan import Plan, micro_batches_of
from train.data.plan import Sharing
from train.data.fetch import fetcher
task, config = resolve(Request(task="text", flags={"data.root": sys.argv[1]}))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
train, held_out = task.datasets(config)
fetch = fetcher(train, None)
for micro in micro_batches_of(Plan(length=len(train), batch_size=64, micro_batch_size=64), Sharing(), first=0,
last=500):
    inputs, targets = fetch(micro)
    assert (inputs[:, 1:] == targets[:, :-1]).all() and ((inputs + 1) % 256 == targets).all()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 60  # MB; in memory it would be 300

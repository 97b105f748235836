"""Progress bars in logs: of a line that is drawn again and again, its last state."""

from __future__ import annotations

import subprocess
import sys

import pytest

from train.run.progress_lines import Folding, fold

BAR = """
import sys, time
from tqdm import tqdm
print("before", flush=True)
for step in tqdm(range(200), mininterval=0):
    if step == 100:
        tqdm.write("half way")
print("after", flush=True)
"""


@pytest.fixture(scope="module")
def bar() -> bytes:
    """What a program with a progress bar writes into a file."""
    done = subprocess.run(
        [sys.executable, "-u", "-c", BAR], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True
    )
    assert done.stdout.count(b"\r") > 100
    return done.stdout


def test_of_a_progress_bar_its_last_state_is_left(bar: bytes) -> None:
    lines = fold(bar).decode().splitlines()
    assert lines[0] == "before" and lines[-1] == "after" and "half way" in lines
    assert "200/200" in lines[-2] and len(lines) <= 6


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_it_does_not_matter_in_which_pieces_output_comes(bar: bytes, size: int) -> None:
    folding = Folding()
    pieces = [folding.feed(bar[at : at + size]) for at in range(0, len(bar), size)]
    assert b"".join(pieces) + folding.end() == fold(bar)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (b"a\nb\n", b"a\nb\n"),
        (b"a\r\nb\r\n", b"a\nb\n"),
        (b"no end", b"no end"),
        (b"\r 1%\r 2%", b" 2%"),
        (b"\r 1%\r 2%\r", b" 2%"),
        (b"\n\n", b"\n\n"),
        (b"", b""),
        (b"\xff\xfe\r\x00\n", b"\x00\n"),
        (b"\r 1%\x1b[A\n\r 2%\x1b[A\ndone\n", b" 2%\ndone\n"),
    ],
)
def test_lines_that_are_not_drawn_again_stay_as_they_are(text: bytes, seen: bytes) -> None:
    assert fold(text) == seen


def test_a_bar_that_is_being_drawn_is_seen_now_and_then() -> None:
    folding = Folding(every=0)
    assert folding.feed(b"\r 1%") == b" 1%\n"
    assert folding.feed(b"") == b""
    assert folding.feed(b"\r 2%") == b" 2%\n"

"""`train`, typed in a terminal of root's in the station, is code of dev's on that terminal: it types nothing there."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.terminal import OWN

pytestmark = pytest.mark.never_forgiven

UNTYPED = Path(__file__).parents[2] / "docker/rootfs/usr/local/lib/trainstation/untyped.py"
# as libc does it; with a number of 64 bits, of which the kernel takes the lower half; by x32's; and, last, a request
# for nothing but the window's size, which is everybody's
TYPE = """
import ctypes, errno, os, platform
libc = ctypes.CDLL(None, use_errno=True)
is_x86 = platform.machine() == "x86_64"
ioctl = 16 if is_x86 else 29
ways = [(ioctl, 0x5412), (ioctl, 1 << 40 | 0x5412), *([(0x40000000 | 514, 0x5412)] if is_x86 else []), (ioctl, 0x5413)]
for number, request in ways:
    done = libc.syscall(ctypes.c_long(number), ctypes.c_long(0), ctypes.c_long(request), ctypes.create_string_buffer(8))
    print(errno.errorcode[ctypes.get_errno()] if done else "done")
"""


def typed_into(*before: str) -> tuple[int, list[str]]:
    """What comes of it in a terminal of its own: the exit code, and a word an attempt."""
    terminal, inner = pty.openpty()
    command = [sys.executable, "-c", OWN, *before, sys.executable, "-c", TYPE]
    process = subprocess.Popen(command, stdin=inner, stdout=subprocess.PIPE, text=True, start_new_session=True)
    said, _ = process.communicate(timeout=60)
    os.close(terminal)
    os.close(inner)
    return process.returncode, said.split()


def test_what_runs_on_roots_terminal_types_nothing_there() -> None:
    if typed_into()[1][0] != "done":
        pytest.skip("this kernel lets nobody type for another")
    code, said = typed_into(sys.executable, "-I", "-S", str(UNTYPED))
    assert (code, {*said[:-1]}, said[-1]) == (0, {"EPERM"}, "done")


def test_exit_code_pipes_and_descendants_are_those_of_the_command() -> None:
    line = "cat; grep NoNewPrivs /proc/self/status >&2; exit 75"
    command = [sys.executable, "-I", "-S", str(UNTYPED), "bash", "-c", line]
    done = subprocess.run(command, input=b"as it came\n", capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.split()) == (75, b"as it came\n", [b"NoNewPrivs:", b"1"])

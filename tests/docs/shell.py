"""Executes the commands of a page in one shell, in a scratch folder that looks like a checkout."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import psutil

from tests.docs.pages import ROOT, Page, commands, programs
from tests.train import forks
from train.launcher import tmux

PATIENCE = 900
"""Seconds after which the commands of a page count as hanging. Never a measure of speed."""
SHOWN = 6000
"""Maximum number of characters of a failed command's output that are shown."""
MARK = "DOCS_PAGE"
"""Environment variable of the processes that a page starts: its scratch folder. Ranks, which are forked from a process
that all pages share, are known by their current folder."""

ELSEWHERE = {
    ("train", "attach"): "tests/train/launcher/test_launch.py",
    ("train", "top"): "tests/train/commands/test_top.py",
    ("train", "keeper"): "tests/train/launcher/test_keeper.py",
    ("train", "exporter"): "tests/train/monitor/test_exporter.py",
}
"""Maps a command that has no end, or needs a person, to the test that runs it."""

_LINKED = ("benchmarks", "deploy", "docker", "docs", "examples", "scripts", "tests", "train")
"""Folders of the checkout that commands only read."""
_FUNCTIONS = r"""
expect() { # expect CODE WANTED: leave the shell, unless a command ended as the page says
    [ "$1" = "$2" ] && return
    printf '\n(exit code %s, not %s)\n' "$1" "$2"
    exit 1
}
"""


def runs_elsewhere(words: list[str]) -> bool:
    """Whether a command is left to another test."""
    return tuple(words[:2]) in ELSEWHERE and not {"--once", "--help"} & set(words)


def script(page: Page) -> str:
    """A shell script with the commands of a page, each followed by a check of its exit code."""
    lines = [_FUNCTIONS]
    for block in page.blocks:
        if block.file:
            place = Path(block.file)
            assert not place.is_absolute() and ".." not in place.parts, page.fault(block.line, "give a name without ..")
            lines.append(f"mkdir -p {place.parent}; printf %s {shlex.quote(block.text + chr(10))} > {block.file}")
        if block.language != "bash" or block.mark is not None:
            continue
        for command in commands(block):
            if any(map(runs_elsewhere, programs(command.text))):
                continue
            title = f"{page.name}:{command.line}: {command.text}"
            lines += [f"printf '\\n\\1%s\\n' {shlex.quote(title)}", command.text, f"expect $? {command.exit_code}"]
    return "\n".join([*lines, r"printf '\1'"]) + "\n"


def make_folder(folder: Path) -> Path:
    """Make what a checkout has, for commands that read it, and the commands of this interpreter's environment.

    Returns:
        The folder of these commands.
    """
    for name in _LINKED:
        (folder / name).symlink_to(ROOT / name)
    for path in ROOT.iterdir():
        if path.is_file() and path.name not in (".git", ".env"):
            (folder / path.name).symlink_to(path)
    for name in ("datasets", "notebooks", "projects", "runs"):
        (folder / name).mkdir()
    made = folder / ".venv" / "bin"
    made.mkdir(parents=True)
    (made / "activate").touch()  # they are on PATH already
    for name, what in {"train": "-P -m train", "python": "", "python3": ""}.items():
        program = made / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {what} "$@"\n')
        program.chmod(0o755)
    return made


def environment(folder: Path, own_programs: Path) -> dict[str, str]:
    """The environment of a page's shell: nothing of the tests' own surroundings that changes how a run behaves."""
    others = ("TRAIN_", "TORCHELASTIC", "PYTEST_", "COLUMNS", "LINES", "TMUX")
    outer = {key: value for key, value in os.environ.items() if not key.startswith(others)}
    path = os.pathsep.join([str(own_programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    python = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    usual = outer | {"PATH": path, "PYTHONPATH": python, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    # libraries are imported once for all pages: a start takes 2 s of CPU time instead of 6
    return usual | forks.held_warm(usual) | {"TRAIN_STATE": str(folder / ".state"), MARK: str(folder)}


def execute(page: Page, folder: Path) -> str | None:
    """Execute the commands of a page in an empty folder, and end what they leave running.

    Returns:
        Which command failed and what it said, or None.
    """
    place, printed, checkout = folder / "page.sh", folder / "printed", folder / "checkout"
    checkout.mkdir()
    own_programs = make_folder(checkout)
    place.write_text(script(page))
    with printed.open("wb") as out:
        shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc", str(place)], cwd=checkout, env=environment(checkout, own_programs),
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = shell.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            end_all(checkout)
            shell.wait()
    last = printed.read_text(errors="replace").rpartition("\1")[2]
    if code == 0 and not last:
        return None
    title, _, output = last.partition("\n")
    return f"{title}\n{'(hangs)' if code == -1 else ''}{output[-SHOWN:]}"


def living(folder: Path) -> list[psutil.Process]:
    """The processes that a page's commands have started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ours = process.environ().get(MARK) == str(folder) or Path(process.cwd()).is_relative_to(folder)
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_all(folder: Path) -> None:
    """End what still runs, until nothing does."""
    subprocess.run(tmux.tmux(folder / "runs", "kill-server"), capture_output=True, check=False)
    while left := living(folder):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=10)

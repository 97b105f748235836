"""What TAB offers: asked as bash asks, with the file that the image has for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from train import config, tasks
from train.commands import COMMANDS
from train.run import folders

FILE = Path(__file__).parents[3] / "docker/rootfs/usr/local/share/bash-completion/completions/train"
ASK = """
. "$1"
shift
for line; do
    COMP_LINE=$line COMP_POINT=${#line} COMP_TYPE=9 COMPREPLY=()
    read -ra COMP_WORDS <<<"$line"
    [[ $line != *' ' ]] || COMP_WORDS+=('')
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _python_argcomplete train
    (IFS=$'\\t'; printf '%s\\n' "${COMPREPLY[*]}")
done
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs, files, and the commands that bash calls."""
    folder = tmp_path_factory.mktemp("complete")
    for runs, name in (("runs", "alpha"), ("runs", "beta"), ("elsewhere", "gamma")):
        folders.create(folder / runs, name, files={}, record={"world_size": 1})
    for step in (20, 40):
        (folder / f"runs/alpha/checkpoints/step-{step:08}").mkdir(parents=True)
    for name in ("mine.py", "notes.txt", "some.toml", "w.pt", "w.safetensors"):
        (folder / name).touch()
    (folder / "bin").mkdir()
    modules = {"train": "train", "register-python-argcomplete": "argcomplete.scripts.register_python_argcomplete"}
    for name, module in modules.items():
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    return folder


OFFERED = {
    "train ": set(COMMANDS),
    "train --runs elsewhere sh": {"show"},
    "train show ": {"alpha", "beta"},
    "train rm alpha b": {"beta"},
    "train --runs elsewhere stop ": {"gamma"},
    "train logs alpha --runs=else": {"elsewhere/"},
    "train launch ": {*tasks.BUILT_IN, "mine.py", "bin/", "elsewhere/", "runs/"},
    "train launch --follow --batch-size 4 --optim.weight-decay=1 --compile true di": {"digits"},
    "train run digits --optim.": {f"--{name}" for name in config.fields() if name.startswith("optim.")},
    "train run digits --precision ": {"auto", "fp64", "fp32", "bf16", "fp16", "tf32"},
    "train run digits --sync-batchnorm ": {"true", "false"},
    "train run digits --max": set(),
    "train run --config so": {"some.toml"},
    "train run --init w.": {"w.pt", "w.safetensors"},
    "train ls --state ": {
        "checking",
        "other-format",
        "created",
        "queued",
        "running",
        "stopped",
        "interrupted",
        "copy",
        "failed",
        "finished",
    },
    "train submit digits --on ": {"slurm", "kubernetes"},
    "train export alpha --checkpoint ": {"best", "20", "40"},
    "train bench ": {"checkpoint", "collective", "input", "lr", "scaling"},
    "train nonsense ": set(),
}


@pytest.fixture(scope="module")
def offered(place: Path) -> dict[str, set[str]]:
    """What bash gets for each line."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("TRAIN_")}
    environ["PATH"] = f"{place / 'bin'}{os.pathsep}{environ['PATH']}"
    environ["PYTHONPATH"] = str(Path(__file__).parents[3])
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK, "bash", FILE, *OFFERED],
        cwd=place, env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    answers = done.stdout.splitlines()
    assert len(answers) == len(OFFERED) and not done.stderr, done
    return {
        line: {word.strip() for word in answer.split("\t") if word}
        for line, answer in zip(OFFERED, answers, strict=True)
    }


@pytest.mark.parametrize("line", OFFERED)
def test_tab_offers_what_may_come_next(offered: dict[str, set[str]], line: str) -> None:
    assert offered[line] == OFFERED[line]

"""A checkout and six packages train: no tmux, no network, nothing else that `make setup` installs.

GPU machines elsewhere have no more. An import of anything else fails there, and so it does here: a `sitecustomize` on
PYTHONPATH finds it in no process.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.__main__ import PARTS

ROOT = Path(__file__).parents[2]
ALLOWED = ("torch", "numpy", "pydantic", "tomli_w", "psutil", "safetensors")
THEIRS = (
    "torchgen", "functorch", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock", "triton",
    "nvidia", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection", "setuptools",
    "_distutils_hack",
)  # fmt: skip
"""What those bring with them."""

GUARD = """
import sys

class Guard:
    allowed = set({allowed!r}) | set(sys.stdlib_module_names) | {{"train", "tests", "benchmarks", "sitecustomize"}}

    def __init__(self, others):
        self.others = others

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in self.allowed and not top.startswith("_"):
            return None
        return next((found for other in self.others if (found := other.find_spec(name, path, target))), None)

    def invalidate_caches(self):
        for other in self.others:
            getattr(other, "invalidate_caches", lambda: None)()

sys.meta_path[:] = [Guard(list(sys.meta_path))]
"""


@pytest.fixture
def plain(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with nothing else."""
    (tmp_path / "sitecustomize.py").write_text(GUARD.format(allowed=[*ALLOWED, *THEIRS]))
    (tmp_path / "bin").mkdir()
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR", "TRAIN_STATE") if name in os.environ}
    return kept | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": str(tmp_path / "bin")}


def python(plain: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT, env=plain, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip


@pytest.mark.minutes
def test_nothing_else_is_found(plain: dict[str, str]) -> None:
    assert python(plain, "-c", "import torch, safetensors, train.launcher.foreground").returncode == 0
    done = python(plain, "-c", "import sklearn")
    assert done.returncode and "No module named 'sklearn'" in done.stderr


@pytest.mark.minutes
def test_a_run_trains_there(plain: dict[str, str], tmp_path: Path) -> None:
    done = python(plain, "-m", "train", "run", "fake", "--name", "a", "--steps", "6", "--runs", tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    assert "tensorboard is not installed" in done.stderr
    assert json.loads((tmp_path / "runs" / "a" / "run.json").read_text())["state"] == "finished"


@pytest.mark.minutes
def test_a_terminal_without_tqdm_gets_no_bar_and_the_run_ends(plain: dict[str, str], tmp_path: Path) -> None:
    """The agent of a launched run has a terminal, that of tmux."""
    (tmp_path / "bin" / "tmux").symlink_to(shutil.which("tmux") or "")
    runs = tmp_path / "runs"
    done = python(plain, "-m", "train", "launch", "fake", "--name", "a", "--steps", 3, "--follow", "--runs", runs)
    assert done.returncode == 0, done.stderr
    outer, inner = pty.openpty()
    command = [sys.executable, "-m", "train", "run", "fake", "--name", "b", "--steps", "3", "--runs", str(runs)]
    process = subprocess.Popen(command, cwd=ROOT, env=plain, stderr=inner)
    os.close(inner)
    said = b""
    with contextlib.suppress(OSError):  # its other end is closed
        while part := os.read(outer, 4096):
            said += part
    os.close(outer)
    assert process.wait(60) == 0, said
    assert b"step 3/3" in said


@pytest.mark.bench
def test_the_proof_on_a_gpu_runs_there_on_the_cpu(plain: dict[str, str], tmp_path: Path) -> None:
    """What needs a GPU is written to be run; that its code runs is what can be shown here."""
    found = tmp_path / "found.json"
    done = python(
        plain, "-m", "tests.gpu", "--device", "cpu", "--small", "--json", found, "--folder", tmp_path, "--minutes", 14,
        "--patience", 300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("NOT RUN ON A DEVICE")
    rows = json.loads(found.read_text())["rows"]
    exact = [row for row in rows if row["part"] == "exact" and row["verdict"] != "not checked"]
    assert len(exact) == 5 and all(row["verdict"] == "ok" for row in exact), exact
    told = {row["what"]: row["verdict"] for row in rows if row["part"] == "memory"}
    assert told["a micro batch that fits"] == told["a device that is full"] == "ok"
    unchecked = [row["what"] for row in rows if row["verdict"] == "not checked"]
    assert "memory of the device freed after SIGKILL" in unchecked
    assert {row["part"] for row in rows} == set(PARTS) and not any(row["late"] for row in rows)
    assert "| recovery | memory of the device freed after SIGKILL |" in done.stdout
    assert not list(tmp_path.glob(".test-gpu-*"))


@pytest.mark.bench
def test_another_package_of_the_name_tests_is_not_taken_for_it(plain: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    plain["PYTHONPATH"] = str(tmp_path)
    done = python(plain, "-m", "tests.gpu", "--device", "cuda")
    assert done.returncode == 2 and "--device cpu --small" in done.stderr, done.stderr


@pytest.mark.minutes
def test_without_a_gpu_it_says_so_and_measures_nothing(plain: dict[str, str]) -> None:
    done = python(plain, "-m", "tests.gpu", "--device", "cuda")
    assert done.returncode == 2 and "--device cpu --small" in done.stderr and "Traceback" not in done.stderr

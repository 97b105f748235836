"""The package is usable beside a user's own train.py, under the name trainstation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import train
import trainstation
from trainstation import gather
from trainstation.build import objects, updates
from trainstation.launcher import checks
from trainstation.trainer import train as loop

assert train.MINE == 1 and sys.modules["train"] is train
strays = [name for name in sys.modules if name.startswith("train.")]
assert not strays, strays
assert gather.__module__ == "trainstation.parallel.gather"
print(trainstation.__version__, objects.__name__, loop.__name__)
"""


def test_a_script_imports_the_package_beside_its_own_train_py(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("MINE = 1\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0.1.0 trainstation.build.objects trainstation.trainer.train\n"


def test_the_package_never_imports_itself_as_train() -> None:
    """All imports of the package are relative, and no module name stands in it with the first name of the package."""
    named = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in sorted((ROOT / "train").rglob("*.py"))
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if line.lstrip().startswith(("from train.", "from train import", "import train"))
    ]
    assert named == []

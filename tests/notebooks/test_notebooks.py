"""Every notebook runs from its first cell to its last, and is stored without output."""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture
def executed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nbformat.NotebookNode:
    """A notebook after all its cells were run, in a kernel whose runs go to a folder of this test."""
    monkeypatch.setenv("TRAIN_RUNS", str(tmp_path / "runs"))
    # The commands of this interpreter's environment are what `!train` finds, as in an activated one.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(FOLDER / request.param, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    return notebook


def outputs(notebook: nbformat.NotebookNode) -> str:
    texts = [o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", [])]
    return "".join(texts)


@pytest.mark.parametrize("executed", ["01-start-here.ipynb"], indirect=True)
def test_start_here_trains_a_run_and_draws_its_curve(executed: nbformat.NotebookNode, tmp_path: Path) -> None:
    (run,) = (tmp_path / "runs").glob("first-*")
    assert f"{run.name}: finished" in outputs(executed)
    pictures = [o for cell in executed.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) == 1
    assert "Traceback" not in outputs(executed)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_stored_clean(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in notebook.cells)

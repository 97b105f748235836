"""A run of another format is shown and removed; everything else refuses it in a line and touches nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trainstation
from tests.train.commands.test_bad_input import entries, here, refused
from tests.train.conftest import command
from train.run import folders
from train.run.record import FORMAT, other_format

__all__ = ["here"]


def test_a_run_of_another_format_is_only_shown_and_removed(here: Path) -> None:
    files = {"config.toml": "seed = 0\ncheckpoint = 3\n", "task.py": "raise SystemExit('executed')\n"}
    run = folders.create(here / "runs", "other", files=files, record={"task": "task.py"})
    record = {**run.read(), "state": "running", "step": 7, "attempts": {"a": "b"}, "metrics": 5, "format": FORMAT - 1}
    (run.folder / "run.json").write_text(json.dumps(record))
    run.logs(2).mkdir(parents=True)
    (run.logs(2) / "rank0.log").write_text("what it said\n")
    run.checkpoint(7).mkdir()
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    says = f"other has the format {FORMAT - 1}, and this version of train uses format {FORMAT}"
    for arguments in (
        ["resume", "other"], ["stop", "other"], ["mv", "other", "new"], ["fork", "other", "--name", "new"],
        ["eval", "other"], ["export", "other", "--to", "x.pt"], ["mirror", "other"], ["archive", "other"],
        ["plot", "other", "--to", "x.png"], ["report", "other"], ["attach", "other"], ["resume", "--all"],
        ["launch", "digits", "--init", "other"],
    ):  # fmt: skip
        refused(command(*arguments), says, "train rm other")
    api_run = trainstation.find("other", runs=here / "runs")
    for use in (api_run.model, api_run.state_dict, api_run.resume, api_run.fork, api_run.plot):
        with pytest.raises(trainstation.Refused, match=says):
            use()
    assert command("ls")[1].splitlines()[1].split()[:3] == ["other", "other-format", "7"]
    assert api_run.state == "other-format"
    assert command("ls", "--columns", "name,seed", "--json")[0] == 2
    assert json.loads(command("ls", "--json")[1])[0]["format"] == FORMAT - 1
    code, out, err = command("show", "other")
    assert (code, err) == (0, "") and says in " ".join(out.split()) and "train rm other" in out
    assert json.loads(command("show", "other", "--json")[1])["state"] == "other-format"
    assert command("logs", "other")[1] == "what it said\n" and "other-format" in command("top", "--once")[1]
    assert says in command("keeper", "--once")[2]
    assert before == {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    assert command("rm", "other")[0] == 0 and entries(here) == {"runs"}


@pytest.mark.parametrize(
    ("content", "said"),
    [({"format": FORMAT}, ""), ({}, "a has no format, and"), ({"format": None}, "a has no format, and"),
     ({"format": True}, "a has the format true, and"), ({"format": "2"}, 'a has the format "2", and'),
     ({"format": 1}, "a has the format 1, and this version of train uses format 2; use the version that wrote it"),
     ({"format": "\x1b[2J" * 50}, "a has the format ")],
)  # fmt: skip
def test_only_the_number_of_this_format_is_taken(content: dict[str, object], said: str) -> None:
    found = other_format(content, "a")
    assert found.startswith(said) and bool(found) == bool(said)
    assert found.isprintable() and len(found) < 150

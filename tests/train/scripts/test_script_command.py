"""With which arguments a script is started: `{run}`, and `--on-restart` when it is started again."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from train.errors import Refused
from train.run import spec
from train.scripts.command import Starts, merged, split


@pytest.mark.parametrize(
    ("arguments", "more", "result"),
    [
        ("-a r18 --resume X /data", "--resume Y", "-a r18 --resume Y /data"),
        ("--resume=X /data", "--resume Y", "--resume Y /data"),
        ("--resume X /data", "--resume=Y", "--resume=Y /data"),
        ("--resume /data", "--resume", "--resume /data"),
        ("--resume --lr 1", "--resume Y", "--resume Y --lr 1"),
        ("--out a", "--resume Y -v", "--out a --resume Y -v"),
        ("--lr 1 -- /data", "--resume Y --lr=2", "--lr=2 --resume Y -- /data"),
        ("--betas 1 2 --lr -1", "--lr -.2 --betas 3 4", "--betas 3 4 --lr -.2"),
        ("--tag a --tag b --lr 1", "--tag c --tag d", "--tag c --tag d --lr 1"),
        ("init=scratch lr=1", "init=resume last", "init=resume lr=1 last"),
        ("--resume_from X --resumed", "--resume Y", "--resume_from X --resumed --resume Y"),
        ("", "go on", "go on"),
    ],
)
def test_arguments_of_the_same_name_are_replaced_and_others_added(arguments: str, more: str, result: str) -> None:
    assert " ".join(merged(arguments.split(), more.split())) == result


def made(arguments: str, on_restart: str | None) -> spec.Spec:
    values = {"name": "a", "attempts": [], "script": "/a.py", "script_arguments": arguments.split()}
    words = None if on_restart is None else split(on_restart)
    return spec.spec_of(values | {"on_restart": words}, {})  # type: ignore[arg-type]


def test_the_newest_match_is_taken_and_nothing_else_is_touched(tmp_path: Path) -> None:
    run = tmp_path / "lr=[1]*{x}"  # a folder whose name looks like a pattern
    (run / "my out").mkdir(parents=True)
    it = made("--out {run}/out {run}x {epoch} {newest}", "--from '{newest:{run}/my out/*.pt}' --log={run}/{rank}")
    plain = ["--out", f"{run}/out", f"{run}x", "{epoch}", "{newest}"]
    assert Starts(it).arguments(run, 1) == (plain, "")
    arguments, line = Starts(it).arguments(run, 2)
    assert arguments == plain and f"because nothing matches {run}/my out/*.pt" in line
    for age, name in enumerate(("b.pt", "a.pt", "c.pt", "d.txt")):
        (run / "my out" / name).touch()
        os.utime(run / "my out" / name, (1000 - 10 * (name == "c.pt") + age,) * 2)
    arguments, line = Starts(it).arguments(run, 2)
    assert arguments == [*plain, "--from", f"{run}/my out/a.pt", f"--log={run}/{{rank}}"]
    assert line.startswith("attempt 2 starts with --from '") and line.endswith("(--on-restart)")
    missing = dataclasses.replace(it, on_restart=(*it.on_restart, "{newest:{run}/none}"))  # type: ignore[misc]
    assert Starts(missing).arguments(run, 2)[0] == plain  # all of it, or nothing


def test_paths_are_relative_to_the_folder_of_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "deep").mkdir(parents=True)
    (tmp_path / "out" / "deep" / "a.pt").touch()
    assert Starts(made("", "{newest:out/**/*.pt}")).arguments(tmp_path, 2)[0] == [f"{tmp_path}/out/deep/a.pt"]
    line = Starts(made("", "{newest:none/*}")).arguments(tmp_path, 2)[1]
    assert line.endswith(f"because nothing matches {tmp_path}/none/*")


def test_after_a_failed_start_the_match_before_is_taken(tmp_path: Path) -> None:
    for age, name in enumerate("abc"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000 + age,) * 2)
    starts = Starts(made("", "{newest:{run}/?}"))
    assert starts.arguments(tmp_path, 2, has_failed=True)[0] == [f"{tmp_path}/c"]
    assert starts.arguments(tmp_path, 3)[0] == [f"{tmp_path}/c"]  # killed: the file may be whole
    found, line = starts.arguments(tmp_path, 4, has_failed=True)
    assert found == [f"{tmp_path}/b"] and line.endswith(f"because the start with {tmp_path}/c has failed")
    os.utime(tmp_path / "c", (2000,) * 2)  # written again
    assert starts.arguments(tmp_path, 5)[0] == [f"{tmp_path}/c"]
    for attempt, name in ((6, "b"), (7, "a"), (8, "c")):  # all have failed: the newest
        assert starts.arguments(tmp_path, attempt, has_failed=True)[0] == [f"{tmp_path}/{name}"]


@pytest.mark.parametrize("on_restart", [None, ""])
def test_without_arguments_for_a_restart_they_stay(on_restart: str | None, tmp_path: Path) -> None:
    assert Starts(made("--a 1", on_restart)).arguments(tmp_path, 3) == (["--a", "1"], "")


@pytest.mark.parametrize("text", ["'", "--a {newest:", "--a {newest:a b}", "{newest:}", "{newest:{rank}/a}"])
def test_broken_texts_are_refused(text: str) -> None:
    with pytest.raises(Refused):
        split(text)

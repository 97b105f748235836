"""What a run folder and its engine say together, and who leaves such a run alone. No Slurm is needed here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.commands.test_bad_input import command, refused
from train.cluster.submission import Standing, seconds_of, time_of
from train.record import folders
from train.record.store import Run
from train.runs import control
from train.runs.standing import seen_by

WAITS, RUNS = Standing(False, "pending, Priority"), Standing(True, "running")


@pytest.mark.parametrize(
    ("state", "standing", "effective", "words"),
    [
        ("created", WAITS, "queued", "job 7 of slurm: pending, Priority"),
        ("created", RUNS, "queued", "not begun yet"),
        ("created", None, "interrupted", "train resume a hands the run over again"),
        ("stopped", WAITS, "queued", "pending"),  # warned, saved, and in the queue again
        ("stopped", RUNS, "stopped", "as it was"),
        ("stopped", None, "stopped", "as it was"),
        ("running", RUNS, "running", "as it was"),
        ("interrupted", WAITS, "queued", "pending"),
        ("interrupted", RUNS, "running", "job 7 of slurm: running"),
        ("interrupted", None, "interrupted", "as it was"),
    ],
)
def test_a_state_is_what_folder_and_engine_say(
    state: str, standing: Standing | None, effective: str, words: str
) -> None:
    record = {"name": "a", "state": state, "reason": "as it was", "submitted": {"engine": "slurm", "job": "7"}}
    seen = seen_by(record, {"7": standing} if standing else {})
    assert seen["state"] == effective
    assert words in seen["reason"]


def submitted(runs: Path) -> Run:
    record = {"submitted": {"engine": "slurm", "job": "7"}, "state": "running", "task": "digits"}
    run = folders.create(runs, "a", {}, record)
    run.begin_attempt(2, 0)
    return run


def test_without_slurm_the_folder_is_what_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    run = submitted(tmp_path)
    code, out, _ = command("ls", "--runs", tmp_path)
    assert code == 0 and " interrupted " in out
    before = run.read()
    refused(command("stop", "a", "--runs", tmp_path), "slurm does not answer here", "job 7")
    refused(command("resume", "a", "--runs", tmp_path), "slurm does not answer here", "job 7")
    refused(command("resume", "a", "--nproc", 3, "--runs", tmp_path), "--nproc", "in that shape")
    assert run.read() == before


def test_nobody_but_its_engine_and_its_user_starts_it_again(tmp_path: Path) -> None:
    run = submitted(tmp_path)
    assert run.state() == "interrupted"
    assert not control.resumable(run)
    run.update(state="stopped", stopped_by="signal")
    assert not control.resumable(run)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("2:30", 150), ("8:00:00", 28800), ("1-0", 86400), ("1-12:30", 131400), ("2-00:00:01", 172801)],
)
def test_a_time_limit_is_read_as_slurm_reads_it(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds == seconds_of(time_of(seconds))

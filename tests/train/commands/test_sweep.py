"""`train sweep`: what it refuses before the first trial, and how a sweep is extended, stopped, resumed and removed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import Station
from tests.waiting import eventually

SCRIPT = """
import json, os, pathlib, sys, time
x, folder = float(sys.argv[1]), pathlib.Path(__file__).parent
while (folder / "wait").exists():
    time.sleep(0.05)
if (folder / f"bad-{sys.argv[1]}").exists() or (folder / "bad").exists():
    raise ValueError("x is bad")
with (pathlib.Path(os.environ["TRAIN_RUN_DIR"]) / "metrics.jsonl").open("a") as file:
    file.write(json.dumps({"step": 1, "wer": x}) + "\\n" + json.dumps({"step": 2, "wer": x + 1}) + "\\n")
"""


def script(station: Station, *files: str) -> Path:
    path = station.folder / "fit.py"
    path.write_text(SCRIPT)
    for name in files:
        (station.folder / name).touch()
    return path


def sweep(station: Station, name: str, values: str, *more: object) -> Any:
    given = ("--script", station.folder / "fit.py", "--name", name, "--grid", f"x={values}", "--metric", "min:wer")
    return station("sweep", *given, *more, "--", "{x}")


def states(station: Station, name: str) -> dict[str, str]:
    rows = json.loads(station.ok("ls", name, "--json").stdout)
    return {trial: one["state"] for row in rows for trial, one in row["trials"].items()}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--grid", "optim.lr=1e-3,0.001"), "0.001 is there twice"),
        (("--grid", "optim.lrr=1,2"), "did you mean optim.lr?"),
        (("--grid", "optim.lr=1e-3,-1"), "should be greater than 0"),
        (("--grid", "device=cpu,cuda"), "device: all trials of a sweep train on the same device"),
        (("--grid", "seed=1,2", "--seed", "3"), "the sweep sets seed"),
        (("--grid", "seed=1,2", "--metric", "max:"), "give the name of a metric"),
        (("--grid", "seed=1,2", "--at-once", "0"), "at least 1"),
        (("--grid", "seed=1,2", "--add", "seed=3"), "--add is for a sweep that exists"),
        (("--retry-failed",), "leave out --name"),
        (("--grid", "seed=1,2", "--rungs", "20,10"), "--rungs 20,10: give steps in rising order, as in 500,2000"),
        (("--grid", "seed=1,2", "--rungs", "half"), "--rungs half: give steps"),
        (("--grid", "seed=1,2", "--name", "n" * 62), "not a legal run name"),
        (("--grid", "seed=1,2", "--nnodes", "2"), "unknown flag --nnodes"),
        ((), "the sweep has no trials"),
    ],
)
def test_a_wrong_sweep_is_refused_at_once(station: Station, words: tuple[str, ...], why: str) -> None:
    done = station.here("sweep", "digits", "--name", "never", *words)
    assert done.returncode == 2 and why in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not station.runs.exists() or not [*station.runs.iterdir()]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--grid", "task.width=8,0"), "should be greater than or equal to 1 (never-002: task.width=0)"),
        (("--grid", "seed=1,2", "--metric", "max:acuracy"), "--metric max:acuracy: no evaluation gives acuracy"),
        (("--grid", "seed=1,2", "--rungs", "5"), "--schedule.decay cosine depends on the length of the run"),
        (
            ("--grid", "schedule.decay=constant,linear", "--rungs", "15", "--eval.every_steps", "15"),
            "--schedule.decay linear depends on the length of the run, so trials would be compared in the middle of it",
        ),
        (
            ("--grid", "steps=12,6", "--rungs", "8", "--eval.every_steps", "4", "--schedule.decay", "constant"),
            "--rungs 8: a trial ends with step 6; give smaller steps, or longer trials (never-002: steps=6)",
        ),
        (
            ("--grid", "seed=1,2", "--rungs", "5,12", "--steps", "12", "--schedule.decay", "constant"),
            "--rungs 12: a trial ends with step 12",
        ),
        (
            ("--grid", "seed=1,2", "--rungs", "5", "--schedule.decay", "constant"),
            "--rungs 5: no evaluation comes before; give --eval.every_steps 5",
        ),
    ],
)
def test_a_sweep_is_refused_for_what_only_its_task_knows(station: Station, words: tuple[str, ...], why: str) -> None:
    done = station("sweep", "digits", "--name", "never", *words)
    assert done.returncode == 2 and why in done.stderr, done.stderr
    assert not station.runs.exists() or not [*station.runs.iterdir()]


def test_a_dry_run_lists_the_trials_and_starts_nothing(station: Station) -> None:
    words = ("--grid", "optim.lr=1e-3,1e-2", "--repeat", "seed=0..2", "--at-once", 2, "--dry-run")
    lines = station.here("sweep", "digits", "--name", "lr", *map(str, words)).stdout.splitlines()
    assert lines[0] == "lr-001  optim.lr=1e-3 seed=0"
    assert lines[6] == "6 trials, 2 at once; nothing was started"
    refused = station.here("sweep", "digits", "--name", "../lr", *map(str, words))
    assert refused.returncode == 2 and "not a legal run name" in refused.stderr and not refused.stdout
    assert not station.runs.exists()


def test_a_failed_trial_is_started_again_and_a_sweep_gets_more_values(station: Station) -> None:
    script(station, "bad-3")
    assert sweep(station, "fit", "2,3").returncode == 0
    record = station.wait_for_end("fit")
    assert record["reason"] == "1 of 2 trials failed (fit-002); again: train sweep fit --retry-failed"
    assert (record["state"], record["step"], record["total_steps"]) == ("finished", 2, 2)
    (station.folder / "bad-3").unlink()
    station.ok("sweep", "fit", "--retry-failed", "--add", "x=1")
    station.wait_for_end("fit")
    assert states(station, "fit") == dict.fromkeys(("fit-001", "fit-002", "fit-003"), "finished")
    assert len(station.record("fit-001")["attempts"]) == 1 and len(station.record("fit-002")["attempts"]) == 2
    made = [station.record(trial)["command_line"] for trial in ("fit-002", "fit-003")]
    assert made[1] == f"{made[0]} && train sweep fit --retry-failed --add x=1"
    refused = station.here("sweep", "fit-001", "--add", "x=7")
    assert refused.returncode == 2 and "fit-001 is no sweep, and --add is for one" in refused.stderr
    shown = station.ok("ls", "fit").stdout
    assert shown.splitlines()[1].split() == ["1", "1/1", "1.0000", "finished", "fit-003"]
    assert shown.splitlines()[-1] == "the best: fit-003; to look at it: train show fit-003"
    assert "2.0000" in station.ok("ls", "fit", "--metric", "last:min:wer").stdout.splitlines()[1]
    again = sweep(station, "fit", "2,3")
    assert again.returncode == 0 and "has finished already" in again.stderr
    for more in ((), ("--dry-run",)):
        other = sweep(station, "fit", "2,4", *more)
        assert other.returncode == 2 and "another space" in other.stderr and not other.stdout
    assert station.ok("ls", "--columns", "name,step", "--csv").stdout.splitlines()[1:] == ["fit,3"]
    other = sweep(station, "rung", "2,4", "--rungs", "1")
    assert other.returncode == 2 and "--rungs is for a task" in other.stderr
    other = station.here("sweep", "fit", "--add", "x=9", "--metric", "loss")
    assert other.returncode == 2 and "leave out --metric" in other.stderr
    inner = station("sweep", "digits", "--grid", "seed=1", env={"TRAIN_RUN_DIR": str(station.runs / "fit-001")})
    assert inner.returncode == 2 and "fit-001 is a trial of a sweep and cannot start a sweep" in inner.stderr
    refused = station.here("mv", "fit-001", "other")
    assert refused.returncode == 2 and "is a trial of a sweep" in refused.stderr
    station.ok("rm", "fit-002")  # it is not made again
    assert states(station, "fit")["fit-002"] == "removed"
    assert "the best: fit-003" in station.ok("ls", "fit").stdout
    station.ok("sweep", "fit", "--add", "x=0.5")
    assert station.wait_for_end("fit")["last_figures"] == {"wer": 0.5}
    assert states(station, "fit") == {"fit-001": "finished", "fit-002": "removed"} | dict.fromkeys(
        ("fit-003", "fit-004"), "finished"
    )
    for text in ('{"trials": 3}', '{"trials": {"../../x": {}}}', "[]"):
        damaged = station.runs / "damaged"
        damaged.mkdir(exist_ok=True)
        (damaged / "run.json").write_text((station.runs / "fit" / "run.json").read_text())
        content = json.loads((station.runs / "fit" / "sweep.json").read_text())
        (damaged / "sweep.json").write_text(json.dumps(content | json.loads(text)) if text != "[]" else text)
        refused = station("ls", "damaged")
        assert refused.returncode == 2 and "remove the sweep: train rm damaged" in refused.stderr, refused.stderr
        assert station.ok("ls").returncode == 0
    station.ok("rm", "damaged")
    station.ok("rm", "fit")
    assert not [*station.runs.iterdir()]


@pytest.mark.minutes
def test_a_stopped_sweep_takes_its_trials_along_and_leaves_one_that_a_user_has_stopped(station: Station) -> None:
    script(station, "wait")
    assert sweep(station, "halt", "1,2,3", "--at-once", 2).returncode == 0
    for name in ("halt-001", "halt-002"):
        station.wait(name, lambda record: record["state"] == "running")
    assert "train resume halt" in station.ok("stop", "halt").stderr
    assert station.record("halt")["state"] == station.record("halt-001")["state"] == "stopped"
    assert station.record("halt-002")["stopped_by"] == "sweep"
    assert "halt-003" not in station.record("halt")["reason"] and not (station.runs / "halt-003").exists()
    station.ok("resume", "halt")
    for name in ("halt-001", "halt-002"):
        station.wait(name, lambda record: record["state"] == "running" and len(record["attempts"]) == 2)
    station.ok("stop", "halt-001")
    station.wait("halt-003", lambda record: record["state"] == "running")
    station.ok("stop", "halt", "--now")
    assert station.record("halt-003")["state"] == "stopped" and not station.run("halt-003").alive()
    (station.folder / "wait").unlink()
    station.ok("resume", "halt")
    record = station.wait_for_end("halt")
    assert record["reason"] == "1 of 3 trials did not finish (halt-001)"
    assert states(station, "halt") == {"halt-001": "stopped", "halt-002": "finished", "halt-003": "finished"}


@pytest.mark.minutes
def test_three_failures_at_the_start_end_a_sweep(station: Station) -> None:
    script(station, "bad")
    done = sweep(station, "poor", "1,2,3,4,5", "--at-once", 1, "--follow")
    assert done.returncode == 3, done.stderr
    record = station.record("poor")
    assert record["reason"].startswith("the first 3 trials failed: ") and "x is bad" in record["reason"]
    assert record["reason"].endswith("(poor-001); go on all the same: train resume poor")
    assert not (station.runs / "poor-004").exists()
    assert states(station, "poor")["poor-004"] == "waiting"


@pytest.mark.minutes
def test_an_edited_script_ends_the_sweep_before_a_trial_runs_it(station: Station) -> None:
    path = script(station, "wait")
    sweep(station, "edit", "1,2")
    eventually("the first trial runs", (station.runs / "edit-001" / "run.json").exists)
    path.write_text(SCRIPT + "\n# edited\n")
    (station.folder / "wait").unlink()
    record = station.wait_for_end("edit")
    assert record["state"] == "failed" and "fit.py changed since the sweep was launched" in record["reason"]
    assert not (station.runs / "edit-002").exists()

"""Every view shows a run as the one RunStatus says that it stands."""

from __future__ import annotations

import fcntl
import re
import time
from pathlib import Path

import pytest

from train.format import duration
from train.monitor.prometheus import Collector
from train.monitor.status import RunStatus
from train.monitor.top import Page
from train.run import folders, heartbeat
from train.run.run_folder import Run, stamp
from train.views import cell, listing

LINE = '{{"step": {}, "epoch": 1, "loss": 0.5, "lr": 0.1, "samples_per_s": 8.0, "data_wait": 0.5, "step_time": 2.0}}\n'


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that has made 20 of 100 steps in 60 seconds, ten of them since its restart, and logged 18 of them."""
    run = folders.create(tmp_path, "a", files={}, record={"world_size": 1, "total_steps": 100})
    run.begin_attempt(1, 0)
    run.end_attempt("died", "rank 0 died of SIGKILL")
    run.begin_attempt(1, 10)
    run.note_ready(10)
    run.update(lambda record: record["attempts"][-1].update(ready=stamp(time.time() - 60)))
    run.metrics.write_text(LINE.format(18))
    heartbeat.Heart(run.logs(2) / "rank0.beat").beat(heartbeat.TRAINING, 20)
    return run


def test_all_views_agree_about_a_run_at_work(run: Run) -> None:
    with (run.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        one = RunStatus(run, run.read_effective())
        assert (one.step, one.total, one.restarts, one.deaths) == (20, 100, 1, 1)
        assert one.seconds_left == pytest.approx(480, abs=2), "ten steps took 60 seconds, evaluations and all"
        assert one.waits == 0.25 and one.last_progress is not None
        assert "20/100" in listing.listing([one], runs=run.folder.parent)
        assert "step         20/100  epoch 1" in listing.story(one)
        html = cell.html(one)
        assert "step 20 of 100" in html and f"{duration(480)} left" in html
        (row,) = (row.text for row in Page(run.folder.parent).rows(120, 30) if row.text.startswith("a "))
        assert "20/100" in row and "25 %" in row and re.search("0:08:0|0:07:5", row)
        found = {family.name: family.samples[0].value for family in Collector(run.folder.parent, 5).collect()
                 if family.samples}  # fmt: skip
        assert found["train_run_step"] == 20 and found["train_run_data_wait_ratio"] == 0.25


def test_who_runs_it_where_and_what_it_waits_for_is_told_by_all_views(run: Run) -> None:
    run.update(user="ann", host="box", gpus="2,3", device="cuda", reason="waits for node 1", attempts=[])
    with (run.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        one = RunStatus(run, run.read_effective())
        columns = ("name", "user", "machine", "gpus", "waits_for")
        row = listing.listing([one], runs=run.folder.parent, columns=columns).splitlines()[1]
        assert row.split() == ["a", "ann", "box", "2,3", "waits", "for", "node", "1"]
        shown = listing.story(one)
        assert all(re.search(line, shown) for line in ("gpus +2,3\n", "machine +box\n", "user +ann\n"))
        (info,) = (family.samples[0] for family in Collector(run.folder.parent, 5).collect()
                   if family.name == "train_run_info")  # fmt: skip
        assert (info.labels["user"], info.labels["gpus"]) == ("ann", "2,3")
    run.update(gpus=None, device="cpu", reason="", state="finished")
    one = RunStatus(run, run.read_effective())
    assert (one.gpus, one.waits_for) == ([], "")


def test_an_ended_run_has_no_speed_and_nothing_left(run: Run) -> None:
    run.end_attempt("failed", "the loss is nan", state="failed")
    one = RunStatus(run, run.read_effective())
    assert (one.step, one.step_time, one.waits, one.seconds_left) == (18, None, None, None)
    assert one.measured("samples_per_s") is None and one.next_command.startswith("look: train logs a")

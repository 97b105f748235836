"""A hang is found, explained and survived."""

from __future__ import annotations

from typing import Any

import psutil

from tests.train.conftest import Station

FIELDS = (
    "--steps", 40, "--batch_size", 60, "--micro_batch_size", 20, "--checkpoint.every_steps", 5, "--log.every_steps", 1,
    "--log.tensorboard", "false", "--task.width", 8, "--cpu_threads", 1,
)  # fmt: skip


def stands_still(record: dict[str, Any]) -> bool:
    """Whether a rank does: found below its agent, for it may stop with the record in its hands, where pids belong."""
    below = psutil.Process(record["pids"]["agent"]).children(recursive=True) if record["pids"] else []
    return any(process.status() == psutil.STATUS_STOPPED for process in below)


def test_a_rank_that_stands_still_is_noticed_its_stacks_are_kept_and_the_run_goes_on(station: Station) -> None:
    # the fault stops one rank (SIGSTOP) at its 30th step of an attempt: the second attempt is over before that
    station.ok("run", "digits", "--name", "base", "--spawn", 2, *FIELDS)
    env = {"TRAIN_FAULT": "step@1:30:stop"}
    station.ok(
        "launch", "digits", "--name", "a", "--nproc", 2, *FIELDS, "--watch.hang_minutes", 0.1, "--follow", env=env
    )
    record = station.record("a")
    first, second = record["attempts"]
    assert "no progress" in first["reason"] and "training" in first["reason"]
    assert second["end"] == "finished"
    assert record["weights_sha256"] == station.record("base")["weights_sha256"]
    stack = (station.runs / "a" / "logs" / "attempt-1" / "rank0.stack.txt").read_text()
    assert "loop.py" in stack or "_step" in stack, stack


def test_hang_minutes_0_never_ends_a_run(station: Station) -> None:
    env = {"TRAIN_FAULT": "step@0:10:stop"}
    station.ok("launch", "digits", "--name", "a", *FIELDS, "--watch.hang_minutes", 0, env=env)
    station.wait("a", stands_still, "a rank that stands still")
    station.ok("stop", "a", "--now")
    assert [attempt["end"] for attempt in station.record("a")["attempts"]] == ["stopped"]

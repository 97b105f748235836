"""What is seen of a script: its figures, wherever they come from, its arguments and what its ranks use."""

from __future__ import annotations

import pytest

from tests.train.conftest import Station
from train.run import metrics

# Goes on from step 20 when it is started again. Rank 0 prints, and writes lines of its own.
SCRIPT = """
import json, os, signal, sys, time
attempt, rank = int(os.environ["TRAIN_ATTEMPT"]), int(os.environ["RANK"])
for step in range(1 if attempt == 1 else 21, 41):
    if rank == 0:
        print(f"iter {step}/40: loss {attempt / step:.4f}, took 12.5ms", flush=True)
        if step in (25, 40):
            with open(os.environ["TRAIN_RUN_DIR"] + "/metrics.jsonl", "a") as file:
                file.write("no line\\n" + json.dumps({"step": step, "accuracy": step / 100}) + "\\n")
    if attempt == 1 and step == 30:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    while attempt == 2 and step == 25 and not os.path.exists(sys.argv[1]):
        time.sleep(0.1)
"""
FIGURES = r"iter (?P<step>\d+)/(?P<total_steps>\d+): loss (?P<loss>\S+)"


def test_figures_of_output_and_of_own_lines_are_shown_as_those_of_a_task(station: Station) -> None:
    (station.folder / "own.py").write_text(SCRIPT)
    go = station.folder / "go on"
    station.ok("launch", "--script", "own.py", "--name", "a", "--nproc", 2, "--max-restarts", 1, "--figures", FIGURES,
               "--", go)  # fmt: skip
    station.wait("a", lambda record: len(record["attempts"]) == 2 and record["step"] == 25, "step 25")
    assert station.record("a")["total_steps"] == 40
    page = station.ok("top", "--once").stdout
    assert "25/40" in page and "rank 1   running" in page and "starting" not in page
    assert "cpu    -" not in page and "mem     -" not in page
    go.touch()
    record = station.wait_for_end("a")
    assert (record["state"], record["step"], record["loss"]) == ("finished", 40, 0.05)
    assert record["last_figures"]["accuracy"] == 0.4
    assert station.ok("ls", "a").stdout.splitlines()[1].split()[2:4] == ["40/40", "2"]
    row = station.ok("ls", "--columns", "args,loss,accuracy", "--csv").stdout.splitlines()[1]
    assert row == f"'{go}',0.05,0.4"
    shown = station.ok("show", "a").stdout
    assert f"arguments    '{go}'" in shown and "loss 0.0500  accuracy 0.4000" in shown
    assert "no JSON object" in shown and "no line" in shown and "steps redone -" in shown
    lines = metrics.lines(station.run("a"))
    assert [line["step"] for line in lines] == [*range(1, 41)]
    # a loss of the first attempt times its step is 1, one of the second 2
    losses = [line["loss"] for line in lines if not metrics.is_evaluation(line)]
    assert [round(loss * step) for step, loss in enumerate(losses, start=1)] == [1] * 20 + [2] * 20


def test_figures_are_refused_of_a_task_and_without_a_step(station: Station) -> None:
    (station.folder / "own.py").write_text("")
    for arguments, words in (
        (("digits", "--figures", FIGURES), "--figures is for scripts"),
        (("--script", "own.py", "--figures", "loss (?P<loss>.*)"), "has no group named step"),
    ):
        done = station("launch", *arguments)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not station.runs.exists()


# Python's own matching takes 2**30 steps for this
ENDLESS = r"(?P<step>\d+) (?P<loss>(a+)+)$"


@pytest.mark.minutes
def test_an_expression_that_never_ends_holds_nothing_up_and_a_resume_takes_another(station: Station) -> None:
    (station.folder / "own.py").write_text(f"import os\nprint('1 {'a' * 40}! 0.5')\nos._exit(7)")
    station.ok("launch", "--script", "own.py", "--name", "a", "--figures", ENDLESS)
    record = station.wait_for_end("a")
    assert record["state"] == "failed" and "takes too long" in record["figures_problem"]
    station.ok("resume", "a", "--figures", r"(?P<step>\d+) .*! (?P<loss>\S+)")
    record = station.wait_for_end("a")
    assert (record["step"], record["loss"], record["figures_problem"], len(record["attempts"])) == (1, 0.5, "", 2)

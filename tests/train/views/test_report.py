"""Where the time of a run went, and its page: parts add up, nothing is invented, nothing that a user gave is run."""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.monitor import time_spent
from train.monitor.status import RunStatus
from train.run import folders
from train.run.record import Times
from train.run.run_folder import Run
from train.views import report

BEGIN = 1_700_000_000.0
EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def stamp(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(BEGIN + seconds, datetime.UTC).isoformat(timespec="milliseconds")


def attempt(**values: Any) -> dict[str, Any]:
    base = {"number": 1, "started": stamp(1), "ready": stamp(3), "ended": stamp(103), "end": "finished", "reason": "",
            "world_size": 2, "from_step": 0, "to_step": 100}  # fmt: skip
    return base | values


def noted(step: int, seconds: float, **values: Any) -> dict[str, Any]:
    base = {"step": step, "seconds": seconds, "start": 0.0, "data": 0.0, "communication": 0.0, "checkpoints": 0.0,
            "evaluation": 0.0}  # fmt: skip
    return base | values


def told(*attempts: dict[str, Any], state: str = "finished", ended: Any = None, saved: int = 0, **record: Any) -> Any:
    ended = attempts[-1]["ended"] if ended is None and attempts else ended
    record = {"state": state, "created": stamp(0), "ended": ended, "attempts": list(attempts)} | record
    return time_spent.time_spent(record, BEGIN + 1000, BEGIN + 500, saved)


def test_the_parts_of_an_undisturbed_run() -> None:
    own = noted(100, 99, data=10, communication=5, checkpoints=3, evaluation=7, start=1)
    found = told(attempt(times=own), ended=stamp(104))
    assert found.whole == pytest.approx(104)
    assert found.parts == pytest.approx(
        {"compute": 73, "data": 10, "communication": 5, "checkpoints": 3, "evaluation": 7, "start": 6, "lost": 0,
         "idle": 0, "unknown": 0}
    )  # fmt: skip


def test_a_death_costs_the_steps_made_again_and_the_time_until_training_goes_on() -> None:
    first = attempt(end="died", times=noted(100, 100, data=20))
    second = attempt(
        started=stamp(110), ready=stamp(115), ended=stamp(155), from_step=60, to_step=100, times=noted(100, 40, data=8)
    )
    found = told(first, second)
    assert found.redone == 40 and found.again == pytest.approx(40)
    assert found.parts["lost"] == pytest.approx(40 + 12)  # 40 of 100 steps, and from 103 to 115
    assert found.parts["compute"] == pytest.approx(80 * 0.6 + 32) and found.parts["data"] == pytest.approx(12 + 8)
    assert found.whole == pytest.approx(155) == sum(found.parts.values())


def test_what_several_deaths_have_cost_is_added_up() -> None:
    def made(start: int, ready: int | None, ended: int, steps: tuple[int, int], end: str = "died") -> dict[str, Any]:
        begun = None if ready is None else stamp(ready)
        marks = {"started": stamp(start), "ready": begun, "ended": stamp(ended), "end": end}
        return marks | {"from_step": steps[0], "to_step": steps[1]}

    found = told(
        made(0, 10, 30, (0, 20)),  # a second a step
        made(32, 40, 50, (15, 20)),
        made(51, None, 55, (20, 20)),  # died while starting
        made(56, 60, 99, (20, 30), "stopped"),
        made(200, 210, 300, (30, 60)),
        state="running",
    )
    assert (found.redone, found.again, found.parts["lost"]) == (5, 5.0, 5.0 + 10.0 + 5.0 + 5.0)


def test_a_hang_is_lost() -> None:
    hung = attempt(end="died", times=noted(50, 25), to_step=50)  # half a second a step; then nothing for 75 s
    after = attempt(started=stamp(104), ready=stamp(105), ended=stamp(130), from_step=50, times=noted(100, 25))
    found = told(hung, after)
    assert found.parts["compute"] == pytest.approx(25 + 25) and found.parts["lost"] == pytest.approx(75 + 2)


def test_a_stop_is_idle_and_what_a_stop_at_once_throws_away_is_lost() -> None:
    first = attempt(end="stopped", times=noted(100, 100))
    second = attempt(started=stamp(203), ready=stamp(205), ended=stamp(215), from_step=90, to_step=100)
    found = told(first, second | {"times": noted(100, 10)})
    assert found.parts["idle"] == pytest.approx(100) and found.parts["start"] == pytest.approx(5)
    assert found.parts["lost"] == pytest.approx(10) and found.redone == 10


def test_waiting_in_the_queue_is_no_start() -> None:
    late = attempt(started=stamp(200), ready=stamp(203), ended=stamp(303), times=noted(100, 100))
    queued = told(late, wants={"queue": True})
    assert queued.parts["idle"] == pytest.approx(200) and queued.parts["start"] == pytest.approx(3)
    assert "queued" in time_spent.verdict(queued, {})[0] and "keeper" not in " ".join(time_spent.verdict(queued, {}))
    short = attempt(started=stamp(200), ready=stamp(203), ended=stamp(207), times=noted(100, 4))
    assert "keeper" not in " ".join(time_spent.verdict(told(short, wants={"queue": True}), {}))
    assert told(late, wants={"queue": False}).parts["start"] == pytest.approx(203)


def test_what_nobody_has_measured_is_not_told_apart() -> None:
    found = told(attempt())
    assert found.parts["unknown"] == pytest.approx(100) and found.parts["compute"] == 0
    assert "recorded no times" in found.notes[0]
    script = told(attempt(ready=None, from_step=None, to_step=None), script="train.py")
    assert script.parts["unknown"] == pytest.approx(102) and "only it knows how" in script.notes[0]
    fsdp = told(attempt(times=noted(100, 99, communication=None)))
    assert fsdp.parts["communication"] == 0 and "communication is part of computing" in fsdp.notes[0]


def test_an_interrupted_run_is_told_up_to_its_last_sign_of_life_and_a_running_one_up_to_now() -> None:
    dead = attempt(ended=None, end=None, to_step=None, times=noted(50, 50))
    assert told(dead, state="interrupted", ended="").whole == pytest.approx(500)
    assert told(dead, state="running", ended="").whole == pytest.approx(1000)
    assert told(dead, state="running", ended="").parts["unknown"] == pytest.approx(1000 - 53)


seconds, steps = st.floats(0, 1e6), st.one_of(st.none(), st.integers(-9, 1000))
marks = st.one_of(st.floats(0, 2000).map(stamp), st.none(), st.just("nonsense"), st.just(""))
attempts = st.fixed_dictionaries(
    {"started": marks, "ready": marks, "ended": marks, "from_step": steps, "to_step": steps,
     "end": st.sampled_from(["died", "stopped", "finished", "failed", None]),
     "times": st.one_of(st.none(), st.fixed_dictionaries(dict.fromkeys(Times.__annotations__, seconds)),
                        st.builds(noted, st.integers(0, 500), st.floats(0, 500), data=st.floats(0, 300)))}
)  # fmt: skip


@given(st.lists(attempts, max_size=4), st.sampled_from(["finished", "running", "interrupted", "stopped"]), marks, marks)
def test_the_parts_add_up_whatever_the_marks_are(
    made: list[dict[str, Any]], state: str, created: Any, ended: Any
) -> None:
    record = {"state": state, "created": created, "ended": ended, "attempts": made}
    found = time_spent.time_spent(record, BEGIN + 3000, BEGIN + 2500, 5)
    assert sum(found.parts.values()) == pytest.approx(found.whole, abs=1e-6)
    assert min(found.parts.values()) > -1e-6


STRAGGLER = """
import os, time, torch
from torch import nn
from torch.utils.data import TensorDataset

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 320
    def __getitem__(self, i):
        time.sleep(0.002)
        return torch.randn(8), i % 2

def datasets(config): return Slow(), None
def model(config): return nn.Linear(8, 2)
def loss(model, batch):
    time.sleep(0.05 if os.environ.get("RANK") == "1" or torch.distributed.get_rank() == 1 else 0.01)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


def test_a_real_run_tells_data_computing_and_waiting_for_a_slower_rank_apart(station: Any) -> None:
    (station.folder / "slow.py").write_text(STRAGGLER.replace("0.05 if", "0.3 if"))
    station.ok(
        "launch", "slow.py", "--name", "one", "--nproc", 2, "--batch_size", 16, "--steps", 6, "--follow",
        "--cpu_threads", 1,
    )  # fmt: skip
    found = json.loads(station.ok("report", "one", "--json").stdout)
    parts = {name: found[name] for name in time_spent.PARTS}
    assert sum(parts.values()) == pytest.approx(found["seconds"], abs=0.01)
    record = station.record("one")
    ends = [datetime.datetime.fromisoformat(record[key]).timestamp() for key in ("created", "ended")]
    assert found["seconds"] == pytest.approx(ends[1] - ends[0], abs=0.01)
    # each: 8 samples of 2 ms, 10 ms of computing, 290 ms more on the other rank; a busy machine only adds
    assert parts["data"] > 6 * 0.016 and parts["compute"] > 6 * 0.01
    assert parts["communication"] > 6 * 0.25
    assert parts["communication"] > parts["compute"] and parts["lost"] == parts["idle"] == parts["unknown"] == 0
    text = station.ok("report", "one").stdout
    assert text.startswith("one: finished") and re.search(r"communication +\S+ m?s +\d+\.\d %", text)


@pytest.mark.minutes
def test_a_killed_run_and_its_resume(station: Any) -> None:
    (station.folder / "slow.py").write_text(STRAGGLER)
    station.ok(
        "launch", "slow.py", "--name", "two", "--nproc", 2, "--batch_size", 16, "--epochs", 40, "--max-restarts", 0,
        "--checkpoint.snapshots", "false", "--checkpoint.every_steps", 10, "--log.every_steps", 1,
    )  # fmt: skip
    station.wait_for_step("two", 25)
    os.kill(station.record("two")["pids"]["agent"], 9)
    station.wait_for_end("two")
    assert "interrupted" in station.ok("report", "two").stdout
    time.sleep(2)
    station.ok("resume", "two", "--steps", 45, "--follow")
    found = json.loads(station.ok("report", "two", "--json").stdout)
    assert sum(found[name] for name in time_spent.PARTS) == pytest.approx(found["seconds"], abs=0.01)
    assert found["lost"] > 2 and found["steps_redone"] > 0 and found["unknown"] == 0


def made(folder: Path, name: str = "run", **record: Any) -> Run:
    run = folders.create(folder, "run", files={}, record={"world_size": 1} | record)
    lines = [
        {"step": step, "epoch": 1, "loss": 1 / step, "lr": 0.1, "samples_per_s": 9.0, "data_wait": 0.0,
         "step_time": 0.1, "memory": 1}
        for step in range(1, 30)
    ]  # fmt: skip
    lines.append({"step": 29, "epoch": 1, "eval": {"loss": 0.1, EVIL: 0.5, "$\\frac{$": 0.5}})
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if name != "run":
        run.folder.rename(folder / name)
    return Run(folder / name)


def page_of(run: Run) -> str:
    return report.html(RunStatus(run, run.read_effective()))


def evil(folder: Path) -> Run:
    """A run of whom every text is a script."""
    run = made(
        folder, "<img src=x onerror=document.title=1>", task="task.py", task_source=EVIL, reason=EVIL, cwd=EVIL,
        versions={EVIL: EVIL}, git_revision=EVIL, data_wait=EVIL, metrics={EVIL: 0.5}, state="failed",
        attempts=[attempt(reason=EVIL, end=EVIL, last_lines=[EVIL, "</pre>" + EVIL])],
    )  # fmt: skip
    (run.folder / "config.toml").write_text(f"seed = 1\n[task]\nname = {json.dumps(EVIL)}\n{json.dumps(EVIL)} = 3\n")
    return run


class Elements(HTMLParser):
    """The elements of a page, and the attributes that would load or run something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        for name, value in attrs:
            if name.startswith("on") or (name in ("src", "href", "xlink:href") and not (value or "").startswith("#")):
                self.loaded.append(f"{tag} {name}={value}")


@pytest.mark.never_forgiven
def test_the_page_escapes_everything_and_loads_nothing(tmp_path: Path) -> None:
    text = page_of(evil(tmp_path))
    found = Elements(text)
    assert not found.names & {"script", "img", "iframe", "link", "object"} and found.loaded == []
    assert text.count("<svg") == 7 and "url(http" not in text and "cannot be shown" not in text


def test_words_in_another_encoding_are_written_as_they_can_be(tmp_path: Path) -> None:
    name = os.fsdecode("café".encode("latin-1"))  # of a folder on a disk from elsewhere
    run = made(tmp_path, script=f"/{name}/train.py", reason=name)
    report.write(RunStatus(run, run.read_effective()), tmp_path / "page.html")
    assert "/caf\\udce9/train.py" in (tmp_path / "page.html").read_text(encoding="utf-8")


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.never_forgiven
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_executes_nothing_of_it(tmp_path: Path) -> None:
    run = evil(tmp_path / "runs")
    # without the policy too: what escapes it is the escaping
    text = re.sub(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>", "", page_of(run))
    (tmp_path / "page.html").write_text(text)
    done = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--virtual-time-budget=3000", "--dump-dom", f"file://{tmp_path / 'page.html'}"],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert "owned" not in re.findall(r"<title>(.*?)</title>", done.stdout)[0]
    assert re.findall(r"<title>(.*?)</title>", done.stdout)[0].endswith(": failed")
    assert "<script" not in done.stdout and "<img" not in done.stdout
    assert done.stdout.count("<figure>") == 7 and done.stdout.count("<svg") == 7


def test_files_that_are_damaged_are_said(tmp_path: Path) -> None:
    run = made(tmp_path, task="task.py", attempts=[attempt()], state="finished")
    run.metrics.write_bytes(b'{"step": 1}\n5\n{"step": 2, "eval": 3}\n[]\nnull\n\xff\xfe\n' + b"[" * 100_000 + b"\n")
    (run.folder / "config.toml").write_text("not = [toml")
    (run.folder / "task.py").write_text("class Settings(:")
    assert "cannot be read" in page_of(run)


def test_bad_requests_are_refused_in_a_line(finished: Any, tmp_path: Path) -> None:
    for arguments, words in (
        (("nosuch",), "there is no run"),
        (("done", "--to", tmp_path / "a.pdf"), "must end in .html"),
        (("done", "--to", tmp_path / "no" / "a.html"), "no folder"),
        (("done", "--json", "--to", tmp_path / "a.html"), "give one of them"),
    ):
        refused = finished("report", *arguments)
        assert refused.returncode == 2 and words in refused.stderr and refused.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_page_of_a_script_says_what_is_known(station: Any) -> None:
    (station.folder / "own.py").write_text("print(1)\n")
    station.ok("launch", "--script", "own.py", "--name", "own", "--follow", "--", "--word", EVIL)
    station.ok("report", "own", "--to", "own.html")
    text = (station.folder / "own.html").read_text()
    assert (
        "only it knows" in text
        and "The run has written no figures; launch it with --figures" in text
        and "<script" not in text
    )
    assert "not measured" in station.ok("report", "own").stdout


def test_what_the_user_has_set_is_told_apart(finished: Any) -> None:
    text = page_of(finished.run("done"))
    given, others = re.split(r"<details>", text)
    assert "<code>optim.lr</code>" in given and "<code>seed</code>" in others
    assert "<code>task.width</code>" in others  # a setting of the task, which this user left alone
    assert "0.001" in given  # the default of optim.lr

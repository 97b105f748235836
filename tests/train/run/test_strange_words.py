"""A run folder may be a stranger's: whatever words are in it, no command lets them steer the terminal."""

from __future__ import annotations

import json
import re
import unicodedata
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from train.monitor.prometheus import Collector
from train.run.record import FORMAT
from train.run.run_folder import Run

pytestmark = pytest.mark.never_forgiven

if TYPE_CHECKING:
    from conftest import Station

EVIL = "begin\x1b]0;owned\x07\x1b[2J\r\nowned: \x9b2J\u202eend\ud800"
"""Sets a window's title, clears the screen, begins a line of its own, turns the direction of writing, is no UTF-8."""


def strange(runs: Path, name: str, **changed: Any) -> Run:
    """A run that has strange words wherever there can be some."""
    run = Run(runs / name)
    (run.folder / "checkpoints" / "step-00000002").mkdir(parents=True)
    logs = run.folder / "logs" / "attempt-1"
    logs.mkdir(parents=True)
    when = "2026-01-01T00:00:00+00:00"
    attempt = {
        "number": 1, "started": when, "ready": when, "ended": when, "end": EVIL, "reason": EVIL, "world_size": 1,
        "from_step": 0, "to_step": 2, "host": EVIL, "last_lines": [EVIL],
    }  # fmt: skip
    record = {
        "format": FORMAT, "state": "failed", "reason": EVIL, "attempts": [attempt], "step": 2, "epoch": 1,
        "world_size": 1, "task": EVIL,
        "task_source": EVIL, "total_steps": 9, "created": when, "started": when, "ended": when, "device": EVIL,
        "host": EVIL, "versions": {EVIL: EVIL}, "git_revision": EVIL, "cwd": EVIL, "data_wait": EVIL,
        "metrics": {EVIL: 0.5}, "weights_sha256": EVIL, "stopped_by": EVIL, "parts": [EVIL], "wandb": {"problem": EVIL},
        "skipped": {EVIL: 3},
    }  # fmt: skip
    (run.folder / "run.json").write_text(json.dumps(record | changed))
    (run.folder / "config.toml").write_text('seed = 1\n[task]\n"begin\\u001b[2J\\n" = "begin\\u001b[2J\\nowned: end"\n')
    lines = [
        {"step": 1, "epoch": 1, "loss": 1.0, "lr": 0.1, "samples_per_s": 9.0, "data_wait": 0.1, "step_time": 0.2},
        {"step": 2, "epoch": EVIL, "loss": EVIL, "lr": 0.1, "samples_per_s": 9.0, "data_wait": 0.1, "step_time": 0.2},
        {"step": 2, "epoch": 1, "eval": {"loss": 0.1, EVIL: 0.5}},
    ]  # fmt: skip
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def lines_of(text: str) -> Iterator[str]:
    """The lines of an output, each without what would steer a terminal."""
    for line in text.split("\n"):
        assert not any(unicodedata.category(letter).startswith("C") for letter in line), ascii(line)
        assert not line.startswith("owned"), line
        yield line


@pytest.mark.parametrize(
    ("command", "codes"),
    [
        (["ls"], (0,)), (["ls", "--csv"], (0,)),
        (["show", "odd"], (0,)), (["show", "odd", "--json"], (0,)), (["top", "--once"], (0,)),
        (["report", "odd"], (0,)), (["resume", "--all"], (0, 2)), (["show", "bad"], (2,)), (["rm", "odd*"], (0,)),
    ],
)  # fmt: skip
def test_strange_words_steer_no_terminal(station: Station, command: list[str], codes: tuple[int, ...]) -> None:
    strange(station.runs, "odd")
    strange(station.runs, "other")
    strange(station.runs, "odd\x1b[2J\nowned", state="interrupted")
    strange(station.runs, "bad", attempts=[{EVIL: EVIL}], metrics=EVIL, total_steps=EVIL)
    done = station(*command)
    assert done.returncode in codes, done.stderr
    assert "Traceback" not in done.stderr
    assert [*lines_of(done.stdout), *lines_of(done.stderr)]


def test_strange_words_make_no_broken_picture(station: Station) -> None:
    strange(station.runs, "odd")
    config = strange(station.runs, "other").folder / "config.toml"
    config.write_text(config.read_text().replace("end", "another end"))  # a label says in what the two differ
    done = station.ok("plot", "odd", "other", "--to", "a.svg")
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["odd", "other", "wrote a.svg"]
    text = (station.folder / "a.svg").read_text(encoding="utf-8")
    xml.fromstring(text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    station.ok("report", "odd", "--to", "a.html")
    page = (station.folder / "a.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 6 and "cannot be shown" not in page
    assert not [ascii(letter) for letter in page if unicodedata.category(letter) in ("Cc", "Cf") and letter != "\n"]


def test_strange_words_in_labels_are_told_apart_and_begin_no_line(station: Station) -> None:
    for name in ("odd", "odd\x1b", "odd\x07", 'odd"} 7\nowned 1'):
        strange(station.runs, name)
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(Collector(station.runs, 10))
    text = prometheus_client.generate_latest(registry).decode()
    assert [*lines_of(text)]
    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert len({sample.labels["run"] for sample in found["train_run_step"].samples}) == 4

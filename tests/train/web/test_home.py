"""The first page: what is listed, in which order, and what a search finds."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from web import Web

from tests.cuda import standin
from tests.cuda.cards import Cards
from tests.train.conftest import Station
from train.run.run_folder import stamp
from train.web import home, rows, texts
from train.web.look import Look, Place


def place(runs: Path, language: str = "en") -> Place:
    return Place(Look(runs), texts.of(language), "/train/", lab="", files="", root=str(runs.parent))


def put(runs: Path, like: Path, name: str, *, ended: float, **changed: object) -> None:
    """Copy a finished run, without its files, as one that ended so many seconds ago."""
    (runs / name).mkdir(parents=True)
    record = json.loads((like / "run.json").read_text()) | {"name": name, "ended": stamp(time.time() - ended)} | changed
    (runs / name / "run.json").write_text(json.dumps(record))
    shutil.copy(like / "config.toml", runs / name)


def names(data: dict, part: str) -> list[str]:  # type: ignore[type-arg]
    return [row["name"] for row in data["lists"][part]]


def test_ended_runs_come_in_pages_the_newest_first(shown: Station, tmp_path: Path) -> None:
    for number in range(60):
        put(tmp_path, shown.runs / "done", f"r{number}", ended=number * 60)
    put(tmp_path, shown.runs / "done", "bad", ended=9e5, state="failed", reason="ValueError: no such layer")
    at = place(tmp_path)
    first, second = home.content(at, "", 1), home.content(at, "", 2)
    assert names(first, "ended") == [f"r{number}" for number in range(50)]
    assert names(second, "ended") == [f"r{number}" for number in range(50, 60)] + ["bad"]
    assert first["values"]["older"] and not second["values"]["older"]
    assert names(home.content(at, "such LAYER", 1), "ended") == ["bad"]
    assert home.content(at, "nothing like it", 1)["values"]["nothing_found"]


def test_the_last_visit_says_what_failed_first_and_what_it_cost(shown: Station, tmp_path: Path) -> None:
    done = shown.runs / "done"
    attempt = json.loads((done / "run.json").read_text())["attempts"][0]
    died = {**attempt, "end": "died", "to_step": 10, "ended": attempt["ready"]}
    put(tmp_path, done, "restarted", ended=100, attempts=[died, {**attempt, "number": 2, "from_step": 8}])
    put(tmp_path, done, "bad", ended=200, state="failed", reason="ValueError: no such layer")
    put(tmp_path, done, "before", ended=9000)
    data = home.content(place(tmp_path), "", 1, since=time.time() - 3600)
    assert names(data, "news") == ["bad", "restarted"]
    assert "1 restart" in data["lists"]["news"][1]["lost"] and "lost" in data["lists"]["news"][1]["lost"]
    assert "1 h ago" in data["values"]["since"]
    assert not home.content(place(tmp_path), "", 1)["lists"]["news"]


def test_what_the_last_death_costs_is_said_after_a_resume_only(shown: Station, tmp_path: Path) -> None:
    attempt = json.loads((shown.runs / "done" / "run.json").read_text())["attempts"][0]
    died = {**attempt, "end": "died", "reason": "rank 0 died of SIGKILL"}
    put(tmp_path, shown.runs / "done", "bad", ended=10, state="failed", attempts=[died])
    at = place(tmp_path)
    assert at.look.one("bad").deaths == 1 and "lost" not in rows.head(at, at.look.one("bad"))
    put(tmp_path, shown.runs / "done", "on", ended=10, attempts=[died, {**attempt, "number": 2}])
    assert rows.head(at, at.look.one("on"))["lost"].startswith("1 restart, ")


def test_trials_are_folded_into_their_sweep(shown: Station, tmp_path: Path) -> None:
    done = shown.runs / "done"
    put(tmp_path, done, "lr", ended=10, sweep="abc")
    for number in (1, 2):
        put(tmp_path, done, f"lr-{number}", ended=10, trial_of="abc")
    put(tmp_path, done, "orphan", ended=10, trial_of="gone")
    data = home.content(place(tmp_path), "", 1)
    assert sorted(names(data, "ended")) == ["lr", "orphan"]
    assert "2 of 2 trials" in next(row["step"] for row in data["lists"]["ended"] if row["name"] == "lr")
    assert len(names(home.content(place(tmp_path), "lr-", 1), "ended")) == 2


@pytest.mark.parametrize(
    ("changed", "button"),
    [
        ({"state": "stopped", "stopped_by": "user"}, "resume"), ({"state": "failed"}, "resume"), ({}, ""),
        ({"state": "failed", "submitted": {"engine": "slurm"}, "submission": "1"}, ""),
        ({"state": "stopped", "stopped_by": "signal"}, ""),
        ({"state": "stopped", "stopped_by": "user", "format": 1}, ""),
    ],
)  # fmt: skip
def test_only_own_runs_have_a_button(changed: dict, button: str, shown: Station, tmp_path: Path) -> None:  # type: ignore[type-arg]
    """The last but one was stopped by a signal elsewhere: a copy."""
    put(tmp_path, shown.runs / "done", "one", ended=10, **changed)
    assert rows.may(Look(tmp_path).one("one")) == button


def test_gpus_are_shown_with_their_use(station: Station, webs: Callable[..., Web]) -> None:
    if lacks := standin.lacks():
        pytest.skip(lacks)
    page = webs(station, **standin.environment(Cards(station.folder, 2)))
    cards = page.get("api/home").json["lists"]["devices"]
    assert [card["device"] for card in cards] == ["GPU 0", "GPU 1"]
    assert (
        cards[1]["use"] == "51 % busy"
        and cards[1]["memory"] == "400 MiB of 80 GiB"
        and cards[1]["holder"] == "held by no run"
    )


def test_a_page_in_chinese(web: Web) -> None:
    page = web.get("", **{"Accept-Language": "zh-CN,zh;q=0.9,en;q=0.8"}).text
    assert '<html lang="zh-CN">' in page and texts.of("zh")("machine") in page

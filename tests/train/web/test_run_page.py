"""The page of a run, and of several that are compared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from test_home import place
from web import Web

from tests.train.conftest import Station
from train.run import metrics
from train.web import run_page
from train.web.run_page import Asked


def test_a_finished_run_shows_all_that_is_known(web: Web, shown: Station) -> None:
    facts, record = web.get("api/run/done").json, shown.record("done")
    values, lists = facts["values"], facts["lists"]
    assert values["state"] == "finished" and not values["may_stop"] and not values["may_resume"]
    assert "train export done" in values["next"] and values["command"] == record["command_line"]
    assert {row["name"]: row["value"] for row in lists["settings"]}["optim.lr"] == "0.1"
    assert [row["key"] for row in lists["checkpoints"]] == [str(step) for step in shown.run("done").steps_saved()]
    assert lists["attempts"][0]["end"] == "finished" and "compute" in [row["key"] for row in lists["parts"]]
    assert "train rm done" in [row["text"] for row in lists["commands"]]
    (curve,), lines = facts["curves"], shown.metrics("done")
    trained = [line for line in lines if "eval" not in line]
    assert curve["line"]["step"] == [line["step"] for line in trained]
    assert curve["line"]["figures"]["loss"] == [float(f"{line['loss']:.6g}") for line in trained]
    assert len(curve["eval"]["step"]) == 2 and curve["line"]["time"] == sorted(curve["line"]["time"])
    again = web.get(f"api/run/done?mark={facts['mark'].replace(' ', '+')}").json
    assert "curves" not in again and again["mark"] == facts["mark"]
    page = web.get("run/done").text
    assert "<svg" in page and "step 23 to" not in page and "polyline" in page


def test_a_failed_run_shows_its_last_lines(web: Web) -> None:
    facts = web.get("api/run/hostile").json
    assert facts["lists"]["attempts"][0]["lines"].splitlines()[-1].startswith("ValueError: no <b>such</b> layer red")
    assert facts["values"]["may_resume"]


def test_compared_runs_show_what_differs_and_their_last_and_best(shown: Station, tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(shown.runs / "done", tmp_path / name)
    config = tmp_path / "two" / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.1", "lr = 0.2"))
    data = run_page.content(place(tmp_path), "one", Asked(("two", "one")))
    assert data["compared"] == ["one", "two"] and len(data["curves"]) == 2
    table = {row["field"]: (row["c0"], row["c1"]) for row in data["lists"]["compare"]}
    assert table["optim.lr"] == ("0.1", "0.2") and "batch_size" not in table
    assert {"last accuracy", "best accuracy", "last loss", "state"} <= set(table)


def test_restarts_are_marked_where_training_continued(shown: Station, tmp_path: Path) -> None:
    shutil.copytree(shown.runs / "done", tmp_path / "one")
    record = json.loads((tmp_path / "one" / "run.json").read_text())
    first = record["attempts"][0]
    record["attempts"] = [{**first, "end": "died"}, {**first, "number": 2, "from_step": 20}]
    (tmp_path / "one" / "run.json").write_text(json.dumps(record))
    assert run_page.content(place(tmp_path), "one", Asked())["curves"][0]["marks"] == [(20, True)]


def test_numbers_that_no_run_has_stay_within_json(shown: Station, tmp_path: Path) -> None:
    shutil.copytree(shown.runs / "done", tmp_path / "one")
    odd = [{"step": step, "loss": 1e308, "step_time": 1e308, "lr": float("nan")} for step in (5, 5, 3, 1 << 52)]
    (tmp_path / "one" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in odd))
    data = run_page.content(place(tmp_path), "one", Asked())
    assert json.loads(json.dumps(data, allow_nan=False))["curves"][0]["line"]["figures"]["lr"] == [None] * 4


def test_a_long_run_keeps_all_its_evaluations(shown: Station, tmp_path: Path) -> None:
    shutil.copytree(shown.runs / "done", tmp_path / "one")
    line = json.dumps({"step": 1, "epoch": 1, "loss": 0.5, "lr": 0.1, "step_time": 2.0}) + " " * 200
    with (tmp_path / "one" / "metrics.jsonl").open("w") as file:
        for step in range(1, 3 * metrics.WHOLE // len(line)):
            file.write(line.replace('"step": 1', f'"step": {step}', 1) + "\n")
            if step % 100 == 0:
                file.write(json.dumps({"step": step, "epoch": 1, "samples": 1, "eval": {"<b>": 1.0}}) + "\n")
    (curve,) = run_page.content(place(tmp_path), "one", Asked())["curves"]
    count = 3 * metrics.WHOLE // len(line)
    assert curve["notes"] == ["Long run: the curves show samples of its lines."]
    assert len(curve["eval"]["step"]) == (count - 1) // 100
    assert len(curve["line"]["step"]) < count / 2 and curve["line"]["step"][-1] == count - 1
    assert abs(curve["line"]["time"][-1] - 2.0 * (count - 1)) < 1
    apart = [abs(at - 2 * step) for step, at in zip(curve["eval"]["step"], curve["eval"]["time"], strict=True)]
    assert max(apart) < 1  # evaluations between two samples, too


def test_all_open_pages_of_a_growing_run_show_curves_that_were_read_once(shown: Station, tmp_path: Path) -> None:
    shutil.copytree(shown.runs / "done", tmp_path / "one")
    at = place(tmp_path)
    first = run_page.content(at, "one", Asked())
    with (tmp_path / "one" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 999, "epoch": 1, "loss": 0.5}) + "\n")
    second = run_page.content(at, "one", Asked(mark="older"))
    assert second["mark"] == first["mark"] and second["curves"][0] is first["curves"][0]
    assert 999 in run_page.content(place(tmp_path), "one", Asked())["curves"][0]["line"]["step"]


def test_what_the_curves_lack_is_said(shown: Station, tmp_path: Path) -> None:
    shutil.copytree(shown.runs / "done", tmp_path / "one")
    lines = [{"step": step, **{f"figure{name}": step for name in range(42)}} for step in (1, 2)]
    (tmp_path / "one" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (curve,) = run_page.content(place(tmp_path), "one", Asked())["curves"]
    assert curve["notes"][0] == "2 more figures are not drawn." and "no time" in curve["notes"][1]
    assert not curve["is_timed"] and len(curve["line"]["figures"]) == 40


def test_a_running_run_is_compared_by_its_last_evaluation(shown: Station, tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(shown.runs / "done", tmp_path / name)
    record = json.loads((tmp_path / "two" / "run.json").read_text())
    (tmp_path / "two" / "run.json").write_text(json.dumps(record | {"state": "running", "metrics": {}, "loss": 7.0}))
    table = run_page.content(place(tmp_path), "one", Asked(("two",)))["lists"]["compare"]
    same = {row["field"]: (row["c0"], row["c1"]) for row in table if row["field"].startswith("last")}
    assert {"last loss", "last accuracy"} <= set(same) and all(one == two for one, two in same.values())


def test_pictures_are_links_where_the_server_sends_files(shown: Station, tmp_path: Path) -> None:
    shutil.copytree(shown.runs / "done", tmp_path / "runs" / "one")
    images = tmp_path / "runs" / "one" / "images"
    images.mkdir()
    for step in (10, 20):
        (images / f"a b-step-{step:08d}.png").touch()
    at = place(tmp_path / "runs")
    assert run_page.content(at, "one", Asked())["lists"]["pictures"] == []
    at = type(at)(at.look, at.t, at.base, lab="/lab", files="/files", root=str(tmp_path))
    (link,) = run_page.content(at, "one", Asked())["lists"]["pictures"]
    assert link["link"] == "/files/runs/one/images/a%20b-step-00000020.png"


def test_a_node_without_rank_0_shows_the_first_rank_that_there_is(shown: Station, tmp_path: Path) -> None:
    shutil.copytree(shown.runs / "done", tmp_path / "one")
    (log,) = (tmp_path / "one").rglob("rank0.log")
    log.rename(log.with_name("rank8.log"))
    data = run_page.content(place(tmp_path), "one", Asked())
    assert data["ranks"] == [8] and data["rank"] == 8 and "finished after" in data["values"]["log"]


def test_a_value_with_a_space_is_shown_without_a_shells_quotes() -> None:
    assert run_page._hidden("save.every_steps", "chosen at launch") == "chosen at launch"
    assert run_page._hidden("task.api_token", "a b") == "…"

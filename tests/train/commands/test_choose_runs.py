"""Which runs a command means, and which of their checkpoints: patterns, states, orders, the best step."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from train.commands.options import matching
from train.errors import Refused
from train.run import best, folders
from train.run.run_folder import Run
from train.run.spec import read_spec

pytestmark = pytest.mark.never_forgiven

if TYPE_CHECKING:
    from conftest import Station


def made(runs: Path, name: str, **values: Any) -> Run:
    return folders.create(runs, name, files={}, record={"total_steps": 10, "state": "stopped", **values})


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    made(folder, "exp-1", step=3, loss=0.5)
    made(folder, "exp-2", step=9, loss=0.9, state="failed", metrics={"loss": 0.1})
    made(folder, "exp-10", step=5, state="finished")
    made(folder, "other", step=7, loss=0.3, total_steps=None)
    return folder


def names(records: list[dict[str, Any]]) -> list[str]:
    return [record["name"] for record in records]


def test_rm_takes_patterns_and_names_and_removes_each_once(runs: Path, station: Station) -> None:
    done = station.ok("rm", "exp-*", "exp-1", "exp-?")
    first, second, third = done.stderr.splitlines()
    assert first.startswith("removed exp-1: ") and first.split()[-1] in ("bytes", "KiB")
    assert second.startswith("removed exp-2: ") and third.startswith("removed exp-10: ")
    assert sorted(path.name for path in runs.iterdir()) == ["other"]


@pytest.mark.parametrize("given", [["exp-*", "zzz*"], ["exp-*", "nosuch"], ["../*"]])
def test_a_pattern_that_matches_nothing_removes_nothing(runs: Path, station: Station, given: list[str]) -> None:
    done = station("rm", *given)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "train ls" in done.stderr
    assert len(list(runs.iterdir())) == 4


def test_rm_removes_nothing_where_one_that_it_means_is_running(runs: Path, station: Station) -> None:
    lock = Run(runs / "exp-2").acquire()
    assert lock is not None
    done = station("rm", "exp-*")
    assert done.returncode == 2 and "exp-2 is running; stop it first: train stop exp-2" in done.stderr
    assert len(list(runs.iterdir())) == 4
    lock.release()
    station.ok("rm", "exp-*")
    assert [path.name for path in runs.iterdir()] == ["other"]


def test_a_folder_whose_name_looks_like_a_pattern_is_meant_by_its_name(runs: Path) -> None:
    shutil.copytree(runs / "other", runs / "exp-*")
    assert [run.name for run in matching(runs, ["exp-*"])] == ["exp-*"]


def test_ls_filters_sorts_and_limits(runs: Path, station: Station) -> None:
    def listed(*arguments: object) -> list[str]:
        text = station.ok("ls", *arguments).stdout
        found = names(json.loads(station.ok("ls", *arguments, "--json").stdout))
        assert [line.split()[0] for line in text.splitlines()[1:]] == found
        return found

    assert listed() == ["exp-1", "exp-2", "exp-10", "other"]
    assert listed("exp-*") == ["exp-1", "exp-2", "exp-10"]
    assert listed("--state", "stopped") == ["exp-1", "other"]
    assert listed("--state=failed,finished", "--limit", 1) == ["exp-10"]
    assert listed("-n", 2) == ["exp-10", "other"]
    assert listed("--sort", "created", "--limit", 2, "--reverse") == ["other", "exp-10"]
    assert listed("--sort", "name", "-n", 3) == ["exp-1", "exp-10", "exp-2"]
    assert listed("--sort", "step", "--limit", 2) == ["exp-2", "other"]
    assert listed("--sort", "loss") == ["exp-2", "other", "exp-1", "exp-10"]
    assert listed("--sort", "loss", "--reverse") == ["exp-1", "other", "exp-2", "exp-10"]
    assert json.loads(station.ok("ls", "--json", "zzz*").stdout) == []
    for wrong in (["--state", "stoped"], ["--sort", "sizes"], ["-n", 0], ["--limit", "all"], ["nosuch"]):
        refused = station("ls", *wrong)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1, wrong
        assert str(wrong[-1]) in refused.stderr


def test_ls_counts_sizes_only_if_asked_and_shows_the_largest_first(runs: Path, station: Station) -> None:
    for name, size in (("exp-1", 5000), ("exp-2", 900_000), ("exp-10", 2000)):
        (runs / name / "checkpoints" / "step-00000001").mkdir()
        (runs / name / "checkpoints" / "step-00000001" / "model").write_bytes(bytes(size))
    (runs / "exp-2" / "link").symlink_to("nowhere")
    exact = station.ok("ls", "--columns", "name,size", "--sort", "size", "--csv").stdout.splitlines()[1:]
    assert [line.split(",")[0] for line in exact] == ["exp-2", "exp-1", "exp-10", "other"]
    files = [path for path in (runs / "exp-2").rglob("*") if not path.is_dir()]
    assert int(exact[0].split(",")[1]) == sum(path.lstat().st_size for path in files) > 900_000
    shown = station.ok("ls", "exp-2", "--columns", "name,size").stdout.splitlines()[1]
    assert shown.split(maxsplit=1)[1].startswith("879") and shown.endswith(" KiB"), shown
    assert "size" not in json.loads(station.ok("ls", "exp-2", "--json").stdout)[0]


def test_ls_shows_and_sorts_by_fields_and_figures(runs: Path, station: Station) -> None:
    for name, rate in (("exp-1", 0.1), ("exp-2", 0.01)):
        evaluated(Run(runs / name), [], {4: {"accuracy": rate, "val.f1": 1 - rate}})
        with (runs / name / "config.toml").open("a") as file:
            file.write(f"[optim]\nlr = {rate}\n")

    def listed(*arguments: str) -> list[str]:
        return station.ok("ls", *arguments).stdout.splitlines()

    by_accuracy = listed("--columns", "name,optim.lr,accuracy,loss,step", "--sort", "accuracy", "--csv")
    assert by_accuracy == [
        "name,optim.lr,accuracy,loss,step", "exp-1,0.1,0.1,0.5,3", "exp-2,0.01,,0.1,9", "exp-10,,,,5", "other,,,0.3,7"
    ]  # fmt: skip
    assert [line.split()[0] for line in listed("--columns", "name", "--sort", "optim.lr")[1:3]] == ["exp-2", "exp-1"]
    assert listed("--columns", "name,val.f1", "exp-1")[1].split() == ["exp-1", "0.9"]
    first = json.loads(station.ok("ls", "--json", "exp-1").stdout)[0]
    assert first["config"] == {"checkpoint.best": "", "optim.lr": 0.1} and first["metrics"]["val.f1"] == 0.9
    for wrong, hint in (("optim.lrr", "optim.lr"), ("acuracy", "accuracy")):
        refused = station("ls", "--columns", wrong)
        assert (
            refused.returncode == 2
            and f"--columns {wrong}: no run here has this column; did you mean {hint}?" in refused.stderr
        )


def test_ls_shows_and_sorts_by_the_best_values(runs: Path, station: Station) -> None:
    scores = {"exp-1": [0.3, 0.1, 0.4], "exp-2": [0.2, 0.6, None], "exp-10": [0.9, 0.5, 0.3]}
    for name, values in scores.items():
        lines = {step: {"loss": one, "wer": one, "f1": one} for step, one in enumerate(values, 1)}
        evaluated(Run(runs / name), [], lines, "min:wer" if name == "exp-10" else "")

    def listed(*arguments: str) -> list[str]:
        return station.ok("ls", *arguments, "--csv").stdout.splitlines()[1:]

    columns = ("--columns", "name,best.loss,best.f1,best.wer,best.max:wer", "--sort")
    rows = ["exp-1,0.1,0.4,0.1,0.4", "exp-2,0.2,0.6,0.2,0.6", "exp-10,0.3,0.9,0.3,0.9", "other,,,,"]
    assert listed(*columns, "best.wer") == listed(*columns, "best.loss") == rows
    assert listed(*columns, "best.f1") == listed(*columns, "best.max:wer") == [rows[2], rows[1], rows[0], rows[3]]
    first = json.loads(station.ok("ls", "--json", "exp-1").stdout)[0]
    assert first["best"] == {"loss": 0.1, "wer": 0.4, "f1": 0.4}  # alone, nothing says that a lower one is better
    evaluated(Run(runs / "exp-2"), [], {1: {"wer": 0.2}}, "max:wer")
    refused = station("ls", "--sort", "best.wer")
    assert refused.returncode == 2 and "disagree whether lower is better; give best.min:wer or" in refused.stderr


def test_ls_says_how_often_a_run_was_restarted_and_shows_the_loss_of_top(runs: Path, station: Station) -> None:
    attempt = {"world_size": 1, "from_step": 0, "to_step": 3, "ready": "2026-01-01T00:00:01+00:00"}
    attempts = [
        {**attempt, "number": number, "end": end, "started": "2026-01-01T00:00:00+00:00", "ended": ended}
        for number, end, ended in (
            (1, "died", "2026-01-01T00:00:05+00:00"), (2, None, None), (3, "finished", "2026-01-01T00:00:09+00:00")
        )
    ]  # fmt: skip
    Run(runs / "exp-2").update(
        attempts=attempts, state="finished", created=attempts[0]["started"], ended="2026-01-01T00:00:09+00:00"
    )
    shown = station.ok("ls").stdout.splitlines()
    assert "RESTARTS" in shown[0] and "finished" in shown[2] and shown[2].split()[-2] == "2"
    (record,) = json.loads(station.ok("ls", "exp-2", "--json").stdout)
    alone = json.loads(station.ok("show", "exp-2", "--json").stdout)
    assert record["restarts"] == alone["restarts"] == 2
    assert record["seconds_lost"] == alone["seconds_lost"] > 0
    assert re.search(r"restarts +2\n", station.ok("show", "exp-2").stdout)
    (top,) = [line for line in station.ok("top", "--once").stdout.splitlines() if "exp-2" in line]
    assert "loss 0.1000" in shown[2] and top.split()[3] == "0.1000"


def evaluated(run: Run, saved: list[int], scores: dict[int, dict[str, float | None]], metric: str = "") -> None:
    (run.folder / "config.toml").write_text(f'[checkpoint]\nbest = "{metric}"\n')
    lines = [json.dumps({"step": step, "epoch": 1, "eval": figures}) for step, figures in scores.items()]
    run.metrics.write_text("\n".join(lines) + "\n")
    for step in saved:
        run.checkpoint(step).mkdir(exist_ok=True)


def test_the_best_checkpoint_has_the_lowest_loss_or_the_highest_metric_that_is_asked_for(runs: Path) -> None:
    run = Run(runs / "exp-1")
    assert best.best(run, read_spec(run).best_by) is None and best.facts(run, "") == {"checkpoints": [], "best": None}
    with pytest.raises(Refused, match="was evaluated"):
        best.checkpoint_named(run, read_spec(run), "best", tell=print)
    scores: dict[int, dict[str, float | None]] = {
        2: {"loss": 0.1, "accuracy": 0.5}, 4: {"loss": 0.3, "accuracy": 0.9}, 6: {"loss": 0.2, "accuracy": 0.9},
        8: {"loss": None, "accuracy": None},
    }  # fmt: skip
    evaluated(run, [4, 6, 7, 8], scores)
    assert best.best(run, read_spec(run).best_by) == best.Best(6, "loss", 0.2, lost=(2, 0.1))
    said: list[str] = []
    assert best.checkpoint_named(run, read_spec(run), "best", tell=said.append) == best.Chosen(6, "loss")
    assert best.checkpoint_named(run, read_spec(run), "7", tell=said.append) == best.Chosen(7)
    better = "step 2 was better (loss 0.1000) but has no checkpoint"
    assert said == [f"warning: {better}; next time give --checkpoint.best loss"]
    evaluated(run, [], scores, "accuracy")
    assert best.best(run, read_spec(run).best_by) == best.Best(6, "accuracy", 0.9, lost=None)
    evaluated(run, [], scores, "min:accuracy")
    assert best.best(run, read_spec(run).best_by) == best.Best(6, "accuracy", 0.9, lost=(2, 0.5))
    evaluated(run, [], scores, "max:loss")
    assert best.best(run, read_spec(run).best_by) == best.Best(4, "loss", 0.3, lost=None)
    evaluated(run, [], scores, "acuracy")  # which no evaluation has
    assert best.best(run, read_spec(run).best_by) == best.Best(6, "loss", 0.2, lost=(2, 0.1))


def test_a_best_that_no_evaluation_can_name_is_refused_or_told_and_the_lowest_loss_is_kept(
    station: Station,
) -> None:
    from train.launcher.checks import prepare
    from train.launcher.request import Request
    from train.launcher.resume import prepare_resume

    text = """
import torch


def model(config):
    return torch.nn.Linear(2, 1)


def datasets(config):
    made = torch.utils.data.TensorDataset(torch.zeros(4, 2))
    return made, {evaluation}


def loss(model, batch):
    return model(batch[0]).mean() ** 2
"""
    task = station.folder / "task.py"
    for evaluation, wanted, words in (
        ("None", "loss", "evaluation set"),
        ("made", "f1", "no evaluation gives f1; there are: loss"),
    ):
        task.write_text(text.format(evaluation=evaluation))
        with pytest.raises(Refused, match=words):
            prepare(Request(task=str(task), flags={"checkpoint.best": wanted, "cpu_threads": "1", "steps": "1"}))
    task.write_text(
        text.format(evaluation="made")
        + """

def metrics(model, batch):
    return {"rising": next(model.parameters()).new_tensor(_seen.append(1) or len(_seen))}

_seen = []
"""
    )
    flags = ["--steps", 4, "--batch_size", 4, "--cpu_threads", 1, "--checkpoint.keep", 1, "--optim.lr", 1e-9]
    done = station.ok("run", "task.py", "--name", "a", "--checkpoint.best", "risin", *flags)
    (said,) = [line for line in done.stderr.splitlines() if "warning" in line]
    assert "no evaluation gives risin" in said and "did you mean rising" in said and "train resume a" in said
    with pytest.raises(Refused, match="did you mean rising"):
        prepare_resume(station.run("a"), {"checkpoint.best": "max:risin"}, 1)
    prepare_resume(station.run("a"), {"checkpoint.best": "min:rising"}, 1)
    station.ok("run", "task.py", "--name", "b", "--checkpoint.best", "min:rising", *flags)
    assert sorted(station.run("b").steps_saved()) == [1, 4]


def test_export_and_eval_take_the_best_checkpoint_and_show_names_it(station: Station) -> None:
    import torch

    station.ok("run", "digits", "--name", "d", "--epochs", 3, "--checkpoint.best", "accuracy", "--checkpoint.keep", 1,
               "--cpu_threads", 1, "--schedule.decay", "step", "--schedule.step_epochs", 2, "--schedule.gamma", 1e-9,
               "--optim.lr", 0.1)  # fmt: skip
    run = station.run("d")
    scores = best.scores_of(run, "accuracy")[1]
    step = min(at for at, score in scores.items() if score == max(scores.values()))
    later = max(at for at, score in scores.items() if score == max(scores.values()) and at in run.steps_saved())
    shown = json.loads(station.ok("show", "d", "--json").stdout)
    assert shown["best"]["step"] == later and shown["checkpoints"] == sorted(run.steps_saved())
    assert shown == station.record("d") | {"restarts": 0, "seconds_lost": 0.0}
    assert f"step {later}, accuracy {scores[step]:.4f}" in station.ok("show", "d").stdout
    done = station.ok("export", "d", "--checkpoint", "best", "--to", "best.pt")
    assert f"after step {later}" in done.stderr
    station.ok("export", "d", "--checkpoint", later, "--to", "same.pt")
    one, other = (torch.load(station.folder / name) for name in ("best.pt", "same.pt"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    answer = json.loads(station.ok("eval", "d", "--checkpoint", "best", "--json").stdout)
    assert answer["step"] == later and answer["eval"]["accuracy"] == scores[later]
    refused = station("export", "d", "--checkpoint", "wurst", "--to", "x.pt")
    assert refused.returncode == 2 and "or best" in refused.stderr

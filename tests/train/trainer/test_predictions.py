"""Figures of a whole evaluation set: in its order, each sample once, the same on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score

from tests.tasks import TASKS
from tests.train.specs import with_spec
from train.errors import TrainingFailed
from train.parallel.world import World
from train.tasks import load
from train.trainer.evaluate import evaluate_run
from train.trainer.load import load_trained
from train.trainer.predictions import Predictions

pytestmark = [pytest.mark.never_forgiven, pytest.mark.turns]

TASK = TASKS / "whole_sets.py"


def test_the_figures_are_those_of_the_whole_set_and_of_one_process(engine: Any) -> None:
    name = "whole"
    assert engine.run(name, 3, task=TASK, steps=5)["state"] == "finished", engine.said(name)
    (figures,) = engine.evaluations(name)[1:]
    task, config, model, _, _ = load_trained(*with_spec(engine.station.run(name)))
    held_out = task.datasets(config)[1]["test"]
    with torch.no_grad():
        score = model.eval().body(held_out.points).softmax(1)[:, 1]
        whole = torch.nn.functional.cross_entropy(model(held_out.points), held_out.labels).item()
    assert figures["test.f1"] == pytest.approx(f1_score(held_out.labels, score > 0.5), rel=1e-12)
    assert figures["test.ap"] == pytest.approx(average_precision_score(held_out.labels, score), rel=1e-12)
    assert figures["test.loss"] == pytest.approx(whole, rel=1e-6)  # of the model, and not of the inference model
    assert figures["test.accuracy"] == ((score > 0.5).long() == held_out.labels).double().mean().item()
    assert (figures["val.seen"], figures["test.seen"], figures["test.first"]) == (23, 30, 0)
    assert evaluate_run(*with_spec(engine.station.run(name)), None)[2] == figures


def test_a_sample_that_cannot_be_read_is_in_no_prediction(engine: Any) -> None:
    flags = {"data__on_error": "skip", "task__unreadable": 0, "steps": 2, "data__workers": 1}
    assert engine.run("whole-torn", 2, task=TASK, **flags)["skipped"] == {"test": 1}
    (figures,) = engine.evaluations("whole-torn")
    assert (figures["test.seen"], figures["test.first"], figures["val.seen"]) == (29, 1, 23)
    assert "left out: sample 0 of the test set: ValueError: no 0" in engine.said("whole-torn")


@pytest.mark.minutes
def test_others_wait_for_rank_0_beyond_the_timeout_and_are_not_taken_for_hung(engine: Any) -> None:
    flags = {"task__seconds": 9, "parallel__timeout_minutes": 0.1, "watch__hang_minutes": 0.1}
    record = engine.run("whole-slow", 2, task=TASK, steps=1, **flags)
    assert record["state"] == "finished" and len(record["attempts"]) == 1, engine.said("whole-slow")


def test_a_prediction_that_is_not_one_per_sample_fails_the_run_on_all_ranks(engine: Any, tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(TASK.read_text().replace('"label": batch["label"],', '"label": batch["label"][:2],'))
    record = engine.run("whole-wrong", 2, task=task, steps=1, eval__first="false")
    assert record["state"] == "failed" and "one label a sample" in record["reason"], record
    assert "4 for this batch, got a tensor of shape (2,)" in record["reason"]


@pytest.mark.parametrize(
    ("predict", "compute", "words"),
    [
        ("batch", "{}", "must return a dict from names"),
        ("{'a': batch.mean()}", "{}", "one a a sample.*3 for this batch, got a tensor of shape ()"),
        ("{'a': [1, 2]}", "{}", "3 for this batch, got a list of 2"),
        ("{'a': batch.numpy()}", "{}", "got ndarray"),
        ("{'a': batch, str(_seen.append(1) or len(_seen)): batch}", "{}", "same names"),
        (
            "{'a': torch.zeros(3, _seen.append(1) or len(_seen))}",
            "{}",
            r"a in several forms, .*\(0, 1\) and .*\(0, 2\)",
        ),
        ("batch.tolist()", "{'b': {}}", r"numbers.*got dict for b"),
        ("batch.tolist()", "{'a/b': 'words'}", r"names a picture 'a/b'"),
        ("[1, 2]", "{}", "one item a sample.*3 for this batch, got a list of 2"),
        ("{'a': batch}", "p['b']", r"compute_metrics failed: .*task\.py, line 4: KeyError: 'b'"),
        ("{'a': batch}", "5", "dict of numbers, got int"),
        ("{'a': batch}", "{'b': '3'}", "gives b as the text '3'; return the number"),
        ("{'a': batch}", "{'b': p['a']}", r"numbers.*got a tensor of shape \(6,\) for b"),
    ],
)
def test_what_is_no_prediction_and_no_figure_is_named(tmp_path: Path, predict: str, compute: str, words: str) -> None:
    (tmp_path / "task.py").write_text(
        f"import torch\n_seen = []\ndef predict(model, batch): return {predict}\n"
        f"def compute_metrics(p): return {compute}\ndef model(config): ...\ndatasets = loss = model\n"
    )
    task = load(str(tmp_path / "task.py"))
    assert task.predict is not None
    predictions = Predictions(task, World(0, size=1, local_rank=0, device=torch.device("cpu")))
    with pytest.raises(TrainingFailed, match=words):
        for number in range(2):
            predictions.add(number, task.predict(None, torch.ones(3)), 3)
        predictions.figures(0, lambda phase: None)


def test_tensors_are_kept_without_the_memory_that_they_are_a_part_of(tmp_path: Path) -> None:
    predictions = Predictions(load(str(TASK)), World(0, size=1, local_rank=0, device=torch.device("cpu")))
    large = torch.ones(4, 1000, dtype=torch.bfloat16)
    predictions.add(1, {"a": large[:, 0], "b": [{"box": row[:2]} for row in large]}, 4)
    predictions.add(0, {"a": 2 * large[:, 0], "b": [{"box": row[:1]} for row in large]}, 4)
    predictions.collect()
    whole = predictions.joined()
    assert whole["a"].tolist() == [2] * 4 + [1] * 4 and whole["a"].dtype == torch.float32
    assert [len(item["box"]) for item in whole["b"]] == [1] * 4 + [2] * 4
    assert all(item["box"].untyped_storage().nbytes() <= 8 for item in whole["b"])


def test_a_list_alone_is_given_as_one_list(tmp_path: Path) -> None:
    lines = "def compute_metrics(p): return {'sum': sum(p), 'first': p[0]}\ndef model(config): ...\n"
    lines += "datasets = loss = model\n"
    (tmp_path / "task.py").write_text(f"def predict(model, batch): return batch.tolist()\n{lines}")
    task = load(str(tmp_path / "task.py"))
    predictions = Predictions(task, World(0, size=1, local_rank=0, device=torch.device("cpu")))
    for number in (1, 0):
        predictions.add(number, [number + 1, 5], 2)
    assert predictions.figures(0, lambda phase: None) == {"sum": 13, "first": 1}

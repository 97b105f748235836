"""Every sample exactly once, and the same figures on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.train.specs import with_spec
from train.build.loss import evaluation_values
from train.errors import Refused, TrainingFailed
from train.launcher.checks import prepare
from train.launcher.request import Request
from train.parallel.world import World
from train.trainer.evaluate import summed

pytestmark = pytest.mark.never_forgiven

EVALUATED = {"steps": 4, "task__count_ids": "true", "micro_batch_size": 4}


@pytest.fixture(scope="session")
def evaluated(engine: Any) -> Any:
    """With the run `eval1`: four steps on one rank, then 23 samples in micro batches of 4, the last one of 3."""
    engine.run("eval1", 1, precision="fp64", **EVALUATED)
    return engine


def test_no_sample_is_left_out_or_seen_twice(evaluated: Any) -> None:
    evaluated.run("eval3", 3, precision="fp64", **EVALUATED)
    for ranks in (1, 3):
        (figures,) = evaluated.evaluations(f"eval{ranks}")
        shares = [figures[f"id{index}"] for index in range(23)]
        assert shares == pytest.approx([1 / 23] * 23, rel=1e-12)
        assert evaluated.station.metrics(f"eval{ranks}")[-1]["samples"] == 23
        assert figures == pytest.approx(evaluated.evaluations("eval1")[0], rel=1e-9)


def test_the_same_weights_give_the_same_figures_to_the_last_bit_on_any_number_of_ranks(engine: Any) -> None:
    flags = {"steps": 4, "schedule__decay": "constant", "schedule__warmup_epochs": 0}
    engine.run("bits", 3, ["4 0 SIGTERM"], **flags)  # stopped before its evaluation: one rank makes that up
    assert engine.evaluations("bits") == []
    engine.resume("bits", 1)
    engine.run("bits-again", 3, **flags)
    assert engine.station.record("bits-again")["weights_sha256"] == engine.station.record("bits")["weights_sha256"]
    assert engine.evaluations("bits-again") == engine.evaluations("bits")


def test_the_loss_is_the_mean_over_all_samples_although_the_last_batch_is_short(evaluated: Any) -> None:
    from train.trainer.load import load_trained

    task, config, model, step, _ = load_trained(*with_spec(evaluated.station.run("eval1")))
    assert step == 4
    _, held_out = task.datasets(config)
    model.eval()
    points = held_out.points.double()
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(points), held_out.labels).item()
        accuracy = (model(points).argmax(1) == held_out.labels).double().mean().item()
    (figures,) = evaluated.evaluations("eval1")
    assert figures["loss"] == pytest.approx(expected, rel=1e-12)
    assert figures["accuracy"] == pytest.approx(accuracy, rel=1e-12)
    assert evaluated.station.record("eval1")["metrics"] == figures


def test_more_ranks_than_micro_batches_still_see_each_sample_once(engine: Any) -> None:
    engine.run("few", 4, steps=1, task__evaluation=5, task__count_ids="true")
    assert [engine.evaluations("few")[0][f"id{index}"] for index in range(5)] == pytest.approx([0.2] * 5)


def test_counts_weigh_the_loss_of_an_evaluation(engine: Any) -> None:
    for ranks in (1, 3):
        engine.run(f"counted-eval{ranks}", ranks, steps=2, precision="fp64", task__counted="true")
    from train.trainer.load import load_trained

    task, config, model, _, _ = load_trained(*with_spec(engine.station.run("counted-eval1")))
    _, held_out = task.datasets(config)
    keep = torch.arange(23) % 3 != 0
    with torch.no_grad():
        logits = model.eval()(held_out.points.double()[keep])
        expected = torch.nn.functional.cross_entropy(logits, held_out.labels[keep]).item()
    assert engine.evaluations("counted-eval1")[0]["loss"] == pytest.approx(expected, rel=1e-12)
    assert engine.evaluations("counted-eval3")[0]["loss"] == pytest.approx(expected, rel=1e-9)


def test_evaluations_come_when_asked_for_and_at_the_end(engine: Any) -> None:
    for every, steps in ((0, [10]), (0.5, [2, 4, 6, 8, 10]), (2, [8, 10])):
        name = f"every-{every}".replace(".", "-")
        engine.run(name, 1, eval__every_epochs=every)
        assert [line["step"] for line in engine.station.metrics(name) if "eval" in line] == steps


def test_an_evaluation_may_be_limited_to_the_same_samples_on_any_number_of_ranks(engine: Any) -> None:
    flags = {"precision": "fp64", "steps": 2, "eval__every_epochs": 0, "eval__limit_batches": 1} | EVALUATED
    for ranks in (1, 3):
        engine.run(f"limited{ranks}", ranks, **flags | {"steps": 2})
        (line,) = [line for line in engine.station.metrics(f"limited{ranks}") if "eval" in line]
        assert line["samples"] == 16
        seen = [name for name, share in line["eval"].items() if name.startswith("id") and share > 0]
        assert len(seen) == 16 and seen != [f"id{index}" for index in range(16)]  # 16 of 23, and not the first ones
        assert line["eval"] == pytest.approx(engine.evaluations("limited1")[0], rel=1e-9)
    engine.run("roomy", 2, **flags | {"steps": 2, "eval__limit_batches": 2})  # two batches are more than there is
    assert [line["samples"] for line in engine.station.metrics("roomy") if "eval" in line] == [23]
    from train.trainer.evaluate import evaluate_run

    assert evaluate_run(*with_spec(engine.station.run("limited1")), None)[1:] == (16, engine.evaluations("limited1")[0])


def test_batchnorm_is_evaluated_with_the_same_statistics_on_every_rank(engine: Any) -> None:
    engine.run("norm-eval", 3, ["4 0 SIGTERM"], steps=4, precision="fp64", task__batchnorm="true")
    engine.resume("norm-eval", 1)
    engine.run("norm-eval-three", 3, steps=4, precision="fp64", task__batchnorm="true")
    assert engine.evaluations("norm-eval-three") == engine.evaluations("norm-eval")


def test_train_eval_gives_the_figures_that_the_run_gave(evaluated: Any) -> None:
    from train.trainer.evaluate import evaluate_run

    step, samples, figures = evaluate_run(*with_spec(evaluated.station.run("eval1")), None)
    assert (step, samples) == (4, 23)
    assert figures == evaluated.evaluations("eval1")[0]


def test_loader_workers_are_forked_before_the_ranks_meet_and_serve_all_evaluations(engine: Any, tmp_path: Path) -> None:
    """A fork while another thread writes a checkpoint copies the locks that it holds."""
    text = engine.task.read_text()
    changes = {
        "    def __getitem__(self, index: int) -> dict[str, Any]:\n": "        assert not dist.is_initialized()\n",
        "def loss(model: nn.Module, batch: Any) -> Any:\n": "    _write_down(model.training)\n",
    }
    for place, more in changes.items():
        assert text.count(place) == 1
        text = text.replace(place, place + more)
    text += """

def _write_down(training: bool) -> None:
    import multiprocessing

    pids = sorted(child.pid for child in multiprocessing.active_children())
    with Path(__spec__.origin).with_name(f"workers.rank{dist.get_rank()}").open("a") as file:
        print(training, *pids, file=file)
"""
    task = tmp_path / "watched.py"
    task.write_text(text)
    flags = {"data__workers": 2, "checkpoint__every_steps": 1, "eval__every_epochs": 0.25}
    assert engine.run("served", 2, task=task, **flags)["state"] == "finished"
    assert len(engine.evaluations("served")) == 10
    for rank in range(2):
        lines = {tuple(line.split()) for line in (engine.station.runs / f"served/workers.rank{rank}").open()}
        assert {line[0] for line in lines} == {"True", "False"}
        (pids,) = {line[1:] for line in lines}
        assert len(pids) == 2


def test_an_evaluation_leaves_what_it_counts_as_it_was(engine: Any, tmp_path: Path) -> None:
    """Else the last weights would not be those of the last checkpoint, and a resume would train on with others."""
    task = tmp_path / "task.py"
    text = engine.task.read_text()
    counting = (
        "\n\n_plain = model\n\n\ndef _count(module, arguments):\n    module.seen += 1\n"
        "    module.last = torch.full((2,), float(module.seen))\n\n\n"
        "def model(config):\n    made = _plain(config)\n    made.register_buffer('seen', torch.zeros(()))\n"
        "    made.register_buffer('last', torch.zeros(2))\n    made.register_forward_pre_hook(_count)\n"
        "    return made\n"
    )
    task.write_text(text + counting)
    engine.run("counting", 1, task=task, steps=8)
    engine.run("counting-stopped", 1, ["3 0 SIGTERM"], task=task, steps=8)
    engine.resume("counting-stopped", 1)
    assert engine.weights("counting")["seen"].item() == 2 * (4 + 4 + 4 + 2)  # micro batches of two epochs
    assert engine.outcome("counting-stopped") == engine.outcome("counting")


def test_metrics_that_have_the_loss_among_them_save_its_forward() -> None:
    asked: list[str] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        asked.append("loss")
        return model(batch).mean()  # type: ignore[no-any-return]

    def metrics(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
        asked.append("metrics")
        return {"largest": model(batch).max(), "loss": (model(batch).sum(), 3)}

    model, batch = nn.Linear(2, 1), torch.ones(4, 2)
    one_forward: Any = SimpleNamespace(loss=loss, metrics=metrics, file="task.py")
    figures = evaluation_values(one_forward, model, inference=model, batch=batch, samples=4)
    assert asked == ["metrics"] and list(figures) == ["loss", "largest"] and figures["loss"].count == 3
    two: Any = SimpleNamespace(loss=loss, metrics=lambda *_: {"largest": 1.0}, file="task.py")
    figures = evaluation_values(two, model, inference=model, batch=batch, samples=4)
    assert asked == ["metrics", "loss"] and list(figures) == ["loss", "largest"] and figures["loss"].count is None


def test_a_metric_that_is_no_number_is_named() -> None:
    for value, kind in (("high", "str"), ([0.5, 1], "a list of 2"), (torch.ones(2), "a tensor of shape")):
        task: Any = SimpleNamespace(loss=None, metrics=lambda *_, value=value: {"best": value}, file="task.py")
        with pytest.raises(TrainingFailed, match=f"metric best in task.py must return a scalar.*got {kind}"):
            evaluation_values(task, nn.Linear(1, 1), inference=nn.Linear(1, 1), batch=torch.ones(2), samples=2)


def test_metrics_of_other_names_on_another_rank_are_an_error(engine: Any, tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    text = engine.task.read_text()
    task.write_text(
        text + "\n\ndef metrics(model, batch):\n"
        "    import torch.distributed as dist\n    return {f'rank{dist.get_rank()}': torch.zeros(())}\n"
    )
    record = engine.run("names", 2, task=task, steps=1)
    assert record["state"] == "failed" and "the same names for every batch" in record["reason"]


def test_ranks_ask_each_other_for_a_stop_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device all that is queued there would have to be computed first."""
    world = World(0, size=2, local_rank=0, device=torch.device("meta"))
    asked: list[torch.Tensor] = []

    def add(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(tensor)
        return tensor

    monkeypatch.setattr(world, "add", add)
    assert world.any(True) and not world.any(False)
    assert {tensor.device.type for tensor in asked} == {"cpu"}


class _Counting(TorchDispatchMode):
    """Counts what torch is asked to do."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_figures_come_to_the_host_together_however_many_there_are() -> None:
    """Numbers that the host knows go to no device one by one: each would wait for it."""
    counted = []
    for micros in (10, 200):
        rows: dict[int, list[Any]] = {
            n: [4, 2.5, torch.tensor(3.0, dtype=torch.float64), torch.tensor(n, dtype=torch.float64), 4.0]
            for n in range(micros)
        }
        with _Counting() as mode:
            figures, samples = summed(
                rows, ["loss", "accuracy"], micros + 5, World(0, size=1, local_rank=0, device=torch.device("cpu"))
            )
        assert samples == 4 * micros
        assert figures == {"loss": (micros - 1) / 8, "accuracy": 2.5 / 3}
        counted.append(mode.calls)
    assert counted[0] == counted[1], counted


NAMED = """

_datasets, _loss = datasets, loss


def datasets(config):
    train, held_out = _datasets(config)
    return train, {"val": held_out, "test": Points(9, 5, 0.0)}


def predict(model, batch):
    return {"right": model(batch["point"]).argmax(1) == batch["label"]}


def compute_metrics(predictions):
    return {"share": predictions["right"].double().mean(), "drawn": random.random()}


def images(model, batch):
    return {"noise": torch.rand(3, 1, 8, 8)}
"""


def test_a_killed_run_with_named_sets_ends_as_if_nothing_had_happened(engine: Any, tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(engine.task.read_text() + NAMED)
    flags = {"eval__every_steps": 3, "checkpoint__best": "max:val.share", "data__workers": 1}
    plain = tmp_path / "plain.py"
    plain.write_text(engine.task.read_text())
    engine.run("named-plain", 2, task=plain, eval__every_steps=3)
    engine.run("named", 2, task=task, **flags)
    engine.run("named-killed", 2, ["5 0 SIGKILL"], task=task, **flags)
    engine.resume("named-killed", 2, ["4 1 SIGKILL"])
    engine.resume("named-killed", 2)
    for name in ("named", "named-killed"):
        found = [line["step"] for line in engine.station.metrics(name) if "eval" in line]
        assert found == [3, 6, 9, 10]
        pictures = sorted(path.name for path in (engine.station.runs / name / "images").iterdir())
        assert pictures == [f"noise-step-{step:08d}.png" for step in found]
    assert engine.outcome("named-killed") == engine.outcome("named")
    for alone, figures in zip(engine.evaluations("named-plain"), engine.evaluations("named"), strict=True):
        assert alone == {name: figures[f"val.{name}"] for name in alone}
        assert figures["val.share"] == pytest.approx(figures["val.accuracy"], rel=1e-12)
    record = engine.station.record("named")
    assert record["weights_sha256"] == engine.station.record("named-plain")["weights_sha256"]
    assert record["best"]["value"] == max(figures["val.share"] for figures in engine.evaluations("named"))


@pytest.mark.parametrize(
    ("change", "best", "words"),
    [
        (("", ""), "loss", "did you mean val.loss"),
        (("", ""), "max:share", "did you mean val.share"),
        (('"val"', '"v.l"'), "", "'v.l'; use letters"),
        (('"val"', '"ema"'), "", "'ema'; use"),
        (('{"val": held_out, "test": Points(9, 5, 0.0)}', "{}"), "", "empty dict.*None"),
        (("Points(9, 5, 0.0)", "[]"), "", "the test set of .* is empty"),
        (("def predict", "def foretell"), "", "compute_metrics but not predict"),
        (("def compute_metrics", "def compute"), "", "predict but not compute_metrics"),
        (
            ("def images", "def inference_model(model): return 1\ndef images"),
            "",
            "must return a torch.nn.Module, got int",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    engine: Any, tmp_path: Path, change: tuple[str, str], best: str, words: str
) -> None:
    task = tmp_path / "task.py"
    task.write_text(engine.task.read_text() + NAMED.replace(*change))
    with pytest.raises(Refused, match=words):
        prepare(Request(task=str(task), flags={"cpu_threads": "1", "checkpoint.best": best}))

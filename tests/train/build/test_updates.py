"""Several updates a step: in turn, on the same batch, on any ranks, through any kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks import TASKS
from tests.train.specs import with_spec
from tests.train.tiers import later
from train.build.objects import make_model
from train.errors import Refused
from train.trainer.load import load_trained

pytestmark = pytest.mark.never_forgiven

GAN: dict[str, Any] = {
    "task": TASKS / "gan.py", "optim__lr": None, "optim__name": None, "schedule__decay": "constant",
    "schedule__warmup_epochs": 0, "checkpoint__every_steps": 3, "checkpoint__asynchronous": "false",
}  # fmt: skip
ORDERED = {"parallel__reduce": "ordered"}


def test_they_are_those_of_a_loop_written_by_hand(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, whole batches: what a tutorial would write, without noise."""
    flags = GAN | {"micro_batch_size": 16, "precision": "fp64", "steps": 6}
    assert engine.run("gan-hand", 1, **flags)["state"] == "finished", engine.said("gan-hand")
    task, config, trained, _, _ = load_trained(*with_spec(engine.station.run("gan-hand")))
    model = make_model(task, config, torch.float64).train()
    made = task.updates(model, config)
    points = task.datasets(config)[0].tensors[0].double()
    order = [line for _, line in sorted(_lines(engine, "gan-hand").items())]
    losses: list[dict[str, float]] = []
    from train.data.order import seed_of
    from train.data.seeding import seed_compute

    for step, ids in enumerate(order):
        losses.append(losses[-1].copy() if losses else {})  # each line has the last value of each
        for name in ("d", "g") if (step + 1) % 2 == 0 else ("d",):
            seed_compute(seed_of(0, "train", step // 4, step, 0), torch.device("cpu"), tag=f"compute{name}")
            made[name]["optimizer"].zero_grad()
            loss = made[name]["loss"](model, (points[ids],))
            parameters = [p for group in made[name]["optimizer"].param_groups for p in group["params"]]
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient
            made[name]["optimizer"].step()
            losses[-1][f"loss.{name}"] = loss.item()
    lines = [line for line in engine.lines("gan-hand") if "loss" in line]
    for line, expected in zip(lines, losses, strict=True):
        assert {key: line[key] for key in line if key.startswith("loss.")} == pytest.approx(expected, rel=1e-12)
        assert line["loss"] == pytest.approx(sum(expected.values()))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], value, rtol=1e-12, atol=1e-14)


def _lines(engine: Any, name: str) -> dict[int, list[int]]:
    text = (engine.station.runs / name / "samples.rank0.log").read_text()
    return {int(line.split()[0]): [int(number) for number in line.split()[1:]] for line in text.splitlines()}


@pytest.mark.parametrize(("ranks", "way"), [(3, {}), *later((2, {}), (3, ORDERED))])
def test_killed_and_resumed_it_ends_bit_for_bit_as_undisturbed(engine: Any, ranks: int, way: dict[str, Any]) -> None:
    flags = GAN | way | {"task__norm": "true"}
    whole, killed = f"gan{ranks}{len(way)}", f"gan{ranks}{len(way)}-killed"
    assert engine.run(whole, ranks, **flags)["state"] == "finished", engine.said(whole)
    assert engine.run(killed, ranks, ["8 1 SIGKILL"], **flags)["state"] == "interrupted", engine.said(killed)
    assert engine.station.run(killed).steps_saved() == [6, 3]
    engine.resume(killed, ranks)
    assert engine.outcome(killed) == engine.outcome(whole)


def test_what_was_saved_before_an_update_was_ever_made_is_read_back(engine: Any) -> None:
    flags = GAN | {"checkpoint__every_steps": 1, "task__every": 4}
    engine.run("gan-late", 1, **flags)
    engine.run("gan-late-stopped", 1, ["2 0 SIGTERM"], **flags)
    engine.resume("gan-late-stopped", 1)
    assert engine.outcome("gan-late-stopped") == engine.outcome("gan-late")


def test_what_is_frozen_leaves_an_optimizer_with_a_state_from_the_start(engine: Any, tmp_path: Path) -> None:
    task = tmp_path / "adagrad.py"
    task.write_text(
        (TASKS / "gan.py").read_text().replace("optim.SGD(", "optim.Adagrad(").replace(", momentum=0.9", "")
    )
    flags = GAN | {"task": task, "freeze": "g.0.bias"}
    engine.run("gan-frozen", 1, **flags)
    engine.run("gan-frozen-stopped", 1, ["2 0 SIGTERM"], **flags)
    engine.resume("gan-frozen-stopped", 1)
    assert engine.outcome("gan-frozen-stopped") == engine.outcome("gan-frozen")


def test_in_order_it_ends_with_the_same_bits_on_any_number_of_ranks(engine: Any) -> None:
    flags = GAN | ORDERED | {"task__norm": "true"}
    digests = {engine.run(f"gan-ordered-{ranks}", ranks, **flags)["weights_sha256"] for ranks in (1, 3)}
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"task__wrong": "twice"}, "updates in .*: d.0.bias is in d and in g"),
        (
            {"task__wrong": "left out"},
            "updates in .*: d.3.(weight|bias) is in no optimizer; give it to one, or freeze it",
        ),
        ({"task__wrong": "key"}, "d has an unknown key 'evry'; did you mean every"),
        ({"task__wrong": "never"}, "at least one must run in every step"),
        ({"task__wrong": "no optimizer"}, 'd needs "optimizer", a torch.optim.Optimizer; got NoneType'),
        ({"parallel__strategy": "fsdp"}, "fsdp makes one update per step"),
    ],
)
def test_wrong_updates_are_refused(engine: Any, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        engine.run("never", 2, **GAN | flags)


def test_updates_take_the_place_of_an_optimizer(station: Any) -> None:
    task = station.folder / "both.py"
    task.write_text((TASKS / "gan.py").read_text() + "\ndef optimizer(model, config): ...\n")
    done = station("run", task)
    assert done.returncode == 2 and "has updates and optimizer" in done.stderr

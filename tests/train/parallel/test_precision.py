"""The arithmetic of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from train import gpus
from train.config import Config
from train.errors import Refused
from train.gpus import Card
from train.launcher import foreground
from train.launcher.checks import prepare
from train.launcher.request import Plan, Request
from train.launcher.resume import prepare_resume
from train.parallel.devices import NoGPU
from train.parallel.precision import Precision
from train.parallel.strategy import Strategy
from train.parallel.world import World

pytestmark = pytest.mark.turns


@pytest.mark.minutes
def test_bf16_trains_on_a_cpu_with_weights_in_float32(engine: Any) -> None:
    flags = {"epochs": 20, "task__samples": 256, "task__dropout": 0, "optim__lr": 0.3}
    engine.run("bf16", 2, precision="bf16", **flags)
    engine.run("fp32", 2, **flags)
    losses, expected = engine.losses("bf16"), engine.losses("fp32")
    assert sum(losses[-16:]) < 0.8 * sum(losses[:16])
    assert losses[0] != expected[0]  # it did compute in bfloat16
    assert losses[0] == pytest.approx(expected[0], rel=0.02)
    assert {value.dtype for value in engine.weights("bf16").values()} == {torch.float32}


def test_a_bf16_run_resumes_bit_for_bit(engine: Any) -> None:
    engine.run("bf16-whole", 3, precision="bf16", steps=6)
    engine.run("bf16-parts", 3, ["3 0 SIGTERM"], precision="bf16", steps=6)
    engine.resume("bf16-parts", 3)
    assert engine.outcome("bf16-parts") == engine.outcome("bf16-whole")


def test_fp64_keeps_weights_and_inputs_in_float64(steady: Any) -> None:
    assert {value.dtype for value in steady.weights("one").values()} == {torch.float64}
    assert Precision("fp64", torch.device("cpu")).inputs == torch.float64


def test_fp16_on_a_cpu_is_refused_with_the_remedy(engine: Any) -> None:
    with pytest.raises(Refused, match="fp16 needs a GPU; on a CPU use --precision bf16"):
        prepare(Request(task=str(engine.task), flags={"precision": "fp16", "device": "cpu"}))


T4, H100, H200 = Card("Tesla T4", (7, 5)), Card("NVIDIA H100", (9, 0)), Card("NVIDIA H200", (9, 0))


def launched(engine: Any, monkeypatch: pytest.MonkeyPatch, cards: list[Card], **request: Any) -> Plan:
    """A run that is checked where there are these GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards) or 1)
    monkeypatch.setattr(gpus, "cards", lambda: cards)
    flags = {key: str(value) for key, value in engine.flags.items()} | request.pop("flags", {})
    return prepare(Request(str(request.pop("task", engine.task)), flags=flags), **request)


@pytest.mark.parametrize(
    ("cards", "ranks", "elsewhere", "chosen", "said"),
    [
        ([H100, H100], 2, [], "tf32", "NVIDIA H100 has compute capability 9.0; --precision bf16 is faster still"),
        ([H100, T4], 2, [], "fp32", "Tesla T4 has compute capability 7.5, and tf32 needs 8.0"),
        ([H100, T4], 1, [], "tf32", "NVIDIA H100 has"),  # the only rank is on the first one
        ([Card("NVIDIA A10", (8, 6)), H100], 2, [], "tf32", "NVIDIA A10 has compute capability 8.6"),
        ([H100], 1, [[H200], [T4]], "fp32", "Tesla T4 has"),
        ([H100], 1, [[H200], []], "fp32", "NVML does not know the GPUs"),
        ([], 1, [], "fp32", "NVML does not know the GPUs; on compute capability 8.0 and newer --precision tf32"),
    ],
)
def test_where_nobody_chooses_the_lowest_card_of_the_run_does(
    engine: Any, monkeypatch: pytest.MonkeyPatch, cards: list[Card], ranks: int, elsewhere: list[list[Card]],
    chosen: str, said: str,
) -> None:  # fmt: skip
    made = launched(engine, monkeypatch, cards, ranks=ranks, elsewhere=lambda: elsewhere)
    assert f'precision = "{chosen}"\n' in str(made.files["config.toml"])
    assert made.record["precision_reason"].startswith(f"precision {chosen}, because ")
    assert said in made.record["precision_reason"] and made.warnings == []


def test_what_the_user_chooses_is_kept_and_not_explained(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fp32", "bf16", "tf32"):
        made = launched(engine, monkeypatch, [H100], flags={"precision": name})
        assert (made.config.precision, made.record["precision_reason"]) == (name, "")


@pytest.fixture(scope="module")
def auto(engine: Any) -> None:
    """The run `auto`, whose precision nobody has chosen."""
    assert engine.run("auto")["state"] == "finished"


def test_on_a_cpu_it_is_fp32_without_a_word(engine: Any, auto: None) -> None:
    assert 'precision = "fp32"' in (engine.station.run("auto").folder / "config.toml").read_text()
    assert "precision" not in engine.said("auto")


def test_tf32_is_refused_where_there_is_none_with_the_remedy(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="tf32 needs a GPU; use --precision fp32"):
        prepare(Request(task=str(engine.task), flags={"precision": "tf32", "device": "cpu"}))
    with pytest.raises(Refused, match=r"tf32 needs a GPU of .* 8\.0 or newer, and Tesla T4 has 7\.5; use --precision"):
        launched(engine, monkeypatch, [T4], flags={"precision": "tf32"})


def test_a_run_of_tf32_goes_on_where_there_is_none_in_fp32_and_is_never_chosen_for_again(
    engine: Any, auto: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One command moves a run to the CPU whose GPUs are gone."""
    task = tmp_path / "task.py"
    task.write_text(engine.task.read_text() + '\nDEFAULTS = {"precision": "tf32"}\n')  # nobody asks for it by hand
    assert engine.run("moved", script=["4 0 SIGTERM"], task=task)["state"] == "stopped"
    config = engine.station.run("moved").folder / "config.toml"
    config.write_text(config.read_text().replace('device = "cpu"', 'device = "cuda"'))
    with pytest.raises(NoGPU, match="train resume moved --device cpu"):
        engine.resume("moved")
    _, warnings = prepare_resume(engine.station.run("moved"), {"device": "cpu"}, 1)
    assert warnings == ["precision tf32 needs a GPU, so this run computes in fp32 here"]
    assert engine.resume("moved", device="cpu")["state"] == "finished"
    assert 'precision = "tf32"' in config.read_text()
    assert engine.outcome("moved") == engine.outcome("auto")
    with pytest.raises(Refused, match="precision was tf32 and is auto now"):
        engine.resume("moved", precision="auto")
    with pytest.raises(Refused, match="--precision auto does not work for a fork; give tf32, or another one"):
        engine.fork("moved", "of-moved", 4, precision="auto", epochs=3)
    with pytest.raises(Refused, match="tf32 needs a GPU; use --precision fp32"):
        engine.fork("moved", "of-moved", 4, precision="tf32", device="cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpus, "cards", lambda: [T4])
    given, warnings = prepare_resume(engine.station.run("moved"), {"device": "cuda", "epochs": "3"}, 1)
    assert given.precision == "tf32"
    assert warnings[0].startswith("precision tf32 needs a GPU of compute capability 8.0 or newer, and Tesla T4 has 7.5")


def test_the_ranks_of_torchrun_tell_the_first_one_their_cards() -> None:
    store = dist.HashStore()
    for rank, cards in ((1, [H100, T4]), (2, [])):
        foreground.tell_cards(store, rank, cards)
    assert foreground.cards_of(store, 3) == [[H100, T4], []]


def test_a_rank_that_has_scaled_no_loss_yet_takes_part_in_a_step_that_scales() -> None:
    """Of fp16: a rank of whose first micro batch not a sample could be read."""
    made = Precision("fp32", torch.device("cpu"))
    made.scaler = torch.amp.GradScaler("cpu")
    strategy, model = (
        Strategy(World(0, size=1, local_rank=0, device=torch.device("cpu")), Config(), made),
        torch.nn.Linear(2, 2),
    )
    strategy.place(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy.start()
    strategy.backward(None, 0.0, torch.zeros(5))
    strategy.scale_and_clip_gradients(optimizer, clip_norm=None)
    strategy.update(optimizer)
    assert made.scaler.get_scale() == 65536


@pytest.mark.parametrize("before", ["nothing", "by the older way", "by the newer way", "for everything"])
def test_fp32_on_a_gpu_has_whole_products_and_tf32_short_ones_whatever_a_task_has_set(
    before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all that torch itself reads says the same: it raises an error where its older and newer settings differ."""
    backends: Any = torch.backends
    places = [backends.cuda.matmul]
    if hasattr(backends, "fp32_precision"):
        places += [backends.cudnn.conv, backends.cudnn.rnn, backends.cudnn]
    elif before in ("by the newer way", "for everything"):
        pytest.skip("this torch has one way to say it")
    for name, is_short in (("tf32", True), ("fp32", False), ("tf32", True), ("bf16", False)):
        if before == "by the older way":
            backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = not is_short
        elif before == "by the newer way":
            for place in places:
                place.fp32_precision = "ieee" if is_short else "tf32"
        elif before == "for everything":
            monkeypatch.setattr(backends, "fp32_precision", "tf32")
        Precision(name, torch.device("cuda"))
        assert backends.cuda.matmul.allow_tf32 is backends.cudnn.allow_tf32 is is_short
        if len(places) > 1:
            assert {place.fp32_precision for place in places} == {"tf32" if is_short else "ieee"}
        if before != "for everything":  # which the CPU's products follow too
            assert torch.get_float32_matmul_precision() == ("high" if is_short else "highest")


@pytest.mark.parametrize(("name", "inside"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_autocast_holds_inside_a_forward_pass_and_ends_with_it(name: str, inside: torch.dtype) -> None:
    made, layer = Precision(name, torch.device("cpu")), torch.nn.Linear(2, 2)
    with made.autocast():
        assert layer(torch.ones(1, 2)).dtype == inside
    assert layer(torch.ones(1, 2)).dtype == torch.float32


def test_the_loss_of_a_model_that_is_float64_by_itself_is_not_rounded_to_float32(engine: Any, tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    changed = """

_plain, _loss = model, loss


def model(config):
    return _plain(config).double()


def loss(model, batch):
    return _loss(model, batch | {"point": batch["point"].double()})


def metrics(model, batch):
    return {}
"""
    task.write_text(engine.task.read_text() + changed)
    for name, ranks in (("double-1", 1), ("double-3", 3)):
        assert engine.run(name, ranks, task=task)["state"] == "finished", engine.said(name)
        losses = engine.losses(name)
        assert any(loss != float(torch.tensor(loss, dtype=torch.float32)) for loss in losses)
    assert engine.losses("double-3") == pytest.approx(engine.losses("double-1"), rel=1e-12)

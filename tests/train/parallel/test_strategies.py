"""Every way to spread a model trains the same run, survives the same deaths, and reads the others' checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tasks import TASKS
from tests.train.tiers import later
from tests.train.training import OWN_OPTIMIZER, assert_same_training, sample_of
from train.build.optimizer import make_optimizer, takes_fused
from train.config import Config, Optim, Parallel, check_flags
from train.errors import Refused

pytestmark = pytest.mark.never_forgiven

EXACT = {"precision": "fp64"}
FSDP = {"parallel__strategy": "fsdp", "parallel__wrap": "Linear"}
"""Units of one layer each: with `auto` so small a model would be one."""
ORDERED = {"parallel__reduce": "ordered"}
HSDP = {"parallel__strategy": "hsdp", "parallel__shard_size": 2}
ODD = {
    "task": TASKS / "odd_models.py", **EXACT, **OWN_OPTIMIZER, "batch_size": 6, "micro_batch_size": 2, "steps": 10,
    "schedule__decay": "constant",
}  # fmt: skip
"""Three micro batches a step, two in the short one; the rate does not depend on the last step."""


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(3, FSDP), (4, HSDP), *later((2, FSDP), (4, FSDP), (3, FSDP | {"parallel__wrap": "auto"}), (2, HSDP))],
    ids=["fsdp3", "hsdp4", "fsdp2", "fsdp4", "one-unit3", "hsdp2"],
)
def test_a_spread_model_trains_as_one_process_does(steady: Any, ranks: int, flags: dict[str, Any]) -> None:
    name = f"{flags['parallel__strategy']}{ranks}{flags.get('parallel__wrap', '')}"
    steady.run(name, ranks, **EXACT, **flags)
    assert_same_training(steady, name)


@pytest.mark.parametrize(
    ("ranks", "flags"), [(3, FSDP), *later((2, FSDP), (2, HSDP), (4, HSDP))], ids=["fsdp3", "fsdp2", "hsdp2", "hsdp4"]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_in_other_precisions_too_the_first_losses_are_those_of_one_process(
    engine: Any, ranks: int, flags: dict[str, Any], precision: str
) -> None:
    # gloo adds where FSDP asks for a mean of float32: without another word all gradients would be larger
    if not (engine.station.runs / f"first-{precision}").exists():
        engine.run(f"first-{precision}", 1, precision=precision, steps=5)
    name = f"first-{precision}-{flags['parallel__strategy']}{ranks}"
    engine.run(name, ranks, precision=precision, steps=5, **flags)
    # the order of a sum over three ranks is another: half a bit of bf16 then falls to the other side, in ddp too
    rel = {"fp32": 1e-5, "bf16": 1e-3}[precision]
    assert engine.losses(name) == pytest.approx(engine.losses(f"first-{precision}"), rel=rel)


@pytest.mark.parametrize(("ranks", "flags"), [(3, FSDP), (4, HSDP)], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize(("optimizer", "precision"), [("adamw", "fp32"), *later(("sgd", "fp32"), ("adamw", "bf16"))])
def test_stopped_and_killed_it_ends_bit_for_bit_as_undisturbed(
    engine: Any, ranks: int, flags: dict[str, Any], optimizer: str, precision: str
) -> None:
    kind = f"{flags['parallel__strategy']}-{precision}"
    flags = flags | {"optim__name": optimizer, "optim__lr": 0.01, "task__dropout": 0.3, "precision": precision}
    if precision == "bf16":
        flags["task__batchnorm"] = "true"  # whose weights stay in fp32
    engine.run(f"{kind}-{optimizer}-whole", ranks, **flags)
    name = f"{kind}-{optimizer}-disturbed"
    assert engine.run(name, ranks, ["2 1 SIGTERM"], **flags)["state"] == "stopped"
    assert engine.resume(name, ranks, ["3 2 SIGKILL"])["state"] == "interrupted"
    assert engine.resume(name, ranks)["state"] == "finished", engine.said(name)
    assert engine.outcome(name) == engine.outcome(f"{kind}-{optimizer}-whole")


def test_a_run_moves_between_strategies_and_world_sizes_in_the_middle_of_an_epoch(engine: Any) -> None:
    flags = EXACT | {"optim__name": "adamw", "optim__lr": 0.01}
    engine.run("adam-one", 1, **flags)
    name = "moving-strategies"
    engine.run(name, 2, ["3 0 SIGTERM"], parallel__strategy="ddp", **flags)
    engine.resume(name, 3, ["2 1 SIGTERM"], parallel__strategy="fsdp", parallel__wrap="Linear")
    engine.resume(name, 4, ["2 1 SIGTERM"], parallel__wrap="auto", **HSDP)
    engine.resume(name, 1, parallel__strategy="auto", parallel__shard_size="none")
    assert [attempt["world_size"] for attempt in engine.station.record(name)["attempts"]] == [2, 3, 4, 1]
    assert_same_training(engine, name, "adam-one")


def test_ranks_without_data_compute_on_others_and_change_nothing(steady: Any) -> None:
    steady.run("wide-fsdp", 2, ["2 0 SIGTERM"], **EXACT, **FSDP)
    steady.resume("wide-fsdp", 5)  # four micro batches a step, two in the short one
    assert_same_training(steady, "wide-fsdp")


def test_a_loss_with_counts_clipping_and_tied_weights_are_the_same_when_spread(engine: Any) -> None:
    flags = EXACT | {"task__counted": "true", "clip_grad_norm": 0.2, "task__tied": "true"}
    engine.run("counted-1", 1, **flags)
    engine.run("counted-fsdp", 3, **flags, **FSDP)
    assert_same_training(engine, "counted-fsdp", "counted-1")


@pytest.mark.parametrize(("ranks", "flags"), [(3, {}), (3, FSDP)], ids=["ddp3 with a rank without data", "fsdp3"])
def test_weight_decay_leaves_alone_what_no_rank_used_in_a_step(engine: Any, ranks: int, flags: dict[str, Any]) -> None:
    # with this seed one rank uses it in the second step; fsdp needs all to do the same, and with seed 0 none does
    both = ODD | {"task__kind": "optional", "task__optimizer": "AdamW", "seed": 0 if flags else 1}
    alone = f"optional-1-{both['seed']}"
    if not (engine.station.runs / alone).exists():
        engine.run(alone, 1, **both)
    name = f"optional-{flags.get('parallel__strategy', 'ddp')}{ranks}"
    engine.run(name, ranks, **both, **(flags or {"parallel__find_unused_parameters": "true"}))
    assert_same_training(engine, name, alone)


@pytest.mark.parametrize(
    ("kind", "ranks", "flags"),
    [("teacher", 3, {}), ("moved", 1, {}), *later(("teacher", 3, FSDP))],
    ids=["ddp", "past torch's count of changes", "fsdp"],
)
def test_a_parameter_that_a_forward_updates_ends_the_run_with_a_line(
    engine: Any, kind: str, ranks: int, flags: dict[str, Any]
) -> None:
    name = f"{kind}-{ranks}-{len(flags)}"
    record = engine.run(name, ranks, **ODD | {"task__kind": kind} | flags)
    assert record["state"] == "failed" and "changes its parameter teacher.weight in its forward" in record["reason"]
    assert "after_step" in record["reason"]
    assert len(engine.losses(name)) == (kind == "moved")  # it begins as the weights that it follows


def test_weights_that_a_forward_keeps_to_a_norm_are_refused(engine: Any) -> None:
    with pytest.raises(Refused, match="has max_norm, so each rank would change the weights differently"):
        engine.run("never", 1, **ODD, task__kind="normed")


@pytest.mark.parametrize("flags", [FSDP, *later({})], ids=["fsdp", "ddp"])
def test_averages_that_a_hook_of_the_optimizer_makes_are_no_forwards(engine: Any, flags: dict[str, Any]) -> None:
    name = f"averaged-{'-'.join(map(str, flags.values()))}"
    both = ODD | {"task__kind": "averaged", "checkpoint__every_steps": 4} | flags
    assert engine.run(name, 2, **both)["state"] == "finished", engine.said(name)
    engine.run(f"{name}-stopped", 2, ["5 0 SIGTERM"], **both)
    engine.resume(f"{name}-stopped", 2)
    assert engine.outcome(f"{name}-stopped") == engine.outcome(name)


def test_weights_that_may_not_be_finite_are_those_that_nothing_trains(engine: Any) -> None:
    assert engine.run("masked", 1, **ODD | {"task__kind": "masked", "steps": 3})["state"] == "finished"


def test_a_parameter_that_is_to_be_trained_later_ends_the_run_with_a_line(engine: Any) -> None:
    record = engine.run("unfrozen", 1, **ODD | {"task__kind": "unfrozen"})
    assert "warning: the model counts in calls, a plain attribute" in engine.said("unfrozen")
    assert record["state"] == "failed" and "that model() froze is to be trained now" in record["reason"], record


def test_a_model_whose_state_grows_in_its_first_step_fails_with_a_line(engine: Any) -> None:
    record = engine.run("late", 1, **ODD, task__kind="late")
    assert record["state"] == "failed" and "the model added center to its state in its first steps" in record["reason"]


@pytest.mark.parametrize("kind", ["penalised", "methods"])
def test_a_loss_may_do_with_the_model_of_several_ranks_what_it_does_with_it_on_one(engine: Any, kind: str) -> None:
    for ranks in (1, 3):  # of three, one has no data in the last step
        engine.run(f"{kind}-{ranks}", ranks, **ODD, task__kind=kind)
        assert_same_training(engine, f"{kind}-{ranks}", f"{kind}-1")


def test_a_parameter_that_no_step_has_used_does_not_keep_a_run_from_going_on(engine: Any) -> None:
    # Adam has no state for it
    both = ODD | FSDP | {"task__kind": "optional", "task__optimizer": "AdamW"}
    engine.run("unused", 2, **both)
    engine.run("unused-parts", 2, **both | {"steps": 2})
    engine.resume("unused-parts", 2, steps=10)
    assert engine.outcome("unused-parts") == engine.outcome("unused")


def test_a_step_that_ddp_did_not_add_up_is_never_saved(engine: Any) -> None:
    # torch complains at the next forward; after the last step there is none
    record = engine.run("not-added", 2, **ODD | {"task__kind": "optional", "steps": 1})
    assert record["state"] == "failed" and not list(engine.station.run("not-added").steps_saved())
    assert "gave extra.weight, extra.bias none; use find_unused_parameters=True (of a task" in record["reason"]
    assert engine.resume("not-added", 2, parallel__find_unused_parameters="true")["state"] == "finished"
    # used by a micro batch before the last one of a rank: its gradient is there, and yet it was not reduced
    first = {"task__kind": "optional", "batch_size": 22, "micro_batch_size": 1}
    for steps in (1, 2):
        record = engine.run(f"used-before-{steps}", 2, **ODD | first | {"steps": steps})
        assert record["state"] == "failed" and "find_unused_parameters true" in record["reason"], record["reason"]


def test_buffers_that_a_forward_assigns_anew_are_those_of_the_model(engine: Any) -> None:
    flags = ODD | {"task__kind": "assigned"}
    told = engine.run("assigned", 2, **flags)["not_exact"]
    assert len(told) == 1 and "another value in the buffer mean" in told[0]
    engine.run("assigned-parts", 2, **flags | {"steps": 3})
    engine.resume("assigned-parts", 2, steps=10)
    assert engine.outcome("assigned-parts") == engine.outcome("assigned")
    one, two = (engine.run(f"assigned-ordered-{ranks}", ranks, **flags, **ORDERED) for ranks in (1, 2))
    assert one["weights_sha256"] == two["weights_sha256"]
    assert not one["not_exact"]


def test_a_buffer_that_no_checkpoint_could_be_read_into_is_named(engine: Any) -> None:
    record = engine.run("growing", 1, **ODD, task__kind="growing")
    assert "the buffer mean of the model was float64 (8,) and is float64 (16,) after a step" in record["reason"]


def test_an_optimizer_of_the_tasks_own_goes_on_with_the_same_bits(engine: Any) -> None:
    # NAdam keeps numbers of fp32 beside weights of fp64; an empty group is easily made, of a model without biases, say
    flags = ODD | {"task__optimizer": "NAdam"}
    engine.run("own-optimizer", 1, **flags)
    engine.run("own-optimizer-parts", 1, **flags | {"steps": 3})
    engine.resume("own-optimizer-parts", 1, steps=10)
    assert engine.outcome("own-optimizer-parts") == engine.outcome("own-optimizer")


def test_weights_of_complex_numbers_stay_complex_in_fp64(engine: Any) -> None:
    assert engine.run("complex", 1, **ODD, task__kind="complex")["state"] == "finished", engine.said("complex")
    assert engine.weights("complex")["turn"].is_complex()


def test_a_weight_that_is_not_finite_is_found_on_whatever_rank_it_lies(engine: Any) -> None:
    # the loss of the first step is finite, the step that its gradient asks for is not
    flags = {"task__poison": sample_of(1), "task__poison_value": 1e-30, "optim__lr": 1e12, "checkpoint__every_steps": 1}
    record = engine.run("poisoned-fsdp", 3, **FSDP, **flags)
    assert record["state"] == "failed" and "is not finite after step" in record["reason"], record["reason"]


@pytest.mark.minutes
def test_computing_activations_again_gives_the_same_bits_also_where_the_model_is_spread(engine: Any) -> None:
    with pytest.raises(Refused, match=r"parallel\.wrap ,: names no class"):
        engine.run("never", 2, parallel__strategy="fsdp", parallel__wrap=",")
    with pytest.raises(Refused, match=r"parallel\.recompute Lineal: the model has no module of that class"):
        engine.run("never", 1, parallel__recompute="Lineal")
    flags = FSDP | {"optim__name": "adamw", "optim__lr": 0.01}
    for name, more in (("kept", {}), ("again", {"parallel__recompute": "Linear"})):
        engine.run(f"{name}-1", 1, optim__name="adamw", optim__lr=0.01, **more)
        engine.run(f"{name}-fsdp", 3, **flags, **more)
    assert engine.outcome("again-1") == engine.outcome("kept-1")
    assert engine.outcome("again-fsdp") == engine.outcome("kept-fsdp")


def test_a_module_with_running_statistics_is_not_computed_twice(engine: Any) -> None:
    with pytest.raises(Refused, match="BatchNorm1d, whose running statistics would count every batch twice"):
        engine.run("never", 1, task__batchnorm="true", parallel__recompute="BatchNorm1d")


def with_model(engine: Any, folder: Path, line: str) -> Path:
    """The engine's task whose `model` is changed by one line more."""
    task = folder / "task.py"
    changed = f"\n\n_plain = model\n\n\ndef model(config):\n    model = _plain(config)\n    {line}\n    return model\n"
    task.write_text(engine.task.read_text() + changed)
    return task


MODELS = {
    "a scalar": ("fsdp", "model.s = nn.Parameter(torch.tensor(1.0))", "cannot spread s, because it has no dimension"),
    "turned": ("fsdp", "model.s = nn.Parameter(torch.ones(2, 3).t())", "cannot spread s, because it is not contiguous"),
    "two types": ("fsdp", "model.leave.double()", "cannot gather enter.weight and leave.weight together"),
    "complex": ("ddp", "model.s = nn.Parameter(torch.ones(2) * 1j)", "cannot add the complex gradient of s"),
    "sparse": ("ddp", "model.s = nn.Embedding(2, 2, sparse=True)", r"cannot add the sparse gradients of s \(Embedding"),
}


@pytest.mark.parametrize("what", MODELS)
def test_a_model_that_ranks_cannot_share_is_refused_by_the_parameter(engine: Any, tmp_path: Path, what: str) -> None:
    strategy, line, words = MODELS[what]
    with pytest.raises(Refused, match=words):
        engine.run("never", 2, task=with_model(engine, tmp_path, line), parallel__strategy=strategy)


def test_a_resume_on_more_ranks_than_can_add_its_gradients_is_refused_and_on_one_goes_on(
    engine: Any, tmp_path: Path
) -> None:
    task = with_model(engine, tmp_path, "model.s = nn.Parameter(1j * torch.ones(2))")
    assert engine.run("complex-alone", 1, ["2 0 SIGTERM"], task=task)["state"] == "stopped"
    with pytest.raises(Refused, match="complex gradient of s"):
        engine.resume("complex-alone", 2)
    assert engine.resume("complex-alone", 1)["state"] == "finished"


def _optimizer(make: Any) -> Any:
    return SimpleNamespace(optimizer=lambda model, config: make(model), param_groups=None, file="task.py")


def test_an_optimizer_of_more_than_the_model_or_without_a_rate_is_refused() -> None:
    centers = torch.nn.Parameter(torch.zeros(2))
    model = torch.nn.Linear(2, 2)
    for make, words in (
        (lambda model: torch.optim.SGD([*model.parameters(), centers]), "parameters that are not the model's"),
        (lambda model: torch.optim.Optimizer(model.parameters(), {"lr": None}), "has a group with lr None"),
    ):
        with pytest.raises(Refused, match=words):
            make_optimizer(_optimizer(make), model, Config())


def test_an_optimizer_that_computes_the_loss_by_itself_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(Refused, match=r"returns a LBFGS, which needs the loss several times .*: a session can"):
        make_optimizer(_optimizer(lambda model: torch.optim.LBFGS(model.parameters())), model, Config())
    with pytest.raises(Refused, match=r"optim.name .*several times .*: a session can \(docs/sessions.md\)$"):
        check_flags({"optim.name": "LBFGS"})


@pytest.fixture(scope="module")
def stopped(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The engine with `waiting` in it: a run of ddp on two ranks, one of whose weights is of another type."""
    line = "model.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))"
    task = with_model(engine, tmp_path_factory.mktemp("task"), line)
    flags = {"task__batchnorm": "true", "parallel__find_unused_parameters": "true"}
    assert engine.run("waiting", 2, ["2 0 SIGTERM"], task=task, **flags)["state"] == "stopped"
    return engine


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--parallel.strategy", "fsdp", "--parallel.wrap", "Lineal"], "no module of that class; it has BatchNorm1d,"),
        (["--parallel.strategy", "hsdp", "--parallel.shard_size", "2"], "cannot gather scale and"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_resume_that_this_model_cannot_do_is_refused_before_a_rank_begins(
    stopped: Any, flags: list[str], words: str
) -> None:
    run = stopped.station.run("waiting")
    before = {name: (run.folder / name).read_bytes() for name in ("run.json", "config.toml")}
    # what a run has of ddp's own has to go with it
    done = stopped.station("resume", "waiting", "--parallel.find_unused_parameters", "false", *flags)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.count("\n") == 1 and words in done.stderr, done.stderr
    assert {name: (run.folder / name).read_bytes() for name in before} == before


@pytest.mark.parametrize(
    ("ranks", "flags", "words"),
    [
        (2, {"parallel.strategy": "fsdp", "parallel.reduce": "ordered"}, "is for single and ddp, not fsdp"),
        (3, {"parallel.strategy": "hsdp", "parallel.shard_size": "2"}, "does not divide the 3 ranks"),
        (2, {"parallel.strategy": "hsdp"}, "needs --parallel.shard_size"),
        (2, {"parallel.strategy": "fsdp", "parallel.shard_size": "2"}, "is for hsdp"),
        (2, {"parallel.strategy": "fsdp", "parallel.wrap": "Block"}, "has no module of that class; it has"),
        (2, {"parallel.strategy": "ddp", "parallel.wrap": "Linear"}, "is for fsdp and hsdp"),
        (2, {"parallel.strategy": "fsdp", "data.on_error": "skip"}, "skip may leave a rank without a sample"),
        (2, {"sync_batchnorm": "true", "data.on_error": "skip"}, "skip may leave a rank without one"),
        (2, {"parallel.strategy": "fsdp", "parallel.find_unused_parameters": "true"}, "is for ddp"),
    ],
)
def test_what_these_ranks_cannot_do_is_refused_in_a_line(
    engine: Any, ranks: int, flags: dict[str, str], words: str
) -> None:
    with pytest.raises(Refused, match=words):
        engine.run("never", ranks, **{key.replace(".", "__"): value for key, value in flags.items()})
    assert not (engine.station.runs / "never").exists()


@pytest.mark.parametrize("name", ["Adafactor", "Rprop"])
def test_an_optimizer_that_needs_whole_parameters_is_refused_where_they_are_spread(name: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizers: Any = SimpleNamespace(
        optimizer=lambda model, config: getattr(torch.optim, name)(model.parameters()),
        param_groups=None,
        file="task.py",
    )
    for strategy in ("fsdp", "hsdp"):
        with pytest.raises(Refused, match=f"{name} needs whole parameters"):
            make_optimizer(optimizers, model, Config(parallel=Parallel(strategy=strategy)))
    assert isinstance(make_optimizer(optimizers, model, Config()), getattr(torch.optim, name))


@pytest.mark.parametrize(
    ("name", "strategy", "dtype", "fused"),
    [
        ("adamw", "ddp", torch.float32, True),
        ("adamw", "fsdp", torch.bfloat16, True),
        ("sgd", "single", torch.float64, True),
        ("sgd", "hsdp", torch.float32, False),
        ("sgd", "ddp", torch.complex64, False),
        ("adamw", "single", torch.complex128, False),
    ],
)
def test_an_optimizer_is_fused_on_a_gpu_where_torch_can(name: Any, strategy: Any, dtype: Any, fused: bool) -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, dtype=dtype))]
    config = Config(optim=Optim(name=name), parallel=Parallel(strategy=strategy))
    assert takes_fused(parameters, config) is fused

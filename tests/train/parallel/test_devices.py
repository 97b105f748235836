"""Where a run computes is settled at its launch, on cards that torch has kernels for; and what NCCL needs there.

GPUs that are gone are waited for, and not replaced in silence.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.specs import with_spec
from tests.train.training import Engine
from train import programs
from train.build import cores
from train.config import Config
from train.errors import Refused
from train.gpus import Card
from train.launcher import checks
from train.launcher.foreground import shape
from train.launcher.request import Plan, Request
from train.parallel.devices import (
    NoGPU,
    check_kernels,
    grows_segments,
    has_kernels,
    pick_device,
    prepare_nccl,
)  # fmt: skip
from train.parallel.precision import Precision
from train.parallel.rank_env import RankEnv
from train.parallel.torch_private import limit_compile_threads
from train.run import ownership, provenance
from train.run.outcome import Kind, Outcome, read_all
from train.supervise.decide import Facts, LaunchMode, decide
from train.trainer.evaluate import evaluate_run

WHEEL = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
"""What the wheel of torch 2.7.1 with CUDA 12.6 has."""


def settings(engine: Engine, name: str) -> dict[str, Any]:
    return tomllib.loads((engine.station.run(name).folder / "config.toml").read_text())


def move(engine: Engine, name: str) -> None:
    """Make a run one that was launched where there were GPUs."""
    run = engine.station.run(name)
    file = run.folder / "config.toml"
    text = file.read_text()
    assert 'device = "cpu"' in text
    file.write_text(text.replace('device = "cpu"', 'device = "cuda"'))
    run.update(**ownership.sign(run.folder, run.read()))


@pytest.fixture
def stopped(engine: Engine, request: pytest.FixtureRequest) -> str:
    """A run of GPUs that are gone, stopped in the middle."""
    name = request.node.name.replace("_", "-")[:60]
    assert engine.run(name, script=["4 0 SIGTERM"])["state"] == "stopped"
    assert settings(engine, name)["device"] == "cpu"  # auto was asked for: what it meant is written down
    move(engine, name)
    return name


def test_a_resume_by_hand_is_refused_with_what_to_do(engine: Engine, stopped: str) -> None:
    with pytest.raises(NoGPU) as refused:
        engine.resume(stopped)
    assert f"train resume {stopped} --device cpu" in str(refused.value) and "\n" not in str(refused.value)
    assert engine.station.record(stopped)["state"] == "stopped"


def test_its_user_may_move_it_to_the_cpu(engine: Engine, stopped: str) -> None:
    assert engine.resume(stopped, device="cpu")["state"] == "finished"
    assert settings(engine, stopped)["device"] == "cpu"


def test_auto_is_settled_again_when_a_resume_asks_for_it(engine: Engine, stopped: str) -> None:
    assert engine.resume(stopped, device="auto")["state"] == "finished"
    assert settings(engine, stopped)["device"] == "cpu"


def test_ranks_that_find_no_gpu_leave_the_run_to_be_resumed(engine: Engine, stopped: str) -> None:
    run = engine.station.run(stopped)
    record = engine.train_run(run, 1, ())
    assert record["state"] == "interrupted"
    end = read_all(run.logs(len(record["attempts"])))[0]
    assert end.kind is Kind.DIED and not end.recurs and "No CUDA GPUs are available" in end.reason


def test_an_agent_does_not_start_it_again_and_again() -> None:
    end = Outcome(
        rank=0, kind=Kind.DIED, reason="RuntimeError: No CUDA GPUs are available: a computes on GPUs", recurs=False
    )
    facts = Facts("a", LaunchMode.LAUNCHED, programs.TASK, outcomes={0: end}, deaths=3, max_restarts=3)
    decision = decide(facts)
    assert (decision.end, decision.state, decision.again) == ("died", None, False)
    assert "a keeper" in str(decision.reason) and "train resume a" in str(decision.reason)


def test_an_evaluation_goes_where_there_is_something_to_compute_on(engine: Engine, stopped: str) -> None:
    assert evaluate_run(*with_spec(engine.station.run(stopped)), None)[1] == 23


def test_on_a_gpu_loader_processes_follow_cores_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, host = torch.device("cuda", 0), torch.device("cpu")
    monkeypatch.setattr(cores, "per_rank", lambda ranks: 16 // ranks)
    assert [cores.default_loaders(ranks, gpu, False) for ranks in (1, 2, 4, 8, 16)] == [8, 7, 3, 1, 1]
    assert cores.default_loaders(1, host, False) == cores.default_loaders(1, gpu, True) == 0


def test_what_was_chosen_is_written_down(engine: Engine, stopped: str) -> None:
    assert settings(engine, stopped)["data"]["workers"] == 0


def test_too_many_ranks_for_the_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device(Config(), 2, 1) == torch.device("cuda", 1)
    with pytest.raises(Refused, match="use --nproc 2"):
        pick_device(Config(), 3, 0)


def test_ranks_that_torchrun_starts_on_several_machines_need_the_gpus_of_theirs_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    flags = {"cpu_threads": "1", "data.workers": "0", "steps": "1", "task.count": "8", "batch_size": "8"}

    def prepared(rank_env: RankEnv) -> Plan:
        ranks, nodes = shape(rank_env)
        return checks.prepare(Request("fake", flags=dict(flags)), ranks=ranks, nodes=nodes)

    two_machines = prepared(RankEnv(rank=0, size=4, local_rank=0, local_size=2))
    assert two_machines.config.device == "cuda"
    assert (two_machines.record["world_size"], two_machines.config.micro_batch_size) == (4, 2)
    assert prepared(RankEnv(rank=0, size=2, local_rank=0, local_size=2)).record["world_size"] == 2
    with pytest.raises(Refused, match="use --nproc 2"):  # one machine; and those that differ count as one
        prepared(RankEnv(rank=0, size=3, local_rank=0, local_size=3))
    assert shape(RankEnv(rank=0, size=5, local_rank=0, local_size=3)) == (5, range(1, 2))


def test_on_the_cpu_a_save_touches_no_device(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has GPUs and a run does not use them, nothing may open one: it would hold memory there."""
    from train.checkpoint.save import Saver
    from train.checkpoint.state_dict import TrainState
    from train.parallel.world import World
    from train.run.folders import create
    from train.run.run_folder import Run

    def opened() -> None:
        raise AssertionError("a device was opened")

    run: Run = create(tmp_path, "a", files={}, record={})
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", opened)
    saver = Saver(
        run,
        World(0, size=1, local_rank=0, device=torch.device("cpu")),
        config=Config(),
        attempt=1,
        saved=lambda step: None,
    )
    state = TrainState(module=model, optimizer=optimizer, precision=Precision("fp32", torch.device("cpu")))
    saver.prepare(state)
    saver.save(3, state, {})
    saver.wait()
    saver.close()  # its thread would count as one of a task that another test checks
    assert run.steps_saved() == [3]
    assert provenance.versions()["gpu"] == "none"


@pytest.mark.parametrize(
    ("capability", "architectures", "known"),
    [
        ((9, 0), WHEEL, True),
        ((8, 9), WHEEL, True),  # code of the same major version, and an older minor one
        ((8, 7), ("sm_89",), False),
        ((10, 0), WHEEL, False),
        ((12, 0), WHEEL, False),
        ((12, 0), (*WHEEL, "compute_90"), True),  # PTX is compiled there
        ((9, 0), ("compute_100",), False),
        ((9, 0), ("sm_90a",), True),
        ((10, 0), ("sm_90a", "compute_90a"), False),
        ((10, 3), ("sm_100", "sm_120"), True),
        ((12, 1), ("sm_75", "sm_100", "sm_120"), True),
    ],
)
def test_what_code_runs_where(capability: tuple[int, int], architectures: tuple[str, ...], known: bool) -> None:
    assert has_kernels(capability, architectures) is known


def test_a_refusal_names_the_card_and_what_to_do() -> None:
    old, new = Card("NVIDIA H100", (9, 0)), Card("NVIDIA B200", (10, 0))
    with pytest.raises(Refused) as refused:
        check_kernels([new], WHEEL)
    for words in ("NVIDIA B200", "10.0", "sm_90", "--device cpu", "built for it"):
        assert words in str(refused.value)
    check_kernels([new, old], WHEEL)  # ranks look at their own
    check_kernels([], WHEEL)
    check_kernels([new], ())  # a torch without CUDA says nothing of cards


@pytest.mark.parametrize(
    ("environ", "kernel", "grows"),
    [
        ({}, "6.8.0-71-generic", True),
        ({"CUDA_VISIBLE_DEVICES": "GPU-89aaf937"}, "6.8.0-71-generic", True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "6.8.0-71-generic", False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "6.8.0-71-generic", False),
        ({"CUDA_VISIBLE_DEVICES": "MIG-5c89852c-d268-c3f3"}, "6.8.0-71-generic", False),
        ({}, "5.15.153.1-microsoft-standard-WSL2", False),
        ({}, "5.15.148-tegra", False),
    ],
)
def test_segments_grow_where_they_can_and_nobody_has_set_the_allocator(
    environ: dict[str, str], kernel: str, grows: bool
) -> None:
    assert grows_segments(environ, kernel) is grows


def test_ranks_share_the_cores_for_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config as inductor

    with inductor.patch(compile_threads=7):  # monkeypatch would remove the field at the end: it is in no __dict__
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "5")
        limit_compile_threads(2)
        assert (os.environ["TORCHINDUCTOR_COMPILE_THREADS"], inductor.compile_threads) == ("5", 7)
        monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
        limit_compile_threads(2)
        assert (os.environ.pop("TORCHINDUCTOR_COMPILE_THREADS"), inductor.compile_threads) == ("2", 2)


def test_a_fork_that_cannot_use_a_gpu_any_more_is_found_before_ranks_are(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert checks.prepare(Request(task=str(engine.task), flags={"batch_size": "16"})).config.device == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Refused, match="has asked CUDA for GPUs, and its forks cannot use them; find what Python"):
        checks.prepare(Request(task=str(engine.task), flags={"batch_size": "16"}))


def test_what_the_user_has_set_for_nccl_stays() -> None:
    environ = {"NCCL_NVLS_ENABLE": "1"}
    prepare_nccl(True, environ)
    assert environ == {"NCCL_NVLS_ENABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0"}


def test_the_switch_adds_only_where_no_order_is_wanted() -> None:
    for deterministic in (False, True):
        environ: dict[str, str] = {}
        prepare_nccl(deterministic, environ)
        assert ("NCCL_NVLS_ENABLE" in environ) is deterministic

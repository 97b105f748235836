"""What `--compile` compiles: the whole model, or each block by itself. The backend counts graphs instead of building
them, because a C compiler takes seconds."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from train.config import Config, Parallel
from train.errors import Refused, TrainingFailed
from train.parallel.compiling import Compiling, compile_as_asked
from train.parallel.torch_private import fix_compiler
from train.parallel.wrap_units import recompute, wrapped
from train.run.heartbeat import Heart

pytestmark = pytest.mark.never_forgiven


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.drop(torch.tanh(self.second(torch.tanh(self.first(values)))))


class Net(nn.Module):
    def __init__(self, blocks: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([blocks() for _ in range(3)])

    def forward(self, values: Tensor) -> Tensor:
        values = self.enter(values)
        for block in self.blocks:
            values = block(values)
        return values


Graphs = list[int]
"""The number of matrix products in each graph that was compiled."""


def counting(graphs: Graphs) -> Any:
    def backend(graph: Any, _: Any) -> Any:
        graphs.append(sum("linear" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    return functools.partial(torch.compile, backend=backend)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    torch.compiler.reset()
    found: Graphs = []
    monkeypatch.setattr(torch, "compile", counting(found))
    fix_compiler(compiles=False, deterministic=True)
    yield found
    torch.compiler.reset()


def trained(model: nn.Module, passes: int = 1) -> list[Tensor]:
    """The gradients of a model after so many passes with the same dropout."""
    points = torch.linspace(-1, 1, 12).view(3, 4)
    for _ in range(passes):
        torch.manual_seed(5)
        model(points).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def made(compile: Any, blocks: Callable[[], nn.Module] = Block, again: str = "", wrap: str = "auto") -> nn.Module:
    torch.manual_seed(3)
    model = Net(blocks)
    compile_as_asked(model, Config(compile=compile, parallel=Parallel(wrap=wrap)))
    recompute(model, again)
    return model


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_the_whole_model_is_one_graph(graphs: Graphs) -> None:
    assert_equal(trained(made(True)), trained(made(False)))
    assert graphs == [7]


def test_a_sequential_of_torchs_own_parts_is_compiled_too(graphs: Graphs) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    compile_as_asked(model, Config(compile=True))
    trained(model)
    assert graphs == [2]


@pytest.mark.parametrize("blocks", [Block, layer])
def test_blocks_share_a_graph_and_what_is_outside_of_them_is_not_compiled(graphs: Graphs, blocks: Any) -> None:
    model = made("blocks", blocks)
    model.enter.requires_grad_(False)  # type: ignore[union-attr] # else the first block is another case
    model.enter.bias.requires_grad_(True)  # type: ignore[union-attr]
    trained(model, passes=2)
    assert len(graphs) == 1


def test_blocks_give_the_gradients_of_the_same_model_not_compiled(graphs: Graphs) -> None:
    assert_equal(trained(made("blocks")), trained(made(False)))
    assert graphs == [2]


@pytest.mark.parametrize("again", ["Block", "Linear"])
def test_activations_that_are_computed_again_do_not_change_compiled_blocks(graphs: Graphs, again: str) -> None:
    assert_equal(trained(made("blocks", again=again)), trained(made(False)))
    assert graphs and (again == "Linear" or set(graphs) == {2})


def test_a_copy_computes_with_its_own_weights(graphs: Graphs) -> None:
    model = made("blocks")
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    before = model.eval()(torch.ones(2, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for one in copies:
        assert torch.equal(one.eval()(torch.ones(2, 4)), before) and before.any()
    assert graphs


class Stages(nn.Module):
    """As in many image models: stages that are no blocks themselves, and parts that only look like some."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block(), nn.Tanh()))
        self.ends = nn.ModuleDict({"a": nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))})
        self.one = nn.ModuleList([nn.Bilinear(2, 2, 2), Net()])


def test_blocks_are_the_repeated_modules_of_containers() -> None:
    config = Config(compile="blocks")
    model = Stages()
    inner = model.one[1]
    assert isinstance(inner, Net)
    assert wrapped(model, config) == [*model.stages[0], *list(model.stages[1])[:2], *inner.blocks]
    config.parallel.wrap = "Linear"
    assert all(isinstance(part, nn.Linear) for part in wrapped(model, config))
    shared = Block()
    assert wrapped(nn.Sequential(shared, shared), Config(compile="blocks")) == [shared]


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)])
def test_a_model_without_blocks_is_refused_with_the_remedy(model: nn.Module) -> None:
    with pytest.raises(Refused, match=r"no repeated blocks .* --parallel.wrap, or use --compile true"):
        compile_as_asked(model, Config(compile="blocks"))


def _sharded(folder: Path) -> None:
    """In a process of its own: the blocks of a model that fsdp has wrapped."""
    torch.set_num_threads(1)  # a fork has none of the threads of OpenMP, and would wait for them
    dist.init_process_group("gloo", f"file://{folder}/meet", world_size=1, rank=0)
    found: Graphs = []
    torch.compile = counting(found)
    grads = []
    for compile in (False, "blocks"):
        model = made(compile)
        for unit in [*wrapped(model, Config(compile="blocks")), model]:
            fully_shard(unit, reshard_after_forward=True)
        grads.append([grad.full_tensor() for grad in trained(model, passes=2)])  # type: ignore[attr-defined]
    assert_equal(*grads)
    (folder / "graphs").write_text(str(found))
    os._exit(0)


def test_a_block_that_fsdp_gathers_is_one_graph(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_sharded, args=(tmp_path,))
    process.start()
    process.join(240)
    graphs = [int(count) for count in (tmp_path / "graphs").read_text().strip("[]").split(",")]
    assert graphs and set(graphs) == {2}, "what fsdp does around a block is in its graph, or breaks it"
    assert len(graphs) <= 2, "blocks do not share their graph"


def test_compiling_is_shown_and_a_model_of_which_nothing_is_compiled_is_named(graphs: Graphs, tmp_path: Path) -> None:
    heart = Heart(tmp_path / "rank0.beat")
    phases: list[int] = []
    beat = heart.beat
    heart.beat = lambda phase, step: (phases.append(phase), beat(phase, step))[1]  # type: ignore[method-assign,func-returns-value]
    watch = Compiling(heart)
    model = made("blocks")
    with pytest.raises(TrainingFailed, match="--compile blocks compiled nothing, because the loss does not call"):
        watch.check(Config(compile="blocks"))
    watch.check(Config())
    trained(model)
    watch.check(Config(compile="blocks"))
    watch.close()
    assert phases[:2] == [6, 0] and set(phases) == {6, 0}
    count = len(phases)
    torch.compiler.reset()
    trained(model)
    assert len(phases) == count and graphs

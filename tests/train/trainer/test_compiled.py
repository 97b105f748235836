"""What a task compiles in place is trained compiled, and exactly; a wrapper is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file

from tests.train.tiers import later

pytestmark = pytest.mark.never_forgiven

if TYPE_CHECKING:
    from conftest import Station

TASK = """
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset


def backend(graph, inputs):
    shapes = [tuple(value.shape) for value in inputs if isinstance(value, torch.Tensor)]
    is_any = any(not isinstance(side, int) for shape in shapes for side in shape)
    print("compiled", "for any shape" if is_any else "for one", file=sys.stderr, flush=True)
    return graph.forward


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 2)
        COMPILED_PART

    def forward(self, points):
        return self.head(self.body(points))


def datasets(config):
    points = torch.randn(55, 4)
    return TensorDataset(points, (points[:, 0] > 0).long()), TensorDataset(points[:23], (points[:23, 0] > 0).long())


def model(config):
    net = Net()
    COMPILED_WHOLE


def loss(model, batch):
    if Path("kill-compiled").exists() and list(Path(__spec__.origin).parent.glob("checkpoints/step-*")):
        Path("kill-compiled").unlink()
        os.kill(int(os.environ["TRAIN_AGENT_PID"]), signal.SIGKILL)
        time.sleep(60)  # it takes its ranks with it
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
WAYS = {
    "plain": ("", "return net"),
    "whole": ("", "return torch.compile(net, backend=backend)"),
    "part": ("self.body = torch.compile(self.body, backend=backend)", "return net"),
    "place": ("", "net.compile(backend=backend)\n    return net"),
}
NAMES = {"body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "head.weight", "head.bias"}
FLAGS = [
    "--batch_size", 16, "--micro_batch_size", 16, "--cpu_threads", 1, "--steps", 18, "--checkpoint.every_steps", 5,
    "--log.tensorboard", "false", "--optim.lr", 0.05,
]  # fmt: skip


@pytest.fixture(scope="module")
def ways(shared_station: Station) -> Station:
    for way, (part, whole) in WAYS.items():
        text = TASK.replace("COMPILED_PART", part or "pass").replace("COMPILED_WHOLE", whole)
        (shared_station.folder / f"compiled_{way}.py").write_text(text)
    return shared_station


@pytest.mark.parametrize("way", ["whole", *later("part")])
def test_a_wrapper_that_gives_weights_other_names_is_refused(way: str, ways: Station) -> None:
    done = ways("run", f"compiled_{way}.py", "--name", "never", *FLAGS)
    assert done.returncode == 2 and "is wrapped by torch.compile" in done.stderr, done.stderr
    assert "use --compile true, or compile a module in place" in done.stderr
    assert not (ways.runs / "never").exists()


def test_what_a_task_compiles_in_place_has_a_graph_for_each_shape(ways: Station) -> None:
    name = "compiled-place"
    ways.ok("run", "compiled_place.py", "--name", name, *FLAGS)
    said = ways.logs(name) + ways("eval", name).stderr
    ways.ok("export", name, "--to", "place.safetensors")
    assert set(load_file(ways.folder / "place.safetensors")) == NAMES
    # weights go from one to the other
    ways.ok("run", "compiled_plain.py", "--name", f"{name}-plain", *FLAGS, "--init", "place.safetensors")
    assert "compiled for one" in said and "compiled for any" not in said
    assert ways.record(f"{name}-plain")["step"] == 18


@pytest.mark.minutes
def test_a_killed_run_of_a_model_compiled_in_place_ends_as_if_nothing_had_happened(ways: Station) -> None:
    ways.ok("launch", "compiled_place.py", "--name", "compiled-calm", *FLAGS, "--follow")
    (ways.folder / "kill-compiled").touch()
    ways.ok("launch", "compiled_place.py", "--name", "compiled-killed", *FLAGS)
    assert ways.wait_for_end("compiled-killed")["state"] == "interrupted", ways.logs("compiled-killed")
    ways.ok("resume", "compiled-killed", "--follow")
    assert "compiled for one" in ways.logs("compiled-killed")
    calm = ways.record("compiled-calm")
    assert ways.record("compiled-killed")["weights_sha256"] == calm["weights_sha256"]

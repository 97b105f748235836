"""What a launch tells about GPUs before ranks start is what they would meet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda import standin
from tests.cuda.conftest import GpuStation

pytestmark = [pytest.mark.minutes, pytest.mark.skipif(bool(standin.lacks()), reason=standin.lacks() or "no")]

COMPARED = """
import torch
from torch import nn
from torch.nn import functional as F
from train.launcher.deterministic import noting

torch.use_deterministic_algorithms(True)
def of(*shape):
    return lambda device: torch.zeros(shape, device=device, requires_grad=True)
def whole(*shape):
    return lambda device: torch.zeros(shape, device=device, dtype=torch.long)
line, plane, volume = of(2, 4, 8), of(2, 4, 8, 8), of(2, 4, 8, 8, 8)
cases = [(f"{kind.__name__}({size})", kind(size), x) for kind, x in (
    (nn.AdaptiveAvgPool1d, line), (nn.AdaptiveAvgPool2d, plane), (nn.AdaptiveAvgPool3d, volume),
    (nn.AdaptiveMaxPool1d, line), (nn.AdaptiveMaxPool2d, plane), (nn.AdaptiveMaxPool3d, volume),
    (nn.AvgPool1d, line), (nn.AvgPool2d, plane), (nn.AvgPool3d, volume),
    (nn.MaxPool1d, line), (nn.MaxPool2d, plane), (nn.MaxPool3d, volume),
    (nn.ReflectionPad1d, line), (nn.ReflectionPad2d, plane), (nn.ReflectionPad3d, volume),
    (nn.ReplicationPad1d, line), (nn.ReplicationPad2d, plane), (nn.ReplicationPad3d, volume),
) for size in (1, 2, 4)]
cases += [
    ("FractionalMaxPool2d", nn.FractionalMaxPool2d(2, output_size=3), plane),
    ("FractionalMaxPool3d", nn.FractionalMaxPool3d(2, output_size=3), volume),
    ("EmbeddingBag max", nn.EmbeddingBag(10, 4, mode="max"), whole(2, 3)),
    ("Embedding", nn.Embedding(10, 4), whole(2, 3)),
    ("AdaptiveAvgPool2d((None, 3))", nn.AdaptiveAvgPool2d((None, 3)), plane),
]
for mode, x in (("nearest", plane), ("linear", line), ("bilinear", plane), ("bicubic", plane), ("trilinear", volume)):
    cases.append((mode, nn.Upsample(scale_factor=2, mode=mode), x))
class Pixels(nn.Module):
    def __init__(self, reduction):
        super().__init__()
        self.reduction = reduction
    def forward(self, x):
        wanted = torch.zeros(2, 8, 8, dtype=torch.long, device=x.device)
        return F.cross_entropy(x, wanted, reduction=self.reduction)
class Unpool(nn.Module):
    def forward(self, x):
        return F.max_unpool2d(x, torch.zeros(x.shape, dtype=torch.long, device=x.device), 2)
cases += [(f"pixels {reduction}", Pixels(reduction), plane) for reduction in ("none", "mean", "sum")]
cases += [("MaxUnpool2d", Unpool(), plane)]
for name, module, x in cases:
    found, is_refused = [], False
    try:
        with noting(found):
            module.to("meta")(x("meta")).sum().backward()
    except NotImplementedError:
        pass  # torch has no shapes for its gradient
    try:
        torch.nn.Module.to_empty(module, device="cuda")(x("cuda")).sum().backward()
    except RuntimeError as error:
        assert "does not have a deterministic implementation" in str(error), (name, error)
        is_refused = True
    if bool(found) != is_refused:
        print(f"{name}: {'refused' if is_refused else 'not refused'}")
"""


def test_torch_refuses_what_the_launch_refuses_and_little_else() -> None:
    done = _run([sys.executable, "-c", COMPARED], {"PYTHONWARNINGS": "ignore"})
    assert done.stdout.splitlines() == ["FractionalMaxPool3d: refused", "EmbeddingBag max: refused"], done.stderr


GROWN = """
import torch
from train.parallel.devices import take_device
take_device(torch.device("cuda", 0))
held = [torch.zeros(size, device="cuda") for size in (10**7, 3 * 10**7)]
print({part["is_expandable"] for part in torch.cuda.memory_snapshot()})
"""


@pytest.mark.parametrize(("setting", "grows"), [(None, True), ("max_split_size_mb:64", False)])
def test_segments_of_memory_grow_in_a_process_that_loaded_torch_before(setting: str | None, grows: bool) -> None:
    environ = standin.environment(caching=True) | {"PYTHONPATH": str(Path(__file__).parents[2])}
    environ |= {"PYTORCH_CUDA_ALLOC_CONF": setting} if setting is not None else {}
    done = subprocess.run(
        [sys.executable, "-c", GROWN], env=os.environ | environ, capture_output=True, text=True, check=False
    )
    assert done.stdout == f"{{{grows}}}\n", done.stderr


def test_a_gpu_that_python_asks_for_at_its_start_is_told_before_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import torch\ntorch.cuda.is_available()\n")
    command = [sys.executable, "-m", "train", "run", "fake", "--batch_size", "4", "--steps", "2"]
    runs, path = tmp_path / "runs", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = _run(command, {"PYTHONPATH": path, "TRAIN_RUNS": str(runs), "TMPDIR": str(tmp_path)})
    assert done.returncode == 2 and not runs.exists()
    assert "has asked CUDA for GPUs, and its forks cannot use them; find what Python imports" in done.stderr


def test_the_lowest_card_of_a_run_chooses_tf32_or_fp32_and_a_cpu_goes_on_with_either(machine: GpuStation) -> None:
    machine.cards.write(1, name="Stand-in_T4", major=7, minor=5)
    flags = ["fake", "--batch_size", "4", "--steps", "3", "--checkpoint.every_steps", "1", "--log.tensorboard", "false"]
    machine.ok("run", *flags, "--name", "one")
    machine.ok("run", *flags, "--name", "two", "--spawn", "2")
    for name, chosen, said in (
        ("one", "tf32", "Stand-in H100 has compute capability 9.0; --precision bf16 is faster still"),
        ("two", "fp32", "Stand-in T4 has compute capability 7.5, and tf32 needs 8.0"),
    ):
        assert f'precision = "{chosen}"' in (machine.runs / name / "config.toml").read_text()
        assert f"precision {chosen}, because {said}" in machine.logs(name)
    machine.cards.keep()
    told = machine("resume", "one", "--steps", "4")
    assert told.returncode == 2 and "train resume one --device cpu" in told.stderr
    done = machine.ok("resume", "one", "--steps", "4", "--device", "cpu", "--follow")
    assert "precision tf32 needs a GPU, so this run computes in fp32 here" in done.stderr
    assert machine.record("one")["step"] == 4


def _run(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    root = {"PYTHONPATH": str(Path(__file__).parents[2])}
    environ = os.environ | standin.environment() | root | environ
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)

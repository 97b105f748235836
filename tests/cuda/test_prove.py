"""`train prove` on GPUs: what it starts on a real card starts here on the stand-in."""

from __future__ import annotations

import json

import pytest

from tests.cuda import standin
from tests.cuda.conftest import GpuStation

pytestmark = [pytest.mark.minutes, pytest.mark.skipif(bool(standin.lacks()), reason=standin.lacks() or "no")]

SCRIPT = """
import os

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import trainstation as ts

session = ts.session()
dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = session.loader(TensorDataset(torch.ones(64, 4)), batch_size=8, device=device)
session.register(model=model, optimizer=optimizer)
for epoch in session.epochs(20):
    for (x,) in loader:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
session.finish()
"""


@pytest.mark.parametrize("arguments", [
    ("digits", "--device", "cuda", "--nproc", "auto", "--task.width", 8),
    ("--script", "mine.py", "--nproc", 2),
])  # fmt: skip
def test_a_proof_on_gpus_breaks_the_run_off_and_compares_it(machine: GpuStation, arguments: tuple[object, ...]) -> None:
    (machine.folder / "mine.py").write_text(SCRIPT)
    done = machine("prove", *arguments, "--updates", 30, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["verdict"] == "EXACT" and len(found["breaks"]) == 4
    assert found["ranks"] == (4 if "auto" in arguments else 2)
    (folder,) = machine.runs.glob("prove-*")
    assert folder.joinpath("proof.json").exists()

"""A bug in an evaluation is told before the run is created, and nothing of that first look reaches the run."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.ports import free_port
from train.errors import Refused
from train.launcher import checks, first_look
from train.launcher.fork import prepare_fork
from train.launcher.request import Request

if TYPE_CHECKING:
    from conftest import Station

RESTLESS = """
import os
import random

import torch
from torch import nn

_counts = {"evaluated": 0}
_own = random.Random(1)
_tensors = torch.Generator().manual_seed(2)


def _change(model):  # all that a forward may change
    model.counted += 1
    model.seen.append(float(torch.rand(1)))
    model.noise = torch.rand(2, generator=_tensors)
    _counts["evaluated"] += 1
    _own.random()
    with open("pids", "a") as file:
        file.write(f"{os.getpid()}\\n")


class Points(torch.utils.data.Dataset):
    calls = 0

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.calls += 1
        return torch.tensor([index / 12, self.calls / 100, random.random()])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.seen = nn.Linear(3, 3), []
        self.norm = nn.BatchNorm1d(3, track_running_stats=True)
        self.register_buffer("counted", torch.zeros(()))
        self.register_buffer("noise", torch.zeros(2))

    def forward(self, points):
        if not self.training:
            _change(self)
            self.norm.momentum = 0.5
        return self.norm(self.line(points))


def datasets(config):
    points = Points()
    return points, points


def model(config):
    return Net()


def loss(model, batch):
    gone = model.counted + len(model.seen) + _counts["evaluated"] + model.noise.sum() + model.norm.momentum
    return (model(batch) - gone - _own.random()).square().mean()


def metrics(model, batch):
    return {"loss": loss(model, batch)}


def predict(model, batch):
    return {"y": model(batch)}


def compute_metrics(predictions):
    _counts["evaluated"] += 1
    return {"mean": predictions["y"].mean()}


def images(model, batch):
    model(batch)
    return {"one": torch.rand(3, 4, 4)}
"""
FLAGS = ["--steps", 3, "--batch_size", 4, "--eval.every_steps", 2, "--data.workers", 0, "--log.tensorboard", "false"]


def test_a_run_ends_as_if_nobody_had_looked_also_as_a_rank_of_torchrun(station: Station) -> None:
    (station.folder / "restless.py").write_text(RESTLESS)
    of_torchrun = {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    digests, processes = [], []
    looks: dict[str, tuple[list[str], dict[str, str]]] = {
        "looked": ([], {}),
        "not-looked": (["--eval.first", "false"], {}),
        "torchrun": ([], of_torchrun),
    }
    for name, (flags, env) in looks.items():
        station.ok("run", "restless.py", "--name", name, *FLAGS, *flags, env=env)
        digests.append(station.record(name)["weights_sha256"])
        processes.append(len({*(station.folder / "pids").read_text().split()}))
        (station.folder / "pids").unlink()
    assert processes == [2, 1, 2]  # the look is another process, even where the rank checks the run itself
    assert digests == [digests[0]] * 3
    assert [line.get("eval") for line in station.metrics("looked")] == [
        line.get("eval") for line in station.metrics("not-looked")
    ]


PLAIN = """
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset


def datasets(config):
    points = TensorDataset(torch.arange(12.0)[:, None])
    return points, {"val": points, "test": points}


def model(config):
    return nn.Linear(1, 1)


def loss(model, batch):
    return model(batch[0]).square().mean()

"""
METRICS = "def metrics(model, batch):\n    return {'m': "
PREDICT = "def predict(model, batch):\n    return {'y': model(batch[0])}\n"


def _prepared(folder: Path, text: str, ranks: int = 1, **flags: Any) -> list[str]:
    (folder / "plain.py").write_text(PLAIN + text)
    texts = {"batch_size": 4, "steps": 2} | {key.replace("__", "."): value for key, value in flags.items()}
    request = Request(str(folder / "plain.py"), flags={key: str(value) for key, value in texts.items()})
    return checks.prepare(request, ranks=ranks).warnings


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (METRICS + "typo}", r"plain.py, line 24: NameError: name 'typo' is not defined; did you .* \(set val\); "),
        (METRICS + "batch['x']}", r"line 24: TypeError: list indices must be integers"),
        (METRICS + "model(batch[0]) @ torch.ones(3)}", r"line 24: RuntimeError: .*size mismatch"),
        (METRICS + "model(batch[0])}", r"metric m in .*plain.py must return a scalar tensor"),
        (PREDICT.replace("}", "[:1]}") + "def compute_metrics(p):\n    return {}", "must give one y a sample"),
        (PREDICT + "def compute_metrics(p):\n    return p['y']", "compute_metrics in .* must return a dict of numbers"),
        ("def images(model, batch):\n    return [batch]", "images in .* must return a dict of pictures"),
        (METRICS + "exit(3)}", "SystemExit: 3"),
        ("_last = 10.0\n" + METRICS + "typo if batch[0].max() > _last else 1}", "NameError: name 'typo'"),
    ],
)  # fmt: skip
def test_a_bug_is_told_with_its_line(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(Refused, match=why) as caught:
        _prepared(tmp_path, text)
    assert "--eval.first false" in str(caught.value) and "\n" not in str(caught.value)
    _prepared(tmp_path, text, eval__first="false")


def test_what_may_pass_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = _prepared(tmp_path, PREDICT + "def compute_metrics(p):\n    raise ValueError('only one class')\n")
    assert [line for line in few if "line 26: ValueError: only one class" in line] == few[:2] == few
    (killed,) = _prepared(tmp_path, METRICS + "os.kill(os.getpid(), 11)}")
    assert killed == "the first look at the evaluation died of SIGSEGV; to launch without it: --eval.first false"
    assert "ended with exit code 3" in _prepared(tmp_path, METRICS + "os._exit(3)}")[0]
    assert "timed out" in _prepared(tmp_path, "def metrics(model, batch):\n    raise TimeoutError('timed out')\n")[0]
    monkeypatch.setattr(first_look, "_PATIENCE", 0.5)
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    before, begun = children.read_text(), time.monotonic()
    (late,) = _prepared(tmp_path, METRICS + "os.system('sleep 77.25') or time.sleep(60)}")
    assert "took more than 0.5 seconds" in late and time.monotonic() - begun < 30
    assert children.read_text() == before
    assert not [one for one in Path("/proc").glob("[0-9]*/cmdline") if b"77.25" in _read(one)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_on_gpus_only_what_the_cpu_cannot_cause_refuses(tmp_path: Path) -> None:
    def looked(text: str) -> list[str]:
        (tmp_path / "plain.py").write_text(PLAIN + text)
        task, config = checks.resolve(
            Request(str(tmp_path / "plain.py"), flags={"batch_size": "4", "cpu_threads": "1", "precision": "fp32"})
        )
        checks.cut_batch(config, 1, range(1, 2))
        _, eval_sets = task.datasets(config)
        model, gpu = task.model(config), torch.device("cuda")
        return first_look.warnings(task, config, model=model, eval_sets=eval_sets, ranks=1, device=gpu, named={})

    for error in ("RuntimeError", "NotImplementedError", "AssertionError"):
        text = f"def metrics(model, batch):\n    raise {error}('not for a CPU')\n"
        assert f"{error}: not for a CPU" in looked(text)[0]
    assert "KeyError: 'NO_CPU'" in looked(METRICS + "os.environ['NO_CPU']}")[0]  # raised in a library
    for text in (METRICS + "typo}", METRICS + "{}['cpu']}", METRICS + "model(batch[0])}"):
        with pytest.raises(Refused):
            looked(text)


def test_metrics_may_use_collectives_and_read_their_rank(tmp_path: Path) -> None:
    text = """
def metrics(model, batch):
    total = model(batch[0]).sum().detach()
    dist.all_reduce(total)
    return {"m": total / int(os.environ["WORLD_SIZE"])}
"""
    assert _prepared(tmp_path, text, ranks=3) == []


def test_nothing_is_created_and_the_exit_code_says_so(station: Station) -> None:
    (station.folder / "plain.py").write_text(PLAIN + METRICS + "typo}")
    done = station("launch", "plain.py", "--name", "one", "--steps", 2)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "line 24: NameError" in done.stderr
    assert not station.runs.exists()


def test_a_fork_with_edited_code_is_looked_at_too(engine: Any, tmp_path: Path) -> None:
    engine.run("to-fork", 1, steps=1)
    run, file = engine.station.run("to-fork"), tmp_path / "edited.py"
    file.write_text(engine.task.read_text().replace('{"accuracy":', '{"accuracy": typo +'))
    with pytest.raises(Refused, match=r"edited.py, line \d+: NameError: name 'typo'.*--eval.first false"):
        prepare_fork(run, 1, {"steps": "3"}, 1, str(file))
    prepare_fork(run, 1, {"steps": "3", "eval.first": "false"}, 1, str(file))

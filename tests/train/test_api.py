"""Runs from Python: the launches and the refusals of the command line, without torch, in real processes."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import train
from tests.train.conftest import PATIENCE, Station
from train import api
from train.commands import from_python
from train.errors import Refused


def python(station: Station, code: str, wait: bool = True) -> Any:
    """Run a program of a user in the folder of a station."""
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=station.folder, env=station.environment("launch"),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    if not wait:
        return program
    out, err = program.communicate(timeout=PATIENCE)
    assert program.returncode == 0, err
    return out, err


def words(*given: Any, **options: Any) -> dict[str, Any]:
    """What the command line of a launch says."""
    return vars(from_python.options_of("launch", [*given], options, arguments=options.pop("arguments", ())))


def test_keywords_become_the_flags_of_the_command_line() -> None:
    said = words(
        "digits", name="a", nproc=2, max_restarts=np.int64(3), keep_env=["A", "B"], gpus=[2], epochs=2.5, config=None,
        optim={"lr": np.float32(0.5), "args": {"betas": (0.9, 0.99)}}, task={"width": 8, "sizes": {"a": [True, "é"]}},
        **{"checkpoint.best": None, "log.samples": True},
    )  # fmt: skip
    assert (said["task"], said["name"], said["nproc"], said["max_restarts"]) == ("digits", "a", "2", "3")
    assert (said["keep_env"], said["gpus"], said["config"], said["follow"]) == (["A", "B"], "2,", None, False)
    assert words("digits", after=["b", train.Run(Path(), "c")])["after"] == "b,c"
    assert said["flags"] == {
        "epochs": "2.5", "optim.lr": "0.5", "optim.args.betas": "[0.9, 0.99]", "task.width": "8",
        "task.sizes": '{"a" = [true, "é"]}', "checkpoint.best": "none", "log.samples": "true",
    }  # fmt: skip


def test_a_script_gets_its_arguments_and_a_task_may_be_a_module() -> None:
    said = words(script=Path("a.py"), arguments=["--lr", 0.1, "--name", "-x"], on_restart="--resume {run}/a")
    assert said["on_restart"] == "--resume {run}/a"
    assert (said["script"], said["arguments"], said["task"]) == ("a.py", ["--lr", "0.1", "--name", "-x"], None)
    assert words(script="a.py", arguments="--lr 0.1 --note 'a b'")["arguments"] == ["--lr", "0.1", "--note", "a b"]
    with pytest.raises(Refused, match=r"arguments=.*: a quote is not closed"):
        words(script="a.py", arguments="--note 'a")
    for given in ({"script": "a.py"}, {"module": "a.b"}):
        with pytest.raises(Refused, match=r"unknown flag lr; the script's own .*: arguments=\['--lr', 0.1\]"):
            train.launch(**given, lr=0.1)
        with pytest.raises(Refused, match=r"unknown flag epochs; .*arguments=\['--epochs', 3\]"):
            train.launch(**given, epochs=3, watch={"hang_minutes": 3})
    with pytest.raises(Refused, match="unknown flag nprocs; did you mean nproc"):
        train.launch(script="a.py", nprocs=3)
    module = types.ModuleType("mine")
    module.__file__ = "/somewhere/mine.py"
    assert from_python.task_word(module) == "/somewhere/mine.py"
    from train.tasks import digits

    assert from_python.task_word(digits) == "digits"
    with pytest.raises(Refused, match="the module of_a_cell has no file; write the task into a Python file"):
        train.launch(types.ModuleType("of_a_cell"))


WRONG: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "name": (lambda runs: train.find("absent", runs=runs), ("show", "absent")),
    "near": (lambda runs: train.find("don", runs=runs), ("show", "don")),
    "task": (lambda runs: train.launch("digts", runs=runs), ("launch", "digts")),
    "keyword": (lambda runs: train.launch(task="digts", runs=runs), ("launch", "digts")),
    "file": (lambda runs: train.launch("./absent.py", runs=runs), ("launch", "./absent.py")),
    "script": (lambda runs: train.launch(script="absent.py", runs=runs), ("launch", "--script", "absent.py")),
    "both": (lambda runs: train.launch(runs=runs), ("launch",)),
    "field": (lambda runs: train.launch("digits", optim={"lrr": 1}, runs=runs), ("launch", "digits", "--optim.lrr=1")),
    "group": (
        lambda runs: train.launch("digits", optimizer={"lr": 1}, runs=runs),
        ("launch", "digits", "--optimizer="),
    ),
    "value": (lambda runs: train.launch("digits", epochs="x", runs=runs), ("launch", "digits", "--epochs=x")),
    "taken": (lambda runs: train.launch("digits", name="done", runs=runs), ("launch", "digits", "--name=done")),
    "no name": (lambda runs: train.launch("digits", name="", runs=runs), ("launch", "digits", "--name=")),
    "restarts": (
        lambda runs: train.launch("digits", max_restarts=-1, runs=runs),
        ("launch", "digits", "--max-restarts=-1"),
    ),
    "fork": (lambda runs: train.find("done", runs=runs).fork(name="done"), ("fork", "done", "--name=done")),
    "resume": (lambda runs: train.find("done", runs=runs).resume(seed=5), ("resume", "done", "--seed=5")),
    "rank": (lambda runs: train.find("done", runs=runs).logs(rank=9), ("logs", "done", "--rank=9")),
    "attempt": (lambda runs: train.find("done", runs=runs).logs(attempt=9), ("logs", "done", "--attempt=9")),
    "step": (
        lambda runs: train.find("done", runs=runs).model(checkpoint=7),
        ("export", "done", "--to=a.pt", "--checkpoint=7"),
    ),
    "state": (lambda runs: train.runs(state="fine", runs=runs), ("ls", "--state=fine")),
    "pattern": (lambda runs: train.runs("absent", runs=runs), ("ls", "absent")),
    "picture": (lambda runs: train.find("done", runs=runs).plot(to="a.gif"), ("plot", "done", "--to=a.gif")),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request_is_one_exception_with_the_line_of_the_command_line(
    case: str, finished: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished.folder)
    call, typed = WRONG[case]
    before = sorted(finished.runs.iterdir())
    with pytest.raises(Refused) as caught:
        call(finished.runs)
    error = caught.value
    assert error.__cause__ is None and error.__context__ is None
    assert error._render_traceback_() == [f"Refused: {error}"]
    if case != "group":  # its value cannot be typed
        assert finished.here(*typed).stderr.splitlines()[-1] == f"train: {error}"
    else:
        assert str(error).startswith("unknown flag --optimizer; did you mean --optim")
    assert sorted(finished.runs.iterdir()) == before


def test_only_python_refuses(finished: Station) -> None:
    run = train.find("done", runs=finished.runs)
    for call, line in (
        (lambda: train.launch("digits", follow=True), "follow is for the command line; in Python: run.wait()"),
        (lambda: run.model(device="nowhere"), "device='nowhere' cannot be used .*; give 'cpu' or 'cuda'"),
        (lambda: run.model(weights="emma"), "weights='emma': give 'model', or 'ema'"),
        (lambda: run.model(weights="ema"), "done keeps no average of its weights"),
        (lambda: run.predict(iter([1])), r"predict\(\) takes a data set with len\(\) and \[index\], got"),
        (lambda: run.predict([]), "the data set has no samples to predict"),
        (lambda: run.predict([0], batch_size=0), "batch_size=0: give a number of samples, at least 1"),
        (lambda: run.predict(["a"]), r"predict\(\) failed: "),
        (lambda: run.export("a.bin"), "the file name must end in .safetensors or .pt or .onnx"),
        (lambda: train.plot([]), r"plot\(\) takes a list of runs"),
        (lambda: train.plot(["done"]), r"plot\(\) takes a list of runs"),  # type: ignore[list-item]
        (lambda: run.state_dict("generator"), "done has registered no module generator; choose one: model"),
    ):
        with pytest.raises(Refused, match=line):
            call()


def test_metrics_become_a_table_of_pandas(finished: Station) -> None:
    pytest.importorskip("pandas", reason="the station's image has no room for it")
    run = train.find("done", runs=finished.runs)
    table = run.to_pandas()
    assert len(table) == len(run.metrics)
    assert table["eval.accuracy"].dropna().iloc[-1] == run.metrics[-1]["eval"]["accuracy"]


def test_a_run_shows_what_the_command_line_shows(
    finished: Station, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (run,) = train.runs("don*", state=["finished", "failed"], runs=finished.runs)
    assert (run.name, run.state, run.folder) == ("done", "finished", finished.runs / "done")
    assert repr(run) == "<Run done: finished, step 46/46>" and run == train.find("done", runs=finished.runs)
    assert run.metrics == finished.metrics("done") and run.record["weights_sha256"]
    assert str(run.logs()) == repr(run.logs()) == finished.ok("logs", "done").stdout
    run.show()
    assert capsys.readouterr().out == finished.ok("show", "done").stdout
    for figure in (run.plot(), train.plot([run, run], tmp_path / "two.svg")):
        assert figure._repr_png_()[:4] == b"\x89PNG"  # type: ignore[attr-defined]
    assert (tmp_path / "two.svg").stat().st_size > 1000
    assert run.wait() == "finished"  # at once


def test_a_run_is_html_without_scripts(finished: Station, tmp_path: Path) -> None:
    run = train.find("done", runs=finished.runs)
    html = run._repr_html_()
    assert all(
        part in html
        for part in ("<b>done</b>", "finished", "step 46 of 46", "eval loss 0.", "accuracy 0.9", "<polyline")
    )
    assert {"launch", "find", "runs", "Refused"} <= {*dir(train)}
    hostile = tmp_path / "runs" / "<script>x"
    hostile.mkdir(parents=True)
    record = run.record | {"state": "failed", "reason": "<img src=x onerror=alert(1)>", "metrics": {"<b>": 1.0}}
    (hostile / "run.json").write_text(json.dumps(record))
    (hostile / "lock").touch()
    html = api.Run(tmp_path / "runs", hostile.name)._repr_html_()
    assert not re.search(r"<(script|img|b>:)", html) and "&lt;img" in html and "<b>&lt;script&gt;x</b>" in html
    assert "no run gone" in api.Run(tmp_path / "runs", "gone")._repr_html_()


def state_of_process() -> tuple[Any, ...]:
    generators = np.asarray(torch.random.get_rng_state()), np.random.get_state()[1], random.getstate()[1]
    return os.getcwd(), [*sys.path], [*sys.meta_path], dict(os.environ), *generators


def test_a_model_is_the_trained_one_and_leaves_this_process_as_it_was(finished: Station) -> None:
    run = train.find("done", runs=finished.runs)
    run.model()  # torch itself adds a folder to sys.path once
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    before = state_of_process()
    model = run.model(checkpoint="best")
    assert not model.training
    after = state_of_process()
    assert before[:4] == after[:4] and all(map(np.array_equal, before[4:], after[4:]))
    for name, tensor in run.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    images = torch.rand(70, 1, 8, 8)
    expected = model(images).detach()
    for data in (TensorDataset(images), [*images]):
        found = run.predict(data, batch_size=32)
        assert found.shape == (70, 10) and torch.allclose(found, expected, atol=1e-6)
    assert state_of_process()[:4] == before[:4]


TASK = """
import helper
import torch
from torch import nn
from torch.utils.data import TensorDataset

def model(config):
    return helper.Net()

def datasets(config):
    x = torch.arange(32.0).reshape(32, 1)
    return TensorDataset(x, x), TensorDataset(x, x)

def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])

def predict(model, batch):
    return {"twice": 2 * batch[0], "words": [f"{value.item():g}" for value in batch[0]]}

def compute_metrics(predictions):
    return {"count": len(predictions["words"])}
"""
HELPER = """
from torch import nn
KIND = {kind!r}
class Net(nn.Linear):
    kind = KIND
    def __init__(self):
        super().__init__(1, 1)
"""

PROGRAM = """
import os, sys, threading
import trainstation as ts
assert "torch" not in sys.modules and "train" not in sys.modules

runs, refusals = [], []

def start(*given, **options):
    try:
        runs.append(ts.launch(*given, **options))
    except ts.Refused as error:
        refusals.append(str(error))

small = dict(epochs=2, batch_size=8, cpu_threads=1, log={"tensorboard": False})
threads = [threading.Thread(target=start, args=(f"{name}/task.py",), kwargs=dict(name=name, **small)) for name in "ab"]
for more in ({}, {}, {"nproc": 0}):   # without a name; the agent inside tmux refuses the third
    threads.append(threading.Thread(target=start, kwargs=dict(script="echo.py", arguments=["hello", 3], **more)))
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len({run.name for run in runs}) == 4, (runs, refusals)
assert [text.partition(":")[0] for text in refusals] == ["--nproc 0"], refusals
assert [run.wait() for run in runs] == ["finished"] * 4, runs
assert "torch" not in sys.modules
assert len(ts.runs(state="finished")) == 4

b = ts.find("b").model()
assert "helper" not in sys.modules
sys.path.insert(0, "mine")
import helper
a = ts.find("a").model()
assert (a.kind, b.kind, helper.KIND, sys.modules["helper"]) == ("a", "b", "mine", helper)

import torch
found = ts.find("b").predict(torch.utils.data.TensorDataset(torch.arange(5.0).reshape(5, 1)), batch_size=2)
assert found["words"] == ["0", "1", "2", "3", "4"] and found["twice"].flatten().tolist() == [0, 2, 4, 6, 8]

before = os.getcwd(), [*sys.path], sys.modules["helper"]
file = ts.find("b").export("b.safetensors", checkpoint=ts.find("b").record["step"])
assert file.stat().st_size > 0 and str(file) == os.path.abspath("b.safetensors")
assert (os.getcwd(), sys.path, sys.modules["helper"]) == before

second = ts.find("a").fork(name="second", epochs=3, optim={"lr": 0.01})
assert second.wait() == "finished" and second.record["forked_from"]["run"] == "a"
assert second.resume() is second      # finished already: a line, and nothing is done

script = ts.runs("echo-*")[0]
assert script.logs() == "hello 3\\n", script.logs()
for use in (script.model, script.state_dict):
    try:
        use()
    except ts.Refused as error:
        refusals.append(str(error))
try:
    script.fork(lr=0.1)
except ts.Refused as error:
    assert "arguments=['--lr', 0.1]" in str(error), error
assert refusals[1] == f"{script.name} runs a script, whose model only its own code can build", refusals
assert refusals[2].startswith(f"{script.name} runs a script, whose checkpoints are not known here"), refusals
print("ok", os.path.basename(os.getcwd()))
"""


def test_a_program_starts_runs_side_by_side_and_uses_what_they_learned(station: Station) -> None:
    for name in ("a", "b", "mine"):
        (station.folder / name).mkdir()
        (station.folder / name / "task.py").write_text(TASK)
        (station.folder / name / "helper.py").write_text(HELPER.format(kind=name))
    (station.folder / "echo.py").write_text("import sys\nprint(*sys.argv[1:])\n")
    out, err = python(station, PROGRAM)
    assert out.startswith("ok ") and "Traceback" not in err
    assert "second has already finished" in err


WAITING = """
import trainstation as ts
run = ts.launch("fake", name="long", epochs=1000, cpu_threads=1, task={"count": 64})
print(run.state, flush=True)
try:
    run.wait()
except KeyboardInterrupt as error:
    print(error, flush=True)
assert run.wait(timeout=0.1) == "running"
run.stop()
print(run.state)
"""


def test_an_interrupt_ends_the_waiting_and_leaves_the_run_alone(station: Station) -> None:
    program = python(station, WAITING, wait=False)
    program.stdout.readline()
    station.wait_for_step("long", 1)
    time.sleep(0.3)  # it waits by then
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=PATIENCE)
    assert out.splitlines() == ["long continues; to wait for it again: run.wait()", "stopped"], err
    assert station.record("long")["stopped_by"] == "user"

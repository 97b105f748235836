"""Weights out of a run: clean names, the same function, the same figures, and a beginning for another run."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.tasks import TASKS
from tests.train.specs import with_spec
from train import api
from train.checkpoint.manifest import manifest_text
from train.checkpoint.state_dict import weights_sha256
from train.config import from_toml
from train.errors import Refused
from train.launcher.resume import prepare_resume
from train.run import run_folder
from train.run.best import best
from train.tasks import load
from train.trainer.export import export
from train.trainer.load import load_trained

pytestmark = pytest.mark.never_forgiven

if TYPE_CHECKING:
    from conftest import Station


def network(station: Station, state: dict[str, Any]) -> torch.nn.Module:
    task = load("digits")
    config = from_toml(station.runs / "done" / "config.toml", task.Settings)
    made = task.model(config)
    made.load_state_dict(state)
    return made.eval()


def pictures() -> torch.Tensor:
    return torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_exported_weights_are_the_runs_last_ones_under_the_models_own_names(
    finished: Station, tmp_path: Path, suffix: str
) -> None:
    target = tmp_path / f"model{suffix}"
    assert export(*with_spec(finished.run("done")), target) == 46
    state = load_file(target) if suffix == ".safetensors" else torch.load(target, weights_only=True)
    assert weights_sha256(state) == finished.record("done")["weights_sha256"]
    network(finished, state)  # refuses names such as module.0.weight
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_the_same_weights_are_the_same_file(finished: Station, tmp_path: Path) -> None:
    found = set()
    for number in range(6):  # one of two orders by chance would be missed once in 32
        export(*with_spec(finished.run("done")), tmp_path / f"{number}.safetensors")
        found.add((tmp_path / f"{number}.safetensors").read_bytes())
    assert len(found) == 1


def test_a_safetensors_file_says_where_it_comes_from(finished: Station, tmp_path: Path) -> None:
    export(*with_spec(finished.run("done")), tmp_path / "model.safetensors", step=20)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"checkpoint": "done/step-00000020"}
    older = load_file(tmp_path / "model.safetensors")
    assert weights_sha256(older) != finished.record("done")["weights_sha256"]


def evaluate_onnx(file: Path, batch: np.ndarray) -> np.ndarray:
    try:
        import onnxruntime
    except ImportError:
        from onnx.reference import ReferenceEvaluator

        session: Any = ReferenceEvaluator(str(file))
    else:
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"input0": batch})[0])


def test_an_onnx_file_computes_what_the_model_computes_for_any_number_of_samples(
    finished: Station, tmp_path: Path
) -> None:
    pytest.importorskip("onnx")
    export(*with_spec(finished.run("done")), tmp_path / "model.onnx")
    export(*with_spec(finished.run("done")), tmp_path / "model.pt")
    model = network(finished, torch.load(tmp_path / "model.pt", weights_only=True))
    for batch in (pictures(), pictures()[:1]):
        with torch.no_grad():
            expected = model(batch).numpy()
        np.testing.assert_allclose(evaluate_onnx(tmp_path / "model.onnx", batch.numpy()), expected, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.pt"]


def test_the_inference_model_is_exported_under_its_own_names(engine: Any, tmp_path: Path) -> None:
    engine.run("inner", task=TASKS / "whole_sets.py", steps=2)
    state = engine.weights("inner")
    export(*with_spec(engine.station.run("inner")), tmp_path / "inner.safetensors")
    found = load_file(tmp_path / "inner.safetensors")
    assert found.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all(torch.equal(value, state[f"body.{name}"]) for name, value in found.items())
    pytest.importorskip("onnx")
    export(*with_spec(engine.station.run("inner")), tmp_path / "inner.onnx")
    points = torch.rand(5, 6)
    hidden = torch.tanh(points @ found["0.weight"].T + found["0.bias"])
    expected = hidden @ found["2.weight"].T + found["2.bias"]
    np.testing.assert_allclose(evaluate_onnx(tmp_path / "inner.onnx", points.numpy()), expected, atol=1e-5)


def test_only_trained_weights_are_exported_under_the_names_of_the_model(engine: Any, tmp_path: Path) -> None:
    engine.run("partly", task=TASKS / "whole_sets.py", steps=2, freeze="body.0")
    export(*with_spec(engine.station.run("partly")), tmp_path / "partly.safetensors", which="trained")
    state, found = engine.weights("partly"), load_file(tmp_path / "partly.safetensors")
    assert found.keys() == {name for name in state if not name.startswith("body.0.")} and "body.2.weight" in found
    assert all(torch.equal(value, state[name]) for name, value in found.items())
    engine.run("wholly", task=TASKS / "whole_sets.py", steps=1)
    refused = engine.station("export", "wholly", "--weights", "trained", "--to", "x.pt")
    assert refused.returncode == 2 and "trains all of its weights" in refused.stderr
    refused = engine.station("export", "partly", "--weights", "trained", "--to", "x.onnx")
    assert refused.returncode == 2 and ".safetensors or .pt" in refused.stderr


def test_evaluating_alone_gives_the_recorded_figures_exactly(finished: Station) -> None:
    told = json.loads(finished.ok("eval", "done", "--json").stdout)
    assert told == {"step": 46, "samples": 360, "eval": finished.record("done")["metrics"]}
    evaluations = [line for line in finished.metrics("done") if "eval" in line]
    assert evaluations[-1]["eval"] == told["eval"]


@pytest.mark.parametrize(("precision", "device"), [("tf32", "cpu"), ("fp16", "cuda")])
def test_what_only_gpus_compute_is_evaluated_in_fp32_where_there_are_none_and_not_sent_to_the_cpu(
    precision: str, device: str, finished: Station, tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    folder = shutil.copytree(finished.runs / "done", tmp_path / "runs" / "done")
    file, expected = folder / "config.toml", finished.record("done")["metrics"]
    text = file.read_text().replace('precision = "fp32"', f'precision = "{precision}"')
    file.write_text(text.replace('device = "cpu"', f'device = "{device}"'))
    for manifest in folder.glob("checkpoints/*/manifest.json"):  # as if it had always been so
        content = json.loads(manifest.read_text().replace('"fp32"', f'"{precision}"'))
        manifest.write_text(manifest_text(content))
    done = finished.ok("eval", "done", "--json", "--runs", tmp_path / "runs")
    assert json.loads(done.stdout)["eval"] == expected
    assert f"a CPU cannot compute in {precision}; evaluated in fp32" in done.stderr
    target = tmp_path / "of.safetensors"
    finished.ok("export", "done", "--runs", tmp_path / "runs", "--to", target)
    assert load_file(target).keys() == load_trained(*with_spec(finished.run("done")))[2].state_dict().keys()
    if precision == "tf32":  # which a CPU trains in fp32, too
        assert any("computes in fp32 here" in line for line in prepare_resume(run_folder.Run(folder), {}, 1)[1])
        return
    with pytest.raises(Refused, match="which needs a GPU") as told:
        prepare_resume(run_folder.Run(folder), {"epochs": "3"}, 1)
    assert "--device cpu" not in str(told.value) and "--precision" not in str(told.value)


NOISY = """
import os

import torch
from PIL import UnidentifiedImageError

print("imported")


def model(config):
    os.system("echo from a program")
    return torch.nn.Linear(2, 1)


class Set(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if os.path.exists("broken"):
            raise UnidentifiedImageError("cannot identify image file 'x.jpg'")
        return torch.ones(2)


def datasets(config):
    print("in datasets")
    return Set(), Set()


def loss(model, batch):
    return model(batch).mean() ** 2


def metrics(model, batch):
    _seen.append(1)
    if os.path.exists("cut"):
        raise KeyError("corpus")
    return {f"name{len(_seen) if os.path.exists('others') else 0}": torch.zeros(())}


_seen = []
"""


def test_what_a_task_prints_is_no_result_and_what_it_raises_is_said_in_one_line(station: Station) -> None:
    (station.folder / "task.py").write_text(NOISY)
    station.ok("run", "task.py", "--name", "a", "--steps", 1, "--batch_size", 2, "--cpu_threads", 1)
    done = station.ok("eval", "a", "--json")
    assert json.loads(done.stdout)["samples"] == 4
    assert {"imported", "in datasets", "from a program"} <= set(done.stderr.splitlines())
    done = station.ok("export", "a", "--to", "a.safetensors")
    assert done.stdout == "" and "imported" in done.stderr
    for state, command, words in (
        ("cut", ["eval", "a"], ["task.py, line ", "KeyError: 'corpus'"]),
        ("others", ["eval", "a"], ["metrics, and the parts of a loss, must have the same names"]),
        ("broken", ["eval", "a"], ["sample 0 of the evaluation set", "cannot identify image file 'x.jpg'"]),
        ("broken", ["export", "a", "--to", "a.onnx"], ["sample 0 of the evaluation set", "cannot identify"]),
    ):
        if command[-1] == "a.onnx" and importlib.util.find_spec("onnx") is None:
            continue
        (station.folder / state).touch()
        done = station(*command)
        (station.folder / state).unlink()
        told = [line for line in done.stderr.splitlines() if line not in ("imported", "in datasets", "from a program")]
        assert done.returncode == 2 and done.stdout == "" and len(told) == 1, (state, done.stderr)
        assert all(word in told[0] for word in words) and "owner and mode" not in told[0], told


@pytest.mark.parametrize(
    ("target", "step", "words"),
    [
        ("model.txt", None, "must end in"),
        ("nowhere/model.pt", None, "no folder"),
        (".pt", None, "must end in"),
        ("model.pt", 7, "there are: 20, 40, 46"),
    ],
)
def test_an_export_that_cannot_be_is_refused_and_writes_nothing(
    finished: Station, tmp_path: Path, target: str, step: int | None, words: str
) -> None:
    done = finished("export", "done", "--to", tmp_path / target, *(["--checkpoint", step] if step else []))
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_best_weights_are_those_that_the_metric_was_measured_with(
    station: Station, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--steps", 3, "--eval.every_steps", 1, "--ema.decay", 0.9, "--checkpoint.best", "ema.accuracy"]
    station.ok("run", "digits", "--name", "a", *flags, "--cpu_threads", 1)
    run = station.run("a")
    step = best(run, "ema.accuracy").step  # type: ignore[union-attr] # it has been evaluated
    *_, model, _, average = load_trained(*with_spec(run), step)
    averaged, last = {**model.state_dict(), **average}, {**model.state_dict()}
    assert weights_sha256(averaged) != weights_sha256(last)

    def exported(*more: str) -> tuple[str, str]:
        done = station.ok("export", "a", "--to", tmp_path / "a.pt", "--checkpoint", "best", *more)
        return weights_sha256(torch.load(tmp_path / "a.pt", weights_only=True)), done.stderr

    digest, said = exported()
    assert digest == weights_sha256(averaged)
    assert f"the averaged weights of a after step {step}, the best by ema.accuracy" in said
    digest, said = exported("--weights", "model")
    assert digest == weights_sha256(last)
    assert "measured with the average of the weights" in said and "the weights of a after" in said
    here = api.find("a", runs=station.runs)
    assert weights_sha256(here.model(checkpoint="best").state_dict()) == weights_sha256(averaged)
    assert weights_sha256(here.state_dict(checkpoint="best")) == weights_sha256(averaged)
    assert f"a: the averaged weights after step {step}, the best by ema.accuracy" in capsys.readouterr().err
    assert weights_sha256(here.model(checkpoint=step).state_dict()) == weights_sha256(last)
    done = station.ok("run", "digits", "--name", "b", "--init", "a@best", "--steps", 1, "--cpu_threads", 1)
    assert "the averaged weights after step" in done.stderr
    assert weights_sha256(load_file(station.runs / "b" / "init.safetensors")) == weights_sha256(averaged)


def test_an_old_export_stays_when_a_new_one_fails(finished: Station, tmp_path: Path) -> None:
    target = tmp_path / "model.pt"
    target.write_text("precious")
    copy = tmp_path / "runs" / "hurt"
    shutil.copytree(finished.runs / "done", copy)
    for shard in copy.glob("checkpoints/*/*.distcp"):
        shard.write_bytes(b"x")
    from train.run.run_folder import Run

    with pytest.raises(Refused, match="no usable checkpoint"):
        export(*with_spec(Run(copy)), target)
    assert target.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "runs"]

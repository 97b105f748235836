"""Curves for Weights & Biases: by the real package, offline; nothing of it holds a run up."""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import eventually
from train.errors import Refused
from train.launcher.checks import prepare
from train.launcher.request import Request
from train.run import environment, folders, wandb_run
from train.run.metrics import metrics_text
from train.run.run_folder import Run
from train.trainer.loggers import wandb

PATIENCE = 240


def lines_to(run: Run, first: int, last: int) -> None:
    with run.metrics.open("a") as file:
        for step in range(first, last + 1):
            line = {"step": step, "epoch": 1, "loss": 1 / step, "lr": 0.1, "samples_per_s": 9.0, "data_wait": 0.0,
                    "step_time": 0.1, "memory": 1.0}  # fmt: skip
            file.write(metrics_text(line) + "\n")  # type: ignore[arg-type]
        file.write(json.dumps({"step": last, "epoch": 1, "samples": 3, "eval": {"loss": 0.5, "accuracy": 0.25}}) + "\n")


def records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format, behind a header of 7 bytes."""
    content, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # no header fits: the rest of the block is filled up
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def sent(run: Run) -> list[dict[str, Any]]:
    """The history in wandb's own files, in their order."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted((run.folder / "wandb").glob("offline-run-*/*.wandb")):
        for content in records(path):
            record = wandb_internal_pb2.Record.FromString(content)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                found.append({".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    return found


def feed_once(run: Run) -> None:
    """As rank 0 does, to its end."""
    made = wandb.WandbProcess(run, "a-project", run.folder / "wandb.log")
    eventually((run.folder / "wandb.log").read_text, (run.folder / wandb.FILE).exists)
    process = made.process
    process.stdin.close()  # type: ignore[union-attr]
    process.wait(timeout=PATIENCE)


def test_every_line_is_sent_once_and_a_resume_goes_on_in_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = folders.create(tmp_path, "one", files={"config.toml": "seed = 7\n"}, record={"world_size": 1})
    lines_to(run, 1, 20)
    feed_once(run)
    first = json.loads((run.folder / wandb.FILE).read_text())
    # a death: cut to step 10, made again, and on
    run.metrics.write_text("")
    lines_to(run, 1, 10)
    lines_to(run, 11, 20)
    lines_to(run, 21, 30)
    feed_once(run)
    second = json.loads((run.folder / wandb.FILE).read_text())
    assert second["id"] == first["id"] == run.read()["wandb"]["id"] == run.read()["wandb_id"]
    assert second["training"] == 30
    history = sent(run)
    steps = [line["step"] for line in history if "train/loss" in line]
    assert steps == list(range(1, 31)), (run.folder / "wandb.log").read_text()
    assert [(line["step"], line["eval/accuracy"]) for line in history if "eval/accuracy" in line] == [
        (20, 0.25), (30, 0.25),
    ]  # fmt: skip
    assert len(list((run.folder / "wandb").glob(f"offline-run-*-{first['id']}"))) >= 1


def test_a_run_does_not_notice_a_feed_that_fails_or_a_network_that_hangs(engine_less: Any) -> None:
    run, environment = engine_less
    # nobody answers at this address; a key that is none
    environment |= {"WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "k" * 40}
    code = (
        "import sys; from pathlib import Path; from train.trainer.loggers.wandb import WandbProcess\n"
        "from train.run.run_folder import Run\n"
        "run = Run(Path(sys.argv[1])); WandbProcess(run, 'p', run.folder / 'wandb.log').close()"
    )
    command = [sys.executable, "-c", code, str(run.folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stderr == ""


def test_restarts_share_a_run_at_wandb_that_its_user_may_choose_and_a_nested_run_does_not_take() -> None:
    shell = {"A": "1"}
    of_0, of_1 = (wandb_run.variables(shell, "abc", has_feed=False, rank=rank) for rank in range(2))
    assert (of_0[wandb_run.ID], of_1[wandb_run.ID], of_0[wandb_run.RESUME]) == ("abc", "abc-1", "allow")
    assert wandb_run.variables(shell, "abc", has_feed=True, rank=0)[wandb_run.ID] == "abc-0"
    assert wandb_run.of_feed(of_0, "abc")[0] == "abc"
    assert wandb_run.users(shell | of_0) == shell
    assert environment.keep(shell | of_0, names=["A"]).values == shell
    kept = environment.keep(shell | {"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}, names=["A"])
    assert environment.resumed(kept, shell | of_0, as_recorded=False)[0] == kept.values
    nested = wandb_run.variables(shell | of_0, "def", has_feed=False, rank=0)
    assert (shell | of_0 | nested)[wandb_run.ID] == "def"
    for given, resume in (
        ({"WANDB_RUN_ID": "mine"}, "allow"),
        ({"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}, "must"),
    ):
        assert given | wandb_run.variables(given, "abc", has_feed=False, rank=0) == {
            "WANDB_RUN_ID": "mine",
            "WANDB_RESUME": resume,
        }
        assert wandb_run.of_feed(given, "abc") == ("mine", resume)


@pytest.fixture
def engine_less(tmp_path: Path, station: Any) -> Any:
    run = folders.create(tmp_path / "r", "two", files={"config.toml": "seed = 7\n"}, record={"world_size": 1})
    return run, station.environment()


@pytest.mark.parametrize("project", ["a b", "x/y/z"])
def test_a_project_that_cannot_be_one_is_refused(project: str) -> None:
    with pytest.raises(Refused, match="must be the name of a project"):
        wandb.check(project)


@pytest.mark.parametrize("word", ["true", "false", "None"])
def test_a_word_that_switches_is_no_project(word: str) -> None:
    with pytest.raises(Refused, match="sends nothing"):
        wandb.check(word)


def test_a_package_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "wandb" else found(name, *more)
    )
    with pytest.raises(Refused, match=r"pip install 'trainstation\[wandb\]'"):
        prepare(Request(task="digits", flags={"log.wandb": "p", "cpu_threads": "1"}))


@pytest.mark.minutes
def test_a_real_run_is_sent(station: Any) -> None:
    pytest.importorskip("wandb")
    run = station.run("fed")
    flags = ["--steps", 20, "--cpu_threads", 1, "--log.every_steps", 1, "--log.tensorboard", "false"]
    station.ok(
        "run", "digits", "--name", "fed", *flags, "--log.wandb", "some/project", env={"WANDB_MODE": "offline"}
    )  # fmt: skip
    eventually((run.folder / "logs" / "wandb.log").read_text, lambda: len(sent(run)) >= len(station.metrics("fed")))
    losses = [line["loss"] for line in station.metrics("fed") if "loss" in line]
    assert [line["train/loss"] for line in sent(run) if "train/loss" in line] == pytest.approx(losses)
    assert "wandb" in station.ok("show", "fed").stdout

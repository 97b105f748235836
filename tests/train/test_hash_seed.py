"""A task that numbers words by a set has one vocabulary: on all ranks, after a resume, in an evaluation."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from train import hash_seed

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

TEXT = "the quick brown fox jumps over a lazy dog while seven grey cats sleep under one old oak tree near my house"
WORDS = list(set(TEXT.split()))
NUMBERS = {word: number for number, word in enumerate(WORDS)}


def datasets(config):
    print("numbers", *WORDS, file=sys.stderr, flush=True)
    numbers = torch.tensor([NUMBERS[word] for word in TEXT.split()] * 8)
    return TensorDataset(numbers[:-1], numbers[1:]), TensorDataset(numbers[:20], numbers[1:21])


def model(config):
    return nn.Sequential(nn.Embedding(len(WORDS), 8), nn.Linear(8, len(WORDS)))


def loss(model, batch):
    if Path("kill").exists() and list(Path(__spec__.origin).parent.glob("checkpoints/step-*")):
        Path("kill").unlink(missing_ok=True)
        os.kill(int(os.environ["TRAIN_AGENT_PID"]), signal.SIGKILL)
        time.sleep(60)  # it takes its ranks with it
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
FLAGS = [
    "--batch_size", 32, "--micro_batch_size", 16, "--cpu_threads", 1, "--optim.lr", 0.05, "--log.every_steps", 1,
    "--log.tensorboard", "false", "--data.workers", 0,
]  # fmt: skip
LAUNCHED = [*FLAGS, "--steps", 60, "--checkpoint.every_steps", 5, "--nproc", 2]


@pytest.fixture(scope="module")
def words(shared_station: Station) -> Station:
    (shared_station.folder / "words.py").write_text(TASK)
    return shared_station


@pytest.fixture(scope="module")
def undisturbed(words: Station) -> str:
    """The digest of a launched run that nobody disturbed."""
    words.ok("launch", "words.py", "--name", "words", *LAUNCHED, "--follow")
    return str(words.record("words")["weights_sha256"])


def orders(station: Station, name: str) -> set[str]:
    """The orders in which processes of a run have seen the words."""
    return {line for line in station.logs(name).splitlines() if line.startswith("numbers ")}


def test_a_killed_run_that_orders_a_set_of_strings_goes_on_with_the_same_order(
    words: Station, undisturbed: str
) -> None:
    cold = {"TRAIN_WARM": "off"}  # neither agent is a fork of the process that the other one is a fork of
    (words.folder / "kill").touch()
    words.ok("launch", "words.py", "--name", "words-killed", *LAUNCHED, env=cold)
    assert words.wait_for_end("words-killed")["state"] == "interrupted"
    done = words.ok("resume", "words-killed", "--follow")
    assert "PYTHONHASHSEED" not in done.stderr
    assert len(orders(words, "words-killed") | orders(words, "words")) == 1
    assert words.record("words-killed")["weights_sha256"] == undisturbed


@pytest.mark.minutes
def test_ranks_of_a_users_own_torchrun_agree_with_a_launch(words: Station, undisturbed: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "train"]
    command += ["run", "words.py", "--name", "words-torchrun", *map(str, FLAGS), "--steps", "60"]
    environ = {key: value for key, value in words.environment().items() if key != hash_seed.SEED}
    subprocess.run(command, cwd=words.folder, env=environ, check=True, capture_output=True, timeout=240)
    assert words.record("words-torchrun")["weights_sha256"] == undisturbed, words.logs("words-torchrun")


@pytest.mark.minutes
def test_an_evaluation_has_the_order_of_its_run(words: Station, undisturbed: str) -> None:
    command = [
        sys.executable,
        "-m",
        "train",
        "eval",
        "words",
        "--json",
    ]  # in an interpreter of its own, as users have it
    environ = {key: value for key, value in words.environment().items() if key != hash_seed.SEED}
    done = subprocess.run(
        command, cwd=words.folder, env=environ, check=True, capture_output=True, text=True, timeout=240
    )
    assert {line for line in done.stderr.splitlines() if line.startswith("numbers ")} == orders(words, "words")
    assert json.loads(done.stdout)["eval"] == words.record("words")["metrics"]


@pytest.mark.minutes
def test_what_a_user_has_set_is_that_of_resumes(words: Station) -> None:
    own = {hash_seed.SEED: "7"}
    words.ok("launch", "words.py", "--name", "words-own", *FLAGS, "--steps", 20, "--follow", env=own)
    words.ok("resume", "words-own", "--steps", 30, "--follow", env={hash_seed.SEED: "8"})
    assert len(orders(words, "words-own")) == 1


def test_a_program_begins_again_once_and_never_as_a_fork(words: Station) -> None:
    program = (
        "import os, sys; from train import hash_seed\n"
        "print(os.getpid(), os.environ.get('PYTHONHASHSEED'), flush=True)\n"
        "if os.fork() == 0: hash_seed.restart_with_seed(['run', 'x']); print('fork', flush=True); os._exit(0)\n"
        "os.wait(); hash_seed.restart_with_seed(sys.argv[1:]); print('on')"
    )
    for own, expected in (({}, ["None", "0"]), ({hash_seed.SEED: "5"}, ["5"])):
        environ = {key: value for key, value in words.environment().items() if key != hash_seed.SEED} | own
        command = [sys.executable, "-c", program, "word"]
        done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True, timeout=240)
        lines = [line.split() for line in done.stdout.splitlines() if not line.startswith(("fork", "on"))]
        assert [line[1] for line in lines] == expected and len({line[0] for line in lines}) == 1
        assert done.stdout.splitlines()[-1] == "on"

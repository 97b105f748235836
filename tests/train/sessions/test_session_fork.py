"""A session's run is forked with other arguments, and archived."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from train.run import states

if TYPE_CHECKING:
    from conftest import Station

pytestmark = pytest.mark.turns

# A loop with a model, whose weights follow from --lr and the number of the step. It ends without a word.
SCRIPT = """
import argparse

import torch

from train.run.outcome import Kind
from train.sessions.place import Place
from train.sessions.state import Now, Position, State

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--lr", type=float, default=0.1)
asked = parser.parse_args()
place = Place.open(save_every=5)
state = State(place)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=asked.lr)
state.register(model=model, optimizer=optimizer)
saved = state.load()
place.began(saved.position.updates if saved else 0, saved.metrics_bytes if saved else 0)
print(asked, "rate", optimizer.param_groups[0]["lr"], flush=True)


def save():
    assert not place.sync()
    assert state.save(Now(Position(0, state.updates, state.updates), {}, place.metrics_size())) and state.wait()
    place.saved(state.updates)


def finish():
    save()
    place.end(Kind.FINISHED, step=state.updates, epoch=1, figures={"weights_sha256": state.digest()})


place.at_exit(finish, lambda: True)
while state.updates < asked.steps:
    loss = model(torch.ones(2, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    state.border()
    place.log({"step": state.updates, "epoch": 1, "loss": loss.item()})
    if place.due(state.updates):
        save()
"""


@pytest.fixture(scope="module")
def lent(shared_station: Station) -> Station:
    """The shared folder with `lent1`: twelve steps, checkpoints of 5, 10 and, from the exit, 12."""
    station = shared_station
    (station.folder / "lent.py").write_text(SCRIPT)
    station.ok("launch", "--script", "lent.py", "--name", "lent1", "--", "--lr", "0.05")
    assert station.wait_for_end("lent1")["state"] == states.FINISHED, station.logs("lent1")
    assert station.run("lent1").steps_saved() == [12, 10, 5]
    return station


def test_a_fork_continues_from_a_checkpoint_with_other_arguments(lent: Station) -> None:
    done = lent.ok("fork", "lent1", "--name", "lent2", "--checkpoint", 5, "--", "--steps", 15)
    assert done.stdout == "lent2\n"
    assert "lent2 continues from lent1 after step 5" in done.stderr
    assert "model, optimizer: loaded from the checkpoint" in done.stderr
    record = lent.wait_for_end("lent2")
    assert record["state"] == states.FINISHED, lent.logs("lent2")
    assert record["script_arguments"] == ["--lr", "0.05", "--steps", "15"]
    assert record["forked_from"] == {"run": "lent1", "step": 5}
    assert (record["step"], record["attempts"][0]["from_step"]) == (15, 5)
    first, second = ((lent.runs / name / "metrics.jsonl").read_text().splitlines() for name in ("lent1", "lent2"))
    assert second[:12] == first and len(second) == 15
    assert lent.ok("show", "lent2").stdout.count("forked from  lent1 after step 5") == 1


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--task", "digits"], "--task is for tasks; a script starts as its file is now, so edit the file"),
        (["--epochs", "3"], "--epochs is for tasks, not for scripts; put arguments of the script after --"),
        (["--checkpoint", "7"], "lent1 has no checkpoint of step 7; there are: 5, 10, 12"),
        (["--", "{newest:x}"], "only --on-restart takes {newest:GLOB}"),
    ],
)
def test_a_wrong_fork_is_one_line(lent: Station, asked: list[str], said: str) -> None:
    refused = lent("fork", "lent1", "--name", "never", *asked)
    assert refused.returncode == 2 and said in refused.stderr and refused.stderr.count("\n") == 1
    assert not lent.run("never").folder.exists()


def test_an_archive_of_a_session_names_the_files_that_it_lacks(lent: Station) -> None:
    done = lent.ok("archive", "lent1", "--to", "lent1.tar")
    assert f"the archive lacks {lent.folder / 'lent.py'}, which it needs" in done.stderr
    (lent.folder / "elsewhere").mkdir()
    subprocess.run(["tar", "-xkf", "lent1.tar", "-C", "elsewhere"], cwd=lent.folder, check=True)
    forked = lent.ok("fork", "lent1", "--name", "lent3", "--runs", "elsewhere", "--follow", "--", "--steps", 14)
    assert "lent3 continues from lent1 after step 12" in forked.stderr

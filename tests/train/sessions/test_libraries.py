"""A session in the hands of Lightning, Hugging Face's Trainer, Fabric and Accelerate: the scripts of examples/scripts
end with the weights of an uninterrupted run, whatever is killed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import random
import signal
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import Station

pytestmark = pytest.mark.never_forgiven

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "examples" / "scripts"
TRAINERS = {
    "lightning_trainer": ("ckpt_path=session.newest()", "ckpt_path=None"),
    "hf_trainer": ("resume_from_checkpoint=session.newest()", "resume_from_checkpoint=None"),
}
"""Maps a script to the words by which its library loads a checkpoint, and to what someone who forgets them has."""


def test_the_libraries_are_installed_in_the_versions_that_bindings_were_tried_with() -> None:
    pytest.importorskip("lightning", reason="the station's image has no room for them")
    locked = (ROOT / "requirements.lock").read_text()
    with (ROOT / "pyproject.toml").open("rb") as file:
        extra = tomllib.load(file)["project"]["optional-dependencies"]["libraries"]
    for requirement in extra:
        name = requirement.partition(">")[0]
        assert f"\n{name}=={importlib.metadata.version(name)} " in locked


def test_every_script_says_how_to_run_it() -> None:
    for path in SCRIPTS.glob("*.py"):
        assert f"train launch --script examples/scripts/{path.name} " in path.read_text().splitlines()[0]


def launched(station: Station, script: Path, name: str, ranks: int, *more: object) -> None:
    station.ok("launch", "--script", script, "--nproc", ranks, "--name", name, *more)


def saved(station: Station, name: str) -> int:
    return max(station.run(name).steps_saved(), default=0)


def wait_for_checkpoint(station: Station, name: str, after: int, attempt: int) -> None:
    """Wait for a checkpoint of a later step that this attempt has written."""

    def is_there(record: dict[str, Any]) -> bool:
        assert record["state"] in ("created", "running"), (record["reason"], station.logs(name))
        return len(record["attempts"]) == attempt and saved(station, name) > after

    station.wait(name, is_there, f"a checkpoint after step {after}")


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def compare(station: Station, whole: str, other: str) -> None:
    """Both have finished, with the same weights and the same lines."""
    records = station.record(whole), station.record(other)
    assert [record["state"] for record in records] == ["finished", "finished"], station.logs(other)
    assert records[0]["weights_sha256"] and records[0]["weights_sha256"] == records[1]["weights_sha256"]
    assert records[0]["step"] == records[1]["step"]
    lines = station.run(whole).metrics.read_bytes()
    assert lines == station.run(other).metrics.read_bytes()
    losses = [line["loss"] for line in station.metrics(whole) if "loss" in line]
    assert losses[-1] < 0.9 * losses[0]


def killed_ends_alike(station: Station, script: str, ranks: int) -> None:
    path = SCRIPTS / f"{script}.py"
    launched(station, path, "whole", ranks, "--follow")
    launched(station, path, "killed", ranks)
    kill_twice(station)
    compare(station, "whole", "killed")


def kill_twice(station: Station) -> None:
    """Kill a rank of the run `killed`, later all its processes, and resume it to its end."""
    seed = random.randrange(10**6)
    moments = random.Random(seed)
    wait_for_checkpoint(station, "killed", 0, attempt=1)
    time.sleep(0.2 * moments.random())
    kill([moments.choice(station.record("killed")["pids"]["ranks"])])
    wait_for_checkpoint(station, "killed", saved(station, "killed"), attempt=2)
    time.sleep(0.2 * moments.random())
    pids = station.record("killed")["pids"]
    kill([pids["agent"], *pids["ranks"]])
    assert station.wait_for_end("killed")["state"] == "interrupted", f"moments of seed {seed}"
    station.ok("resume", "killed", "--follow")
    first, *later = [attempt["from_step"] for attempt in station.record("killed")["attempts"]]
    assert first == 0 and 0 < later[0] < later[1], f"moments of seed {seed}"


@pytest.mark.minutes
@pytest.mark.parametrize("script", ["lightning_trainer", "hf_trainer", "accelerate_loop"])
def test_libraries_on_two_ranks(station: Station, script: str) -> None:
    killed_ends_alike(station, script, 2)


@pytest.mark.minutes
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("script", ["lightning_trainer", "hf_trainer", "accelerate_loop"])
def test_libraries_on_other_ranks(station: Station, script: str, ranks: int) -> None:
    killed_ends_alike(station, script, ranks)


@pytest.mark.minutes
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("script", ["fabric", "fsdp2"])
def test_loops_of_their_own(station: Station, script: str, ranks: int) -> None:
    killed_ends_alike(station, script, ranks)


@pytest.mark.minutes
@pytest.mark.parametrize(
    ("script", "ranks", "more", "count", "batches"),
    [
        ("lightning_script", 2, [], 246, 21),
        ("hf_script", 2, [], 132, 11),
        ("hf_script", 1, [40], 132, 11),
    ],
)
def test_what_happens_around_a_batch_and_after_the_training(
    station: Station, script: str, ranks: int, more: list[int], count: int, batches: int
) -> None:
    """Averages, counters, batches that are read before, validations in between, an early end, and a kill after it."""
    path = ROOT / "tests" / "train" / "sessions" / f"{script}.py"
    exists = station.folder / "exists"
    exists.touch()
    launched(station, path, "whole", ranks, "--follow", "--", exists, *more)
    launched(station, path, "killed", ranks, "--", station.folder / "killed-at-the-end", *more)
    kill_twice(station)
    compare(station, "whole", "killed")
    assert len(station.record("killed")["attempts"]) == 4  # the last one had nothing left to train
    whole = station.samples("whole")
    assert sorted(sample for step in range(1, batches + 1) for sample in whole[step]) == list(range(count))
    assert whole == station.samples("killed")
    if script == "hf_script":
        last = station.metrics("killed")[-1]
        assert last["begun"] == last["ended"] == last["step"]


@pytest.mark.minutes
@pytest.mark.parametrize("script", TRAINERS)
def test_a_stop_saves_and_leaves_the_rest_of_the_script_out(station: Station, script: str) -> None:
    loads, forgets = TRAINERS[script]
    end = "    session.finish()"
    text = (SCRIPTS / f"{script}.py").read_text().replace(end, f'    print("AFTER")\n{end}')
    assert loads in text and "AFTER" in text
    path = station.folder / f"{script}.py"
    path.write_text(text)
    launched(station, path, "whole", 2, "--follow")
    launched(station, path, "stopped", 2)
    wait_for_checkpoint(station, "stopped", 0, attempt=1)
    station.ok("stop", "stopped")
    record = station.record("stopped")
    assert record["state"] == "stopped" and record["step"] == saved(station, "stopped"), record
    assert "AFTER" in station.logs("whole") and "AFTER" not in station.logs("stopped")

    path.write_text(text.replace(loads, forgets))
    station.ok("resume", "stopped")
    record = station.wait_for_end("stopped")
    assert record["state"] == "failed" and loads in record["reason"], record
    path.write_text(text)
    station.ok("resume", "stopped", "--follow")
    compare(station, "whole", "stopped")

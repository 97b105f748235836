"""Engines that answer oddly, slowly or not at all, and records that somebody has damaged: a line, and nothing lost."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.cluster.test_from_afar import RUNTIME, Home, pod
from tests.train.cluster.test_kubernetes import CLAIMS, SUBMIT, refused
from tests.train.tiers import later
from train import screen
from train.cluster import kubectl, manifests, trainjob
from train.cluster.submission import Silent
from train.record import folders
from train.record.store import Run
from train.runs.monitor.engines import ASK_EVERY
from train.runs.monitor.look import Runs
from train.runs.top import Page


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def answers(home: Home, text: str) -> None:
    """From now on this is what kubectl does."""
    (home.folder / "bin" / "kubectl").write_text(f"#!/bin/sh\n{text}\n")


BARE = {"kind": "TrainJob", "metadata": {"name": "first"}}
ODD_POD = {"name": "p", "labels": {manifests.RUN: "first", trainjob.INDEX: "x"}}
ODD = [
    "echo garbage", "printf '{\"items\": [{\"ki'", "echo '[]'", "echo null", "echo '{}'", "echo '{\"items\": [5]}'",
    "head -c 300000 /dev/zero | tr '\\0' '['", "printf '\\377\\376'", "kill -9 $$", "printf '\\377' >&2; exit 1",
    f"echo '{json.dumps({'items': [BARE | {'spec': 5}]})}'", f"echo '{json.dumps({'items': [BARE]})}'",
    f"echo '{json.dumps({'items': [BARE | {'spec': {}, 'status': []}]})}'",
    f"echo '{json.dumps({'items': [BARE | {'spec': {}}, BARE | {'kind': 'Pod', 'metadata': ODD_POD}]})}'",
]  # fmt: skip


@pytest.mark.parametrize("text", [*ODD[:4], *later(*ODD[4:])])
def test_what_no_cluster_says_is_no_answer(home: Home, text: str) -> None:
    run = folders.create(home.runs, "first", {}, {"submitted": TAKEN, "task": "digits", "world_size": 1, "nproc": 1})
    answers(home, text)
    listed = home.ok("ls")
    (line,) = listed.stderr.splitlines()
    assert "kubernetes does not answer here" in line and " queued " in listed.stdout
    before = run.read()
    assert "kube" in refused(home, "stop", "first")
    refused(home, "logs", "first")
    assert run.read() == before


TAKEN = {"engine": "kubernetes", "job": "first", "at": "trainstation@test", "handed": "2026-01-01T00:00:00+00:00"}


def test_a_kubectl_that_is_none_is_named(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(home.folder / "bin"))
    for text in ("no program", "#!/nowhere/sh\n"):
        (home.folder / "bin" / "kubectl").write_text(text)
        with pytest.raises(Silent, match="cannot be run"):
            kubectl.current_context()
    answers(home, "exec /bin/sleep 60")
    monkeypatch.setattr(kubectl, "_SLOW", 0.3)
    with pytest.raises(Silent, match="said nothing"):
        kubectl.current_context()


def test_what_was_made_without_an_answer_is_taken_back(home: Home) -> None:
    real = f'{sys.executable} -m tests.train.cluster.kubectl "$@"'
    cut = 'echo "Unable to connect to the server: i/o timeout" >&2; exit 1'
    made = '[ "$(ls "$CLUSTER"/trainstation/TrainJob* 2>/dev/null)" ]'
    answers(home, f'{real}\ncode=$?\ncase "$*" in *" create "*) if {made}; then {cut}; fi;; esac\nexit $code')
    assert "no cluster answers kubectl" in refused(home, *SUBMIT)
    assert home.cluster.there() == CLAIMS
    answers(home, f'case "$*" in *" delete "*) {cut};; esac\n{real}\ncode=$?\ncase "$*" in *" create "*) {cut};; esac')
    line = refused(home, *SUBMIT)
    assert "so did taking it back" in line and "delete --ignore-not-found trainingruntime/trainstation" in line


@pytest.mark.parametrize("unanswered", ["get trainingruntime", "create", "create --filename"])
def test_a_runtime_that_was_there_outlives_a_lost_answer(home: Home, unanswered: str) -> None:
    """Other runs of the namespace begin with it: it is not ours to take back, whichever answer is lost."""
    runtime = manifests.runtime()
    home.cluster.put(runtime | {"metadata": runtime["metadata"] | {"uid": "uid-of-the-runtime"}})
    real = f'{sys.executable} -m tests.train.cluster.kubectl "$@"'
    # `create`: of the first object, which is the TrainJob; `create --filename`: of the one after it
    is_it = '[ "$(ls "$CLUSTER"/trainstation/ConfigMap* 2>/dev/null)" ]' if "--" in unanswered else "true"
    cut = f'if {is_it}; then echo "Unable to connect to the server: i/o timeout" >&2; code=1; fi'
    answers(home, f'{real}\ncode=$?\ncase "$*" in *" {unanswered}"*) {cut};; esac\nexit $code')
    assert "no cluster answers kubectl" in refused(home, *SUBMIT)
    assert home.cluster.there() == CLAIMS | RUNTIME


@pytest.mark.minutes
def test_what_was_handed_over_and_is_damaged_is_not_handed_over_again(home: Home) -> None:
    home.ok(*SUBMIT)
    home.ok("stop", "first")
    before = home.record("first")
    for name, text in (("job.yaml", ""), ("job.yaml", "["), ("job.yaml", "a: 5\n"), ("submission.json", "{")):
        path = home.runs / "first" / name
        whole = path.read_text()
        path.write_text(text)
        assert f"{name} is" in refused(home, "resume", "first")
        path.write_text(whole)
    after = home.record("first")
    assert after | {"submitted": before["submitted"]} == before  # but for when its cluster was heard
    assert home.cluster.read("TrainJob", "first")["spec"]["suspend"] is True
    home.ok("resume", "first")


# --- the page and the figures


def states(runs: Runs) -> dict[str, str]:
    return {record["name"]: record["state"] for record in runs.records()}


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)


def test_the_page_shows_what_ls_shows(home: Home) -> None:
    home.ok(*SUBMIT)
    for node in range(2):
        home.cluster.put(pod(node, "Pending"))
    page = home.ok("top", "--once").stdout
    assert " queued " in page and "0 of 2 pods" not in page and "2 of 2 pods are there; node 0 waits" in page
    for node in range(2):
        home.cluster.put(pod(node, "Running"))
    page = home.ok("top", "--once").stdout
    assert " running " in page and "job first of kubernetes: 2 pods run" in page and "1 alive" in page
    home.cluster.down.touch()  # and nobody has kept what was said
    assert " queued " in home.ok("top", "--once").stdout
    home.cluster.down.unlink()
    home.ok("ls")
    home.cluster.down.touch()
    assert " running " in home.ok("top", "--once").stdout


def test_who_looks_often_waits_for_no_cluster_and_asks_it_rarely(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.ok(*SUBMIT)
    home.cluster.put(pod(0, "Running"))
    home.ok("ls")
    home.cluster.put(pod(1, "Running"))
    for name in ("CLUSTER", "PATH"):
        monkeypatch.setenv(name, home.environment()[name])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    gate = home.folder / "gate"
    real = f'{sys.executable} -m tests.train.cluster.kubectl "$@"'
    answers(home, f"echo >> {home.folder}/asked\nwhile [ ! -e {gate} ]; do sleep 0.1; done\n{real}")
    runs, page = Runs(home.runs), Page(home.runs)
    before = Run(home.runs / "first").read()
    slowest = 0.0
    for _ in range(20):
        begun = time.monotonic()
        assert states(runs) == {"first": "running"}  # the last word
        slowest = max(slowest, time.monotonic() - begun)
    assert slowest < 5
    gate.touch()
    wait_for(lambda: "1 of 2 pods" not in runs.records()[0]["reason"], "an answer")
    asked = (home.folder / "asked").read_text().count("\n")
    begun = time.monotonic()
    while time.monotonic() < begun + min(3.0, ASK_EVERY / 2):
        assert states(runs) == {"first": "running"}
    assert asked == (home.folder / "asked").read_text().count("\n") == 1
    assert any("alive" in screen.printable(row.text) for row in page.rows(120, 50))
    page.ask(60)
    assert Run(home.runs / "first").read() == before  # who looks writes nothing

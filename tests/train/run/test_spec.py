"""What runs, as a process reads it once and hands it down."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from train.nodes.nodes import Nodes, Settings
from train.run import folders
from train.run.run_folder import Run
from train.run.spec import SCRIPT, TASK, Spec, read_spec

CONFIG = 'seed = 0\ncpu_threads = 2\nnone = ["steps"]\n[optim]\nlr = 0.1\n[checkpoint]\nbest = "accuracy"\n'


def made(runs: Path, **record: Any) -> Run:
    return folders.create(runs, "a", files={"config.toml": CONFIG}, record=record)


def test_what_a_record_does_not_say_has_a_default(tmp_path: Path) -> None:
    spec = read_spec(made(tmp_path, task="digits"))
    assert (spec.program, spec.task, spec.max_restarts) == (TASK, "digits", None)
    assert spec.cluster is None and spec.samples is None and spec.warnings == () and not spec.is_submitted
    assert spec.config["optim.lr"] == 0.1 and spec.config["steps"] is None and spec.best_by == "accuracy"


def test_a_field_that_has_no_effect_is_not_among_those_in_use(tmp_path: Path) -> None:
    spec = read_spec(made(tmp_path, task="digits", unused_fields=["optim.lr"], cpu_threads_reason="2 cores"))
    assert "optim.lr" in spec.config and "optim.lr" not in spec.used_config and spec.used_config["seed"] == 0
    assert spec.reasons == {"cpu_threads": "2 cores"}


def test_a_rank_gets_the_very_spec_that_its_agent_has_read(tmp_path: Path) -> None:
    cluster = {"least": 1, "most": 2, "node": 0, "rendezvous": "h:1"}
    record = {"script": "/a.py", "script_arguments": ["--x", "1"], "max_restarts": 0, "cluster": cluster}
    spec = read_spec(made(tmp_path, **record, watch={"hang_minutes": 3}, script_files={"/a.py": "0"}))
    assert spec.program == SCRIPT and spec.max_restarts == 0
    assert Spec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_nothing_changes_a_spec(tmp_path: Path) -> None:
    run = made(tmp_path, task="digits")
    spec = read_spec(run)
    run.update(max_restarts=9)
    assert spec.max_restarts is None and read_spec(run).max_restarts == 9
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.max_restarts = 1  # type: ignore[misc]


@pytest.mark.parametrize(("node", "threads"), [(0, 2), (1, 4)])
def test_ranks_on_another_node_run_what_node_0_has_chosen(tmp_path: Path, node: int, threads: int) -> None:
    run = made(tmp_path, task="digits", chosen=["cpu_threads"])
    nodes = object.__new__(Nodes)
    nodes.run, nodes.settings = run, Settings(least=2, most=2, node=node, rendezvous="h:1")
    published = {"hello": {"chosen": {"cpu_threads": 4}}}
    nodes._rendezvous = SimpleNamespace(others={0: published})  # type: ignore[assignment]
    spec = nodes.take_over(read_spec(run))
    assert spec.config["cpu_threads"] == threads and spec.config["seed"] == 0
    assert read_spec(run) == spec, "config.toml says the same as what the ranks are given"

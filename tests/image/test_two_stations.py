"""The profile `cluster`: a second station beside the first, the same in all but what makes it another machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from conftest import run

ROOT = Path(__file__).parents[2]
BASE, CPU = ("--file", "docker-compose.yml"), ("--file", "docker-compose.cpu.yml")


def services(*arguments: str) -> dict[str, Any]:
    env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    told = run("docker", "compose", *arguments, "config", "--format", "json", cwd=ROOT, env=env)
    return dict(json.loads(told.stdout)["services"])


@pytest.mark.parametrize("files", [BASE, (*BASE, *CPU)])
def test_there_is_a_second_station_where_it_is_asked_for_and_nothing_of_it_is_published(files: tuple[str, ...]) -> None:
    assert "second" not in services(*files)
    found = services(*files, "--profile", "cluster")
    first, second = found["station"], found["second"]
    assert not second.get("ports") and len(first["ports"]) == 2
    differing = {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}
    assert differing == {"hostname", "ports", "profiles", "volumes"}
    assert second["hostname"] == f"{first['hostname']}-second"
    own = {one["target"]: one["source"] for one in second["volumes"] if one not in first["volumes"]}
    assert own == {"/workspace/runs": "second-runs", "/home/dev": "second-home"}
    assert {one["target"] for one in first["volumes"]} == {one["target"] for one in second["volumes"]}

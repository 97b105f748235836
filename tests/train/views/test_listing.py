"""`train show` tells what to type next: commands that the real parser takes, for every state of a run."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from train.commands import parser
from train.monitor.status import next_command
from train.run import states

TASK = {"task_source": "/home/me/a task.py"}
SCRIPT = {"script": "train.py"}
NODES = {"cluster": {"least": 2, "most": 2, "node": 0, "rendezvous": "node0:29400"}}


@pytest.mark.parametrize("more", [{}, TASK, SCRIPT, NODES], ids=["built-in", "task", "script", "nodes"])
@pytest.mark.parametrize("state", states.ALL)
def test_every_state_has_commands_that_parse(state: str, more: dict[str, Any]) -> None:
    record: Any = {"name": "demo1", "state": state, **more}
    text = (
        next_command(record).replace(" on each machine", "").replace(" (this executes the code in the run folder)", "")
    )
    if state == states.FINISHED and more == SCRIPT:
        assert text == ""
        return
    for part in text.split("; "):
        command = re.fullmatch(r"[a-z ]+: train (.+)", part)
        assert command, text
        name, *arguments = shlex.split(command[1])
        options = parser.parse(parser.parser_of(name), arguments)
        named = (getattr(options, "name", None), getattr(options, "task", None), *getattr(options, "names", ()))
        assert "demo1" in named or name == "launch"


def test_a_run_of_another_user_has_nothing_to_type() -> None:
    record: Any = {"name": "demo1", "state": states.STOPPED, "owner": "them"}
    assert next_command(record) == ""

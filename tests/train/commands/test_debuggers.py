"""The debuggers of docs/debugging.md: breakpoint() in the terminal with one rank and with two, and an editor's."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.docs import pages
from tests.ports import free_port
from tests.train.terminal import Terminal
from tests.waiting import eventually
from train.run import states

if TYPE_CHECKING:
    from tests.train.conftest import Station

pytestmark = pytest.mark.turns

pytest.importorskip("debugpy")
PAGE = Path(__file__).parents[3] / "docs" / "debugging.md"


@pytest.fixture
def tasks(station: Station) -> Station:
    """A station with the files of the page."""
    for block in pages.read(PAGE).blocks:
        if block.file:
            (station.folder / block.file).write_text(block.text)
    return station


def wait_for(terminal: Terminal, text: str, times: int) -> None:
    eventually(f"{text} {times} times", lambda: terminal.output.count(text) == times)


def continue_to_end(terminal: Terminal, stops: int) -> None:
    """Look at a value where the task stops, and continue, so many times."""
    for number in range(1, stops + 1):
        wait_for(terminal, "(Pdb)", 2 * number - 1)
        terminal.type("p error.shape\n")
        wait_for(terminal, "torch.Size([", number)
        wait_for(terminal, "(Pdb)", 2 * number)
        terminal.type("c\n")
    assert terminal.end() == 0, terminal.output


def test_breakpoint_stops_a_foreground_run_in_the_terminal(tasks: Station) -> None:
    terminal = Terminal(tasks, "run", "stop.py", "--name", "demo2", "--steps", "2", "--watch.hang_minutes", "0")
    continue_to_end(terminal, 2)
    assert "demo2/task.py" in terminal.output
    assert tasks.record("demo2")["state"] == states.FINISHED


def test_breakpoint_on_rank_0_of_two_stops_it_while_the_other_one_waits(tasks: Station) -> None:
    more = ["--watch.hang_minutes", "0", "--parallel.timeout_minutes", "600"]
    terminal = Terminal(tasks, "run", "stop0.py", "--name", "demo3", "--spawn", "2", "--steps", "2", *more)
    continue_to_end(terminal, 2)
    assert tasks.record("demo3")["world_size"] == 2


def test_breakpoint_without_a_terminal_ends_the_run_with_one_line(tasks: Station) -> None:
    way = f"train run {tasks.folder / 'stop.py'} --watch.hang_minutes 0"
    done = tasks("launch", "stop.py", "--name", "a", "--steps", 2, "--follow")
    line = f"breakpoint() in loss(), line 9: a launched run has no terminal; to debug with one rank: {way}"
    assert done.returncode == 3 and tasks.record("a")["reason"] == line
    printed = done.stderr + (tasks.run("a").logs(1) / "rank0.log").read_text()
    assert line in done.stderr and "Traceback" not in printed
    one = tasks.folder / "stop1.py"
    one.write_text((tasks.folder / "stop0.py").read_text().replace('== "0"', '== "1"'))
    done = tasks("run", one, "--name", "b", "--spawn", 2, "--steps", 2)
    assert done.returncode == 3 and f"rank 1 has no terminal; to debug with one rank: train run {one}" in done.stderr
    done = tasks("launch", "stop.py", "--name", "c", "--steps", 2, "--follow", env={"PYTHONBREAKPOINT": "0"})
    assert done.returncode == 0, done.stderr


def test_breakpoint_in_what_is_checked_stops_in_the_run_alone(tasks: Station) -> None:
    text = (tasks.folder / "spiral.py").read_text().replace("return nn.Seq", "breakpoint()\n    return nn.Seq")
    (tasks.folder / "spiral.py").write_text(text)
    terminal = Terminal(tasks, "run", "spiral.py", "--name", "d", "--steps", "2", "--watch.hang_minutes", "0")
    wait_for(terminal, "(Pdb)", 1)
    terminal.type("c\n")
    assert terminal.end() == 0, terminal.output


def test_breakpoint_in_a_data_worker_names_the_way(tasks: Station) -> None:
    collate = "def collate(items):\n    breakpoint()\n\n\ndef model"
    (tasks.folder / "spiral.py").write_text((tasks.folder / "spiral.py").read_text().replace("def model", collate))
    done = tasks("run", "spiral.py", "--name", "e", "--steps", 2, "--data.workers", 1)
    assert done.returncode == 3 and "a data worker has no terminal; use --data.workers 0" in done.stderr, done.stderr


class Editor:
    """An editor as debugpy sees it: the requests of the Debug Adapter Protocol."""

    def __init__(self, port: int) -> None:
        self._socket = socket.socket()
        eventually("the task waits", lambda: self._socket.connect_ex(("127.0.0.1", port)) == 0)
        self._file = self._socket.makefile("rwb")
        self._numbers = itertools.count(1)

    def ask(self, command: str, **arguments: Any) -> None:
        request = {"seq": next(self._numbers), "type": "request", "command": command, "arguments": arguments}
        text = json.dumps(request).encode()
        self._file.write(b"Content-Length: %d\r\n\r\n%s" % (len(text), text))
        self._file.flush()

    def hear(self, kind: str) -> dict[str, Any]:
        """The next answer to this command, or the next event of this name."""
        return next(one.get("body", {}) for one in self._messages() if kind in (one.get("command"), one.get("event")))

    def _messages(self) -> Iterator[dict[str, Any]]:
        while header := self._file.readline():
            self._file.readline()
            yield json.loads(self._file.read(int(header.split(b":")[1])))


@pytest.mark.parametrize("command", ["run", "launch"])
def test_an_editor_stops_where_the_task_says_breakpoint(tasks: Station, command: str) -> None:
    port, source = free_port(), tasks.folder / "editor.py"
    source.write_text(source.read_text().replace("5678", str(port)))
    more = ["--watch.hang_minutes", "0", "--watch.start_minutes", "600"]
    if command == "run":
        running = tasks.start("run", "editor.py", "--name", "demo4", "--steps", "2", *more)
    else:
        tasks.ok("launch", "editor.py", "--name", "demo4", "--steps", "2", *more)
    editor = Editor(port)
    editor.ask("initialize", adapterID="test", pathFormat="path")
    editor.hear("initialize")
    editor.ask("attach", justMyCode=False)
    editor.hear("initialized")
    editor.ask("configurationDone")
    for _ in range(2):
        thread = editor.hear("stopped")["threadId"]
        editor.ask("stackTrace", threadId=thread)
        top = editor.hear("stackTrace")["stackFrames"][0]
        assert top["source"]["path"].endswith("/demo4/task.py")
        editor.ask("evaluate", expression="tuple(error.shape)", frameId=top["id"])
        assert editor.hear("evaluate")["result"] == "(64, 1)"
        editor.ask("continue", threadId=thread)
    if command == "run":
        assert running.wait(120) == 0
    assert tasks.wait_for_end("demo4")["state"] == states.FINISHED

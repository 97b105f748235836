"""Runs in a real Jupyter kernel: what a cell shows, an interrupt, a restart."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from tests.train.conftest import PATIENCE, Station


class Kernel:
    """A kernel, and a client that executes cells."""

    def __init__(self, station: Station) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=station.environment("launch"), cwd=str(station.folder))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(PATIENCE)

    def restart(self) -> None:
        self.manager.restart_kernel(now=True)
        self.client.wait_for_ready(PATIENCE)

    def run(self, code: str, meanwhile: Callable[[list[Any]], object] = lambda shown: None) -> list[tuple[str, Any]]:
        """Execute a cell. Returns its messages: the type and the content of each."""
        cell, shown, deadline = self.client.execute(code), list[Any](), time.monotonic() + PATIENCE
        while True:
            meanwhile(shown)
            assert time.monotonic() < deadline, shown
            try:
                message = self.client.get_iopub_msg(timeout=0.2)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != cell:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return shown
            if message["msg_type"] not in ("status", "execute_input"):
                shown.append((message["msg_type"], message["content"]))

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(station: Station) -> Iterator[Kernel]:
    made = Kernel(station)
    yield made
    made.close()


def result(shown: list[tuple[str, Any]]) -> str:
    """The value of the last line of a cell."""
    return str(next(content["data"]["text/plain"] for kind, content in shown if kind == "execute_result"))


@pytest.mark.minutes
def test_a_cell_waits_and_neither_an_interrupt_nor_a_restart_touches_the_run(kernel: Kernel, station: Station) -> None:
    assert kernel.run("import sys, trainstation as ts; assert 'torch' not in sys.modules") == []
    ((kind, refused),) = kernel.run("ts.find('absent')")
    assert kind == "error" and refused["traceback"] == [f"Refused: {refused['evalue']}"]
    assert "there is no run absent" in refused["evalue"]
    code = "run = ts.launch('digits', name='long', nproc=2, epochs=2000, cpu_threads=1, optim={'lr': 0.01})"
    assert kernel.run(code) == []
    station.wait_for_step("long", 3)

    def interrupt(shown: list[Any]) -> None:
        if len(shown) == 3:
            os.kill(kernel.manager.provisioner.pid, 2)

    *shown, (kind, left) = kernel.run("run.wait()", interrupt)
    first, *others = [content for _, content in shown]
    assert [kind for kind, _ in shown[:3]] == ["display_data", "update_display_data", "update_display_data"]
    assert len({content["transient"]["display_id"] for content in (first, *others)}) == 1  # in place
    assert all(part in others[-1]["data"]["text/html"] for part in ("<b>long</b>", "running", "<polyline"))
    assert kind == "error" and left["traceback"] == [
        "KeyboardInterrupt: long continues; to wait for it again: run.wait()"
    ]
    assert station.run("long").read_effective()["state"] == "running"

    before = station.record("long")["pids"]
    kernel.restart()
    assert result(kernel.run("import trainstation as ts; run = ts.find('long'); run.state")) == "'running'"
    assert station.record("long")["pids"] == before
    assert result(kernel.run("run.plot()")).startswith("<Figure") and "finished" not in result(kernel.run("run"))
    kernel.run("run.stop()")
    assert station.record("long")["state"] == "stopped"
    again = kernel.run("run.resume(nproc=1); run.wait(timeout=1)")
    assert result(again) == "'running'"
    kernel.run("run.stop(now=True)")
    assert [attempt["end"] for attempt in station.record("long")["attempts"]] == ["stopped", "stopped"]

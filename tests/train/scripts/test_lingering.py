"""A script that has done its work and does not end is told so, with the thread for which Python waits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import eventually
from train.scripts import lingering

THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(600,), name="beater").start()
"""
CHILD = "import multiprocessing, time\nmultiprocessing.Process(target=time.sleep, args=(600,)).start()\n"
SPIED = 'Process 7: python a.py\n\nThread 7 (idle): "MainThread"\n    wait (threading.py:331)\n    <module> (a.py:2)\n'


@pytest.mark.parametrize(("text", "last"), [(THREAD, "does not end (beater)"), (CHILD, "does not end")])
def test_a_rank_that_waits_at_its_exit_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, last: str
) -> None:
    monkeypatch.setattr(lingering, "_IDLE", 0.2)
    monkeypatch.setattr(lingering, "_LOOK_EVERY", 0.1)
    (tmp_path / "a.py").write_text(text)
    lines: list[str] = []
    one = lingering.Lingering(lines.append)

    def is_told() -> bool:
        one.look({0: process.pid})
        return bool(lines)

    with subprocess.Popen([sys.executable, str(tmp_path / "a.py")], start_new_session=True) as process:
        try:
            if subprocess.run(lingering.spy(process.pid), capture_output=True, check=False).returncode:
                pytest.skip("py-spy may not look at processes here")
            eventually("it is told", is_told)
        finally:
            one.close()
            subprocess.run(["kill", "-9", "--", f"-{process.pid}"], check=True)
    assert len(lines) == 1 and lines[0].startswith("rank 0 has done its work") and lines[0].endswith(last)


def test_a_rank_that_waits_within_its_work_is_not_told() -> None:
    assert lingering.waits_for(SPIED) is None and lingering.waits_for("") is None
    assert lingering.waits_for(SPIED.replace("<module> (a.py:2)", "_shutdown (threading.py:1590)")) == []

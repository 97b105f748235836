"""Signals that ask for a stop ask the process that listens, and none that its task has forked."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import multiprocessing, os, signal, time
from train.signals import StopRequest

stop = StopRequest()
for _ in range(20):
    with multiprocessing.get_context("fork").Pool(2) as pool:  # at its end it terminates its processes, and waits
        assert pool.map(abs, [-1, -2]) == [1, 2]
sleeper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1e6,))
sleeper.start()
os.kill(sleeper.pid, signal.SIGINT)  # from a terminal it comes to all of them, and asks the run to save first
sleeper.join(0.5)
assert sleeper.is_alive()
sleeper.terminate()
sleeper.join(30)
assert sleeper.exitcode == -signal.SIGTERM, sleeper.exitcode
assert not stop.asked
os.kill(os.getpid(), signal.SIGTERM)
assert stop.asked and stop.reason == "SIGTERM"
"""


def test_processes_of_the_tasks_own_come_to_their_end_when_they_are_terminated() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)


EARLY = """
import os, signal
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
from train.signals import StopRequest

stop = StopRequest()
pid = os.fork()
if not pid:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""


def test_a_fork_that_is_terminated_as_it_begins_comes_to_its_end() -> None:
    subprocess.run([sys.executable, "-c", EARLY], check=True, timeout=60)

"""Who died first, why, and what becomes of the run: every situation that there is, as a row."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from typing import Any

import pytest

from train import causes, programs, signals
from train.nodes.node_reports import merged, report_of
from train.run.outcome import Kind, Outcome
from train.supervise.decide import Decision, Facts, LaunchMode, StopCause, decide, who_died

pytestmark = pytest.mark.never_forgiven

KILL, TERM, ABRT, SEGV = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGABRT, -signal.SIGSEGV
LAUNCHED, FOREGROUND, TORCHRUN = LaunchMode.LAUNCHED, LaunchMode.FOREGROUND, LaunchMode.TORCHRUN
USER = StopCause(signals.USER, "train stop")
USER_NOW = StopCause(signals.USER, "train stop --now", now=True)
OF_KEEPER = StopCause(signals.KEEPER, "the keeper")
TERMINATED = StopCause(signals.SIGNAL, "SIGTERM")
TWICE = StopCause(signals.CTRL_C, "Ctrl-C twice", now=True)

LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer"
TRACEBACK = 'Traceback (most recent call last):\n  File "script.py", line 3, in <module>\n    main()\n'
LEFT = "rank 1 exited with code 1"
NO_PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242\n"
BOTH = f"ValueError: label 17\n\nDuring handling of the above exception, another came:\n\n{TRACEBACK}{NO_PEER}"
NO_SERVER = "URLError: <urlopen error [Errno 111] Connection refused>"
RELATIVE = "ImportError: attempted relative import with no known parent package"
NEEDED = "the following arguments are required: --local_rank"
SPAWNED = """RuntimeError:
        An attempt has been made to start a new process before the
        current process has finished

"""
NO_WORKER = "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly\n"
LOADER = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.\n"
REFUSED_MEMORY = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
CHECK = "; see: train doctor --only 'memory'"
WAY = f"{causes.MEMORY.remedy}{CHECK}"
BUSY = TRACEBACK + "RuntimeError: can't start new thread\n"


def facts(mode: LaunchMode, outcomes: tuple[Outcome, ...] = (), **more: Any) -> Facts:
    """Of a run `a` on two ranks that may be started again three times."""
    given: dict[str, Any] = {
        "name": "a", "program": programs.TASK, "ranks": 2, "max_restarts": 3, "no_progress": "without a new checkpoint",
        "refused_at": "8 GiB",
    }  # fmt: skip
    return Facts(mode=mode, outcomes={each.rank: each for each in outcomes}, **given | more)


def died(rank: int, reason: str, recurs: bool, at: float = 1.0) -> Outcome:
    return Outcome(rank=rank, kind=Kind.DIED, reason=reason, recurs=recurs, time=at)


def of_script(outcomes: tuple[Outcome, ...] = (), **more: Any) -> Facts:
    """Of a script, which by default is never started again."""
    given = {"program": programs.SCRIPT, "no_progress": "before it had run 10 minutes", "max_restarts": 0}
    return facts(LAUNCHED, outcomes, **given | more)


finished = Outcome(rank=0, kind=Kind.FINISHED, step=9, figures={"weights_sha256": "ab", "epoch": 1})
stopped = Outcome(rank=0, kind=Kind.STOPPED, step=5, reason="SIGTERM", figures={"epoch": 1})
pulled = Outcome(rank=0, kind=Kind.STOPPED, step=5, reason="another rank was asked to")
nan = Outcome(rank=0, kind=Kind.FAILED, step=3, reason="the loss is nan at step 3", recurs=True)
nan_1 = Outcome(rank=1, kind=Kind.FAILED, step=3, reason="the loss is nan at step 3", recurs=True)
refused = Outcome(rank=0, kind=Kind.REFUSED, step=0, reason="task.py is missing; put the task's copy back", recurs=True)

ENDS: list[tuple[str, Facts, dict[str, Any]]] = [
    # rank 0 has brought it to an end
    ("finished", facts(LAUNCHED, (finished,)),
     {"end": "finished", "state": "finished", "reason": "", "code": 0,
      "figures": {"weights_sha256": "ab", "epoch": 1, "step": 9}}),
    ("finished, and killed while it left", facts(FOREGROUND, (finished,), exits={0: KILL}),
     {"end": "finished", "state": "finished", "code": 0, "again": False}),
    ("finished before the stop came", facts(LAUNCHED, (finished,), asked=USER),
     {"state": "finished", "stopped_by": None, "reason": ""}),
    ("finished before the second Ctrl-C", facts(FOREGROUND, (finished,), asked=TWICE),
     {"state": "finished", "code": 0}),
    ("finished, and a peer lost its connection", facts(LAUNCHED, (finished, died(1, LOST, False)), exits={1: 1}),
     {"state": "finished", "message": ""}),
    ("a signal to a rank", facts(LAUNCHED, (stopped,)),
     {"end": "stopped", "state": "stopped", "reason": "stopped after step 5 (SIGTERM)", "stopped_by": "signal",
      "code": 75, "figures": {"epoch": 1, "step": 5}}),
    ("a signal to another rank", facts(TORCHRUN, (pulled,)),
     {"state": "stopped", "reason": "stopped after step 5 (another rank was asked to)", "stopped_by": "signal"}),
    ("train stop, passed on as a signal", facts(LAUNCHED, (stopped,), asked=USER),
     {"state": "stopped", "reason": "stopped after step 5 (train stop)", "stopped_by": "user"}),
    ("the same of spawned ranks", facts(FOREGROUND, (stopped,), asked=USER),
     {"state": "stopped", "reason": "stopped after step 5 (train stop)", "stopped_by": "user", "code": 75}),
    ("the keeper leaves", facts(LAUNCHED, (stopped,), asked=OF_KEEPER),
     {"reason": "stopped after step 5 (the keeper)", "stopped_by": "keeper"}),
    ("saved before the second Ctrl-C", facts(FOREGROUND, (stopped,), asked=TWICE),
     {"state": "stopped", "reason": "stopped after step 5 (Ctrl-C twice)", "code": 75}),
    ("all ranks meet a loss that is nan", facts(LAUNCHED, (nan, nan_1)),
     {"end": "failed", "state": "failed", "reason": nan.reason, "message": "", "code": 3}),
    ("rank 0 is refused before it met the others", facts(LAUNCHED, (refused,), exits={0: 1}),
     {"end": "failed", "state": "failed", "reason": refused.reason}),

    # nobody says how it ended, but it was asked to stop
    ("stopped while it started", facts(LAUNCHED, asked=USER, exits={0: TERM, 1: TERM}, is_ready=False),
     {"end": "stopped", "state": "stopped", "reason": "stopped (train stop)", "stopped_by": "user", "code": 75}),
    ("stopped between two attempts", facts(LAUNCHED, asked=USER, saved=4),
     {"state": "stopped", "reason": "stopped (train stop); the last checkpoint is of step 4"}),
    ("a rank was killed while they saved", facts(LAUNCHED, asked=TERMINATED, exits={1: KILL}, saved=4),
     {"state": "stopped", "stopped_by": "signal",
      "reason": "stopped (SIGTERM), and rank 1 died of SIGKILL; the last checkpoint is of step 4"}),
    ("the same of spawned ranks", facts(FOREGROUND, (died(0, LOST, False),), asked=USER, exits={1: KILL}),
     {"state": "stopped", "reason": "stopped (train stop), and rank 1 died of SIGKILL", "code": 75}),
    ("the task failed while they saved", facts(LAUNCHED, (died(1, "ValueError: bad", True),), asked=USER, exits={1: 1}),
     {"end": "died", "state": "failed", "reason": "rank 1: ValueError: bad", "code": 3}),
    ("stop --now", facts(LAUNCHED, asked=USER_NOW, exits={0: KILL, 1: KILL}, saved=4),
     {"state": "stopped", "reason": "stopped (train stop --now); the last checkpoint is of step 4"}),
    ("stop --now of spawned ranks", facts(FOREGROUND, asked=USER_NOW, exits={0: KILL}),
     {"state": "stopped", "reason": "stopped (train stop --now)", "code": 75}),
    ("stop --now of a torchrun", facts(TORCHRUN, asked=USER_NOW),
     {"state": "stopped", "reason": "stopped at once (train stop --now)"}),
    ("Ctrl-C twice", facts(FOREGROUND, (died(0, LOST, False),), asked=TWICE, exits={0: 1}, saved=4),
     {"end": "stopped", "state": "stopped", "stopped_by": "ctrl-c", "code": 130,
      "message": "a was ended at once, without saving; train resume a continues after step 4",
      "reason": "stopped at once (Ctrl-C twice); the last checkpoint is of step 4"}),
    ("Ctrl-C twice, nothing saved", facts(FOREGROUND, asked=TWICE),
     {"reason": "stopped at once (Ctrl-C twice); there is no checkpoint", "code": 130}),

    # somebody died
    ("a rank was killed", facts(LAUNCHED, (died(0, LOST, False),), exits={0: 1, 1: KILL}),
     {"end": "died", "state": None, "why": "rank 1 died of SIGKILL", "rank": 1, "again": True, "wait": 0.0,
      "message": "rank 1 died of SIGKILL; restarting (1 of 3 without progress)", "deaths": 1, "reason": None}),
    ("it was killed before, but has saved since", facts(LAUNCHED, exits={0: SEGV}, deaths=3, progress=True),
     {"why": "rank 0 died of SIGSEGV", "again": True, "deaths": 1}),
    ("one death too many", facts(LAUNCHED, exits={0: KILL}, deaths=3),
     {"state": "failed", "again": False, "why": "rank 0 died of SIGKILL", "end": "died",
      "reason": "died 4 times without a new checkpoint: rank 0 died of SIGKILL", "code": 3}),
    ("no restarts, nothing saved", facts(LAUNCHED, exits={0: KILL}, max_restarts=0),
     {"state": "failed", "reason": "died 1 time without a new checkpoint: rank 0 died of SIGKILL"}),
    ("no restarts, but saved", facts(LAUNCHED, exits={0: KILL}, max_restarts=0, progress=True),
     {"state": None, "reason": "rank 0 died of SIGKILL; no restarts are left", "again": False, "code": 3}),
    ("an exception of the task", facts(LAUNCHED, (died(1, "ValueError: bad", True), died(0, LOST, False, 0.5))),
     {"end": "died", "state": "failed", "reason": "rank 1: ValueError: bad", "rank": 1}),
    ("a failure of one rank alone", facts(LAUNCHED, (nan_1, died(0, LOST, False)), exits={1: 1}),
     {"state": "failed", "reason": "rank 1: the loss is nan at step 3"}),
    ("a disk that did not answer", facts(LAUNCHED, (died(0, "OSError: [Errno 5] I/O", False),), exits={0: 1}),
     {"state": None, "again": True, "why": "rank 0: OSError: [Errno 5] I/O"}),
    ("a busy machine", facts(LAUNCHED, (died(0, "RuntimeError: can't start new thread", False),), exits={0: 1}),
     {"again": True, "wait": 2.0}),
    ("a machine that stays busy", facts(LAUNCHED, exits={0: 1}, logs={0: BUSY}, deaths=9, max_restarts=20),
     {"again": True, "wait": 30.0}),
    ("the ranks cannot be started", facts(LAUNCHED, exits={0: 1}, problem="can't start new thread"),
     {"why": "the ranks cannot be started: can't start new thread", "again": True, "wait": 2.0}),
    ("a hang", facts(LAUNCHED, exits={0: KILL, 1: KILL}, hang="no progress for 9 s while training after step 3"),
     {"why": "no progress for 9 s while training after step 3", "again": True, "rank": None}),
    ("a code that nobody explains", facts(LAUNCHED, exits={1: 7}),
     {"why": "rank 1 exited with code 7; see: train logs a --rank 1", "again": True}),
    ("nobody says anything", facts(LAUNCHED), {"why": "the ranks ended without a report", "again": True}),
    ("killed for memory", facts(LAUNCHED, exits={1: KILL}, killed_at="the 2 GiB of this machine"),
     {"state": "failed",
      "reason": f"out of memory: rank 1 was killed at the 2 GiB of this machine; {WAY}"}),
    ("its loader killed for memory",
     facts(LAUNCHED, (died(0, LOADER, False),), exits={0: 1}, logs={0: LOADER}, killed_at="1 GiB"),
     {"state": "failed", "reason": f"out of memory: a process of rank 0 was killed at 1 GiB; {WAY}"}),
    ("a hang while another process was killed for memory",
     facts(LAUNCHED, exits={0: KILL}, hang="H", killed_at="1 GiB"),
     {"state": None, "why": "H", "again": True}),

    # nobody starts spawned ranks again
    ("a spawned rank was killed", facts(FOREGROUND, (died(0, LOST, False),), exits={1: KILL, 0: 1}),
     {"end": "died", "state": None, "again": False, "code": 3,
      "reason": "rank 1 died of SIGKILL; continue with: train resume a",
      "message": "rank 1 died of SIGKILL; continue with: train resume a"}),
    ("a spawned rank left with a code", facts(FOREGROUND, exits={0: 7}),
     {"state": None, "reason": "rank 0 exited with code 7; see: train logs a --rank 0; continue with: train resume a"}),
    ("an exception of a spawned rank", facts(FOREGROUND, (died(1, "ValueError: bad", True),), exits={0: ABRT, 1: 1}),
     {"end": "failed", "state": "failed", "reason": "rank 1: ValueError: bad", "message": "rank 1: ValueError: bad"}),
    ("one that passes", facts(FOREGROUND, (died(1, "OSError: [Errno 5] I/O", False),), exits={1: 1}),
     {"state": "failed", "reason": "rank 1: OSError: [Errno 5] I/O"}),
    ("a spawned rank killed for memory", facts(FOREGROUND, exits={0: KILL}, killed_at="1 GiB"),
     {"state": "failed", "reason": f"out of memory: rank 0 was killed at 1 GiB; {WAY}"}),
    ("an exception in one process", facts(FOREGROUND, (died(0, "ValueError: bad", True),), ranks=1),
     {"end": "failed", "state": "failed", "reason": "ValueError: bad", "message": "ValueError: bad", "code": 3}),
    ("the same after a request to stop", facts(FOREGROUND, (died(0, "OSError: full", False),), asked=TERMINATED),
     {"state": "failed", "reason": "rank 0: OSError: full"}),
    ("a death under a torchrun of somebody else", facts(TORCHRUN, (died(0, LOST, False),)),
     {"end": "died", "state": None, "why": f"rank 0: {LOST}", "reason": None, "again": False}),

    # scripts: their exit codes and last words are all there is
    ("a script ends", of_script(), {"end": "finished", "state": "finished", "reason": "", "code": 0}),
    ("a script ends after train stop", of_script(asked=USER),
     {"state": "stopped", "reason": "stopped (train stop); the script ended by itself on SIGTERM, with code 0"}),
    ("a script dies of train stop", of_script(asked=USER, exits={0: TERM, 1: TERM}, is_ready=False),
     {"state": "stopped",
      "reason": "stopped (train stop); the script died of SIGTERM, which it does not handle"}),
    ("a script raises on train stop",
     of_script(asked=USER, exits={0: 1}, logs={0: TRACEBACK + "KeyError: 1\n"}, is_ready=False),
     {"state": "stopped", "reason": "stopped (train stop); the script ended by itself on SIGTERM, with code 1"}),
    ("a script is refused by itself, at a stop too", of_script(asked=USER, exits={0: 2}, is_ready=False),
     {"state": "stopped", "reason": "stopped (train stop); the script ended by itself on SIGTERM, with code 2"}),
    ("a script leaves with a code", of_script(exits={1: 1}, logs={1: TRACEBACK + "ValueError: bad shape\n"}),
     {"end": "died", "rank": 1, "reason": f"{LEFT}: ValueError: bad shape; see: train logs a --rank 1"}),
    ("a rank of a script misses the rank that is the cause",
     of_script(exits={0: 1, 1: 1}, logs={0: TRACEBACK + NO_PEER, 1: TRACEBACK + NO_PEER, 2: TRACEBACK + BOTH}),
     {"rank": 2, "reason": "rank 2: ValueError: label 17; see: train logs a --rank 2"}),
    ("every rank of a script misses another", of_script(exits={1: 1}, logs={0: "", 1: TRACEBACK + NO_PEER}),
     {"rank": 1, "reason": f"{LEFT}: {NO_PEER.strip()}; see: train logs a --rank 1; likely another rank that is gone, "
      "or the network between the ranks: train doctor --job"}),
    ("a script needs a server", of_script(exits={1: 1}, logs={1: TRACEBACK + f"urllib.error.{NO_SERVER}"}),
     {"reason": f"{LEFT}: urllib.error.{NO_SERVER}; see: train logs a --rank 1; likely the internet, or a proxy on the "
      "way there"}),
    ("a script of a package", of_script(exits={1: 1}, logs={1: TRACEBACK + RELATIVE}, max_restarts=3),
     {"state": "failed", "reason": f"{LEFT}: {RELATIVE}; start it as a module, from the folder above its package: "
      "train launch --module PACKAGE.NAME; see: train logs a --rank 1"}),
    ("a script of before torchrun", of_script(exits={0: 2}, logs={0: f"a.py: error: {NEEDED}"}),
     {"state": "failed", "reason": f"rank 0 exited with code 2, so it is not restarted: a.py: error: {NEEDED}; like "
      "torchrun, the launcher passes no --local_rank; read int(os.environ[\"LOCAL_RANK\"]); see: train logs a --rank "
      "0"}),
    ("a data worker of a script imports the script",
     of_script(exits={1: 1}, logs={1: TRACEBACK + SPAWNED + TRACEBACK + NO_WORKER}, max_restarts=3),
     {"state": "failed", "reason": f"{LEFT}: RuntimeError: An attempt has been made to start a new process before the "
      "current process has finished; put what the script does below: if __name__ == '__main__':; see: train logs a "
      "--rank 1"}),
    ("a script is killed", of_script(exits={0: 1, 1: KILL}), {"state": "failed", "reason": "rank 1 died of SIGKILL"}),
    ("a script is killed that may be restarted", of_script(exits={0: 1, 1: KILL}, max_restarts=2),
     {"state": None, "why": "rank 1 died of SIGKILL", "again": True, "deaths": 1,
      "message": "rank 1 died of SIGKILL; restarting (1 of 2 without progress)"}),
    ("a script raises that may be restarted", of_script(exits={0: 1}, max_restarts=2, deaths=1),
     {"state": None, "why": "rank 0 exited with code 1; see: train logs a --rank 0", "again": True, "deaths": 2}),
    ("a script dies again and again", of_script(exits={0: KILL}, deaths=2, max_restarts=2),
     {"state": "failed", "reason": "died 3 times before it had run 10 minutes: rank 0 died of SIGKILL"}),
    ("a script ran well before it died", of_script(exits={0: KILL}, deaths=2, max_restarts=2, progress=True),
     {"again": True, "deaths": 1}),
    ("a script ran well, but may not be restarted", of_script(exits={0: KILL}, progress=True),
     {"state": "failed", "reason": "rank 0 died of SIGKILL", "again": False}),
    ("a script refuses its arguments", of_script(exits={0: 2, 1: KILL}, max_restarts=9),
     {"state": "failed", "rank": 0,
      "reason": "rank 0 exited with code 2, so it is not restarted; see: train logs a --rank 0"}),
    ("a rank that was ended because of another is not the first",
     of_script(exits={0: TERM, 1: 3}), {"reason": "rank 1 exited with code 3; see: train logs a --rank 1"}),
    ("memory is refused to a script", of_script(exits={0: ABRT}, logs={0: REFUSED_MEMORY}, max_restarts=9),
     {"state": "failed",
      "reason": f"rank 0 died of SIGABRT: out of memory (what(): std::bad_alloc): 8 GiB; {causes.MEMORY.remedy}; see: "
      f"train logs a --rank 0{CHECK}"}),
    ("the kernel kills a script for memory", of_script(exits={1: KILL}, killed_at="1 GiB", max_restarts=9),
     {"state": "failed", "reason": f"out of memory: rank 1 was killed at 1 GiB; {WAY}"}),
    ("a machine is too busy for a script", of_script(exits={0: 1}, logs={0: BUSY}, max_restarts=9),
     {"again": True, "wait": 2.0, "why": "rank 0 exited with code 1: RuntimeError: can't start new thread; see: train "
      "logs a --rank 0"}),
    ("the last words of a script name a likely cause",
     of_script(exits={0: 1}, logs={0: TRACEBACK + "OSError: [Errno 28] No space left on device\n"}),
     {"state": "failed",
      "reason": "rank 0 exited with code 1: OSError: [Errno 28] No space left on device; see: train logs a --rank 0; "
      "likely a full disk, or a limit of it: train doctor --only 'room on disk,folder of runs'"}),
    ("a hang of a script", of_script(hang="no output"), {"state": "failed", "reason": "no output"}),
    ("a hang of a script that may be restarted", of_script(hang="no output", max_restarts=1),
     {"why": "no output", "again": True}),
    ("a script whose ranks cannot be started", of_script(exits={0: 1}, problem="can't start new thread"),
     {"state": "failed", "reason": "the ranks cannot be started: can't start new thread"}),
    ("a script that reports like a task: it finished", of_script(outcomes=(finished,)),
     {"state": "finished", "figures": {"weights_sha256": "ab", "epoch": 1, "step": 9}}),
    ("it stopped", of_script(outcomes=(stopped,), asked=USER),
     {"state": "stopped", "reason": "stopped after step 5 (train stop)"}),
    ("it raised", of_script(outcomes=(died(1, "ValueError: bad", True),), exits={1: 1}, max_restarts=3),
     {"state": "failed", "reason": "rank 1: ValueError: bad"}),
]  # fmt: skip


@pytest.mark.parametrize(("known", "expected"), [row[1:] for row in ENDS], ids=[row[0] for row in ENDS])
def test_what_becomes_of_a_run(known: Facts, expected: dict[str, Any]) -> None:
    decision = decide(known)
    assert {key: getattr(decision, key) for key in expected} == expected


@pytest.mark.parametrize("known", [row[1] for row in ENDS], ids=[row[0] for row in ENDS])
def test_what_holds_for_every_decision(known: Facts) -> None:
    decision: Decision = decide(known)
    assert decision == decide(replace(known)), "the same facts, the same decision"
    assert decision.end in ("finished", "stopped", "failed", "died")
    assert (decision.state is None) <= (decision.end == "died")
    assert (decision.stopped_by is not None) == (decision.state == "stopped")
    assert decision.again <= (known.mode is LaunchMode.LAUNCHED and decision.state is None)
    assert (decision.reason is None) <= (decision.again or known.mode is LaunchMode.TORCHRUN)
    assert decision.code == {"finished": 0, "stopped": 75}.get(decision.state or "", 3) or decision.code == 130
    assert "\n" not in decision.why and "\n" not in (decision.reason or "")


def test_an_abort_says_why_before_it_is_taken_for_a_kill() -> None:
    known = facts(LAUNCHED, exits={0: ABRT}, logs={0: REFUSED_MEMORY})
    assert who_died(known).recurs and "8 GiB" in who_died(known).reason
    assert not who_died(replace(known, logs={0: "[E] ProcessGroupNCCL: watchdog\n"})).recurs


def test_a_run_over_several_machines_has_not_ended_while_one_of_them_is_gone() -> None:
    for told in (finished, nan):
        decision = decide(facts(LAUNCHED, (told,), lost="node 1 (b)"))
        assert decision.again and decision.why == "node 1 (b) is gone" and decision.state is None
    assert decide(facts(LAUNCHED, (stopped,), lost="node 1 (b)", asked=USER)).state == "stopped"
    exhausted = decide(facts(LAUNCHED, (), lost="node 1 (b)", deaths=3))
    assert exhausted.state == "failed" and "node 1 (b) is gone" in (exhausted.reason or "")


def test_ranks_that_made_room_for_another_machine_are_begun_again() -> None:
    decision = decide(facts(LAUNCHED, (stopped,), regroup="node 2 (c) came", deaths=1))
    assert decision.again and decision.state is None and decision.deaths == 1
    # one that comes and is lost, again and again, while the others train in between
    assert decide(facts(LAUNCHED, (stopped,), regroup="node 2 (c) came", deaths=3, progress=True)).deaths == 0
    assert decide(facts(LAUNCHED, (stopped,), regroup="node 2 (c) came", asked=USER)).state == "stopped"
    assert decide(facts(LAUNCHED, (finished,), regroup="node 2 (c) came")).state == "finished"


def as_read(report: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(report)))


def test_a_node_that_leaves_is_stopped_and_the_others_begin_again() -> None:
    leaves = facts(LAUNCHED, (stopped,), asked=TERMINATED, leaves=True)
    told = decide(leaves)
    assert (told.state, told.stopped_by, told.code) == ("stopped", "signal", 75) and "has left" in (told.reason or "")
    stays = merged(facts(LAUNCHED, (stopped,)), [as_read(report_of(leaves, "node 1 (b) leaves (SIGTERM)"))], [])
    assert decide(stays).again and decide(stays).why == "node 1 (b) leaves (SIGTERM)"
    # a user's word, on another node, is for all
    told = decide(merged(leaves, [as_read(report_of(facts(LAUNCHED, (stopped,), asked=USER), ""))], []))
    assert told.stopped_by == "user" and "has left" not in (told.reason or "")
    # it is the end of the run, which all know
    assert decide(facts(LAUNCHED, (finished,), asked=TERMINATED, leaves=True)).state == "finished"


def test_node_0_decides_by_what_all_nodesreport_of() -> None:
    noticed = facts(LAUNCHED, (died(0, LOST, False),), exits={0: 1}, saved=6, progress=True, deaths=2)
    killed = as_read(report_of(facts(LAUNCHED, (), exits={2: KILL}), ""))
    assert decide(merged(noticed, [killed], [])).why == "rank 2 died of SIGKILL"
    asked = merged(noticed, [killed, as_read(report_of(facts(LAUNCHED, asked=USER), ""))], [])
    assert decide(asked).stopped_by == signals.USER
    gone = decide(merged(noticed, [], ["node 1 (b)"]))
    assert gone.again and gone.why == "node 1 (b) is gone"

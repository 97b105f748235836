"""What a task and a script answer, and that another program needs a row and a class."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from train import programs
from train.errors import Refused
from train.launcher import resumable, stopping
from train.monitor.status import RunStatus
from train.run import folders, spec, states
from train.run.run_folder import Run
from train.scripts.command import BEGINS_ANEW
from train.views import listing, report

OF_TASK = {"task": "task.py", "task_source": "/home/ada/net.py", "max_restarts": 3}
OF_SCRIPT = {"script": "/home/ada/gpt.py", "script_arguments": ["--lr", "3"], "watch": {"healthy_minutes": 5.0}}


def spec_with(**values: Any) -> spec.Spec:
    return spec.spec_of({"name": "a", "attempts": [], **values}, {})  # type: ignore[typeddict-item]


def made(tmp_path: Path, **values: Any) -> Run:
    return folders.create(tmp_path, "a", files={}, record={"world_size": 1, **values})


@pytest.mark.parametrize(
    ("ask", "of_task", "of_script"),
    [
        (lambda program, it: program.default_restarts, 3, None),
        (lambda program, it: program.restarts(dataclasses.replace(it, max_restarts=7)), 7, 7),
        (lambda program, it: program.restarts(dataclasses.replace(it, max_restarts=None)), 3, 0),
        (lambda program, it: program.restarts(dataclasses.replace(it, max_restarts=None, on_restart=())), 3, 3),
        (lambda program, it: program.restarts(dataclasses.replace(it, max_restarts=0, on_restart=("-r",))), 0, 0),
        (lambda program, it: program.continues(it), True, False),
        (lambda program, it: program.on_restart(it), "", BEGINS_ANEW),
        (lambda program, it: program.keeper_tries(it), 3, 2),
        (lambda program, it: program.keeper_tries(dataclasses.replace(it, max_restarts=0)), 3, 0),
        (lambda program, it: program.first_step(7), 7, None),
        (lambda program, it: (program.ran_well(it, 299), program.ran_well(it, 301)), (False, False), (False, True)),
        (lambda program, it: program.no_progress(it), "without a new checkpoint", "before it had run 5 minutes"),
        (lambda program, it: program.source(it), "/home/ada/net.py", "/home/ada/gpt.py"),
        (lambda program, it: program.label(it), "task.py", "gpt.py"),
        (lambda program, it: program.command_line(it), "", "/home/ada/gpt.py --lr 3"),
        (lambda program, it: program.new_code(it, "demo"), "train fork demo --name NEW --task /home/ada/net.py", ""),
        (lambda program, it: program.train_more("a", ""), "train resume a --epochs N", ""),
        (lambda program, it: program.reports_steps([]), True, False),
        (lambda program, it: program.reports_steps([{"from_step": None}, {"from_step": 0}]), True, True),
        (lambda program, it: program.imports()[1], "train.launcher.resume", "torch.distributed"),
    ],
)
def test_what_a_task_and_a_script_answer(ask: Any, of_task: Any, of_script: Any) -> None:
    task, script = spec_with(**OF_TASK), spec_with(**OF_SCRIPT, max_restarts=2)
    assert (programs.of(task), programs.of(script)) == (programs.TASK, programs.SCRIPT)
    assert (ask(programs.TASK, task), ask(programs.SCRIPT, script)) == (of_task, of_script)


def test_show_says_how_a_script_is_restarted() -> None:
    script, ways = spec_with(**OF_SCRIPT), (("--from", "a b"), (), None)
    specs = [dataclasses.replace(script, on_restart=way) for way in ways]
    assert [*map(programs.SCRIPT.on_restart, specs)] == ["--from 'a b'", "continues by itself", BEGINS_ANEW]
    assert [*map(programs.SESSION.on_restart, specs)] == ["--from 'a b'", "", ""]


@pytest.mark.parametrize(
    ("program", "given", "words"),
    [
        (programs.TASK, {"on_restart": ""}, "--on-restart is for scripts; a task continues"),
        (programs.TASK, {"figures": []}, "--figures is for scripts; a task writes its metrics itself"),
        (programs.TASK, {"arguments": ["3"]}, "unexpected 3: a task takes flags only"),
        (programs.SCRIPT, {"config": "a.toml"}, "--config is for tasks; give the arguments of a script after --"),
        (programs.SCRIPT, {"nnodes": "2"}, "--nnodes is for tasks; start a script on several machines with torchrun"),
        (programs.SESSION, {"task": "a.py"}, "--task is for tasks; a script starts as its file is now"),
    ],
)
def test_options_of_another_program_are_refused(program: programs.Program, given: dict[str, Any], words: str) -> None:
    other = programs.SCRIPT if program is programs.TASK else programs.TASK
    other.check_options(given)
    program.check_options(dict.fromkeys(given))
    with pytest.raises(Refused, match=words):
        program.check_options(given)


class Sweep(programs.Script):
    """Starts other runs."""

    def source(self, spec: spec.Spec) -> str:
        return "sweep.toml"

    def after_stop(self, spec: spec.Spec, name: str) -> str:
        return f"train resume {name} starts the runs that are left"

    def keeper_tries(self, spec: spec.Spec) -> int:
        return 1


def test_another_program_needs_a_row_and_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = vars(programs.SCRIPT) | {"name": "sweep", "default_restarts": 5, "lacks": {"eval": "which has no weights"}}
    monkeypatch.setitem(programs.PROGRAMS, "sweep", Sweep(**row))  # type: ignore[arg-type]
    monkeypatch.setattr(spec, "program_of", lambda record: "sweep" if "sweep" in record else spec.TASK)
    run = made(tmp_path, sweep="sweep.toml")
    run.begin_attempt(1, programs.of_record(run.read()).first_step(0))
    run.end_attempt("stopped", "stopped (train stop)", state=states.STOPPED, stopped_by="user")
    record, found = run.read(), RunStatus(run, run.read())
    shown = listing.story(found)
    assert "  sweep        sweep.toml\n" in shown and "steps redone -" in shown
    assert "The run has written no figures; launch it with --figures" in report.html(found)
    assert stopping.how_it_stands(record)[1].endswith("train resume a starts the runs that are left")
    assert found.last_progress is None
    count = {"step": 0, "times": 2, "attempts": 1}
    assert "interrupted 1 time in a row" in resumable.why_given_up(record, count)
    with pytest.raises(Refused, match="a runs a sweep, which has no weights"):
        programs.of_record(record).check_can("eval", run.name)


def test_a_sweep_continues_and_keeps_its_options() -> None:
    it = spec_with(sweep="3f", on_restart=[], task="task.py", task_source="/home/ada/net.py")
    program = programs.of(it)
    assert program is programs.SWEEP and program.launches_trials
    assert (program.restarts(it), program.keeper_tries(it), program.continues(it)) == (3, 3, True)
    assert program.after_stop(it, "lr") == "continue with: train resume lr"
    assert (program.on_restart(it), program.new_code(it, "lr"), program.source(it)) == ("", "", "/home/ada/net.py")
    with pytest.raises(Refused, match="lr runs a sweep, whose trials are runs of their own"):
        program.check_can("fork", "lr")
    with pytest.raises(Refused, match="--nproc is for tasks and scripts"):
        program.check_options({"nproc": "2"})

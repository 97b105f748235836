"""The command line: what it imports, how flags are spelled, what it prints for machines, how it exits."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.train.tiers import later
from train import cli, config, format
from train.commands import parser
from train.errors import Refused
from train.run import states

if TYPE_CHECKING:
    from conftest import Station

WITHOUT_TORCH = [
    ["--help"],
    ["--version"],
    ["run", "--help"],
    ["launch", "--help"],
    ["ls"],
    ["ls", "--json"],
    ["show", "done"],
    ["show", "done", "--json"],
    ["logs", "done"],
    ["stop", "done"],
    ["resume", "done"],
    ["ls", "--columns", "name,optim.lr,accuracy", "--sort", "accuracy", "--csv"],
]
REFUSED_WITHOUT_TORCH = [
    ["launch", "nosuch.py"],
    ["launch", "digits", "--config", "nosuch.toml"],
    ["launch", "digits", "--init", "nosuch.safetensors"],
    ["launch", "digits", "--data.root", "nosuch"],
    ["resume", "done", "--optim.lr", "1"],
    ["resume", "done", "--epochs", "3", "--batch_size", "many"],
    ["export", "done", "--to", "nosuch/x.pt"],
    ["export", "done", "--to", "x.foo"],
    ["eval", "done", "--checkpoint", "3"],
]


@pytest.mark.parametrize(("lines", "code"), [(WITHOUT_TORCH, 0), (REFUSED_WITHOUT_TORCH, 2)], ids=["done", "refused"])
def test_what_needs_no_torch_imports_none(finished: Station, lines: list[list[str]], code: int) -> None:
    program = (
        "import json, sys\n"
        "from train import cli\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        cli.main(arguments)\n"
        "    except SystemExit as end:\n"
        "        assert end.code == int(sys.argv[2]), (arguments, end.code)\n"
        "    heavy = {'torch', 'numpy', 'sklearn', 'matplotlib'} & set(sys.modules)\n"
        "    assert not heavy, (arguments, heavy)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(lines), str(code)],
        cwd=finished.folder, env=finished.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_what_checks_a_launch_loads_no_compiler() -> None:
    # torch's compiler and sympy take longer to load than all else that a launch does before its ranks start
    code = "import sys, train.launcher.checks; print(*{'torch._dynamo', 'sympy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_help_names_every_command_and_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    from train.config import fields

    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and all(f"  {command} " in text for command in cli.COMMANDS)
    for command in ("run", "launch"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        text = capsys.readouterr().out
        assert all(f"--{name} " in text for name in fields())
        first, _, rest = text.partition("more options")
        assert all(f"--{name} " in first for name in ("epochs", "batch_size", "optim.lr")) and "--seed" not in first
        assert "fields of schedule:" in rest


def test_help_of_resume_names_the_fields_that_it_may_change(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["resume", "--help"])
    text = capsys.readouterr().out
    for name, field in config.fields().items():
        assert (f"--{name} " in text) == field.may_change, name


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_begins_with_examples_that_parse(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"] if command else ["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and not [line for line in text.splitlines() if len(line) > 80]
    usage, summary, examples, *rest = text.split("\n\n")
    assert usage.startswith("usage: train") and summary.count("\n") == 0 and examples.startswith("examples:\n  train ")
    assert "-h, --help" not in examples and any("--runs DIR" in part for part in rest)
    lines = [line.strip() for line in examples.splitlines() if line.startswith("  train ")]
    assert 1 <= len(lines) <= 5
    for line in lines:
        program, name, *arguments = shlex.split(line)
        assert program == "train" and (not command or name == command)
        options = parser.parse(parser.parser_of(name), arguments)
        config.check_flags(options.flags)
        after = examples.partition(f"  {line}\n")[2]
        assert after.startswith("      ") and after.strip()[0].isupper(), line


def parse(*arguments: str) -> tuple[Any, dict[str, str]]:
    options = parser.parse(parser.parser_of("launch"), list(arguments))
    return options, options.flags


def test_flags_stand_anywhere_in_either_spelling_and_the_last_one_wins() -> None:
    options, flags = parse(
        "--batch-size", "1", "--optim.lr=3", "digits", "--batch_size=2", "--max_restarts", "4",
        "--optim.weight-decay", "0.5", "--data.root=--odd", "--follow",
    )  # fmt: skip
    assert flags == {"batch_size": "2", "optim.lr": "3", "optim.weight_decay": "0.5", "data.root": "--odd"}
    assert (options.task, options.max_restarts, options.follow) == ("digits", "4", True)


@pytest.mark.parametrize("line", ["a b --json", "--json a b", "a --json b", "a --limit=2 b --json", "-n 2 a --json b"])
def test_names_stand_anywhere_among_flags(line: str) -> None:
    options = parser.parse(parser.parser_of("ls"), line.split())
    assert (options.names, options.json) == (["a", "b"], True)


@pytest.mark.parametrize("value", ["-1", "-x", "a b", "", "=", "a=b"])
def test_a_value_is_taken_as_it_is(value: str) -> None:
    for arguments in ([f"--name={value}"], ["--name", value]):
        options, flags = parse("digits", *arguments, "--data.root", value, f"--task.root={value}")
        assert (options.name, flags) == (value, {"data.root": value, "task.root": value})


def test_a_negative_number_is_a_value() -> None:
    assert parse("digits", "--task.shift", "-1")[1] == {"task.shift": "-1"}


@pytest.mark.parametrize("flag", ["--batch", "--follo", "--n", "--optim", "--optim.l", "--max-restart", "---follow"])
def test_flags_are_never_abbreviated(flag: str) -> None:
    with pytest.raises(Refused, match="unknown flag"):
        parse("digits", flag, "1")


def test_what_stands_after_two_dashes_is_the_scripts() -> None:
    options, flags = parse("--script", "a.py", "--nproc", "2", "--", "--optim.lr", "3", "--name", "x", "--", "-h")
    assert flags == {} and options.name is None
    assert options.arguments == ["--optim.lr", "3", "--name", "x", "--", "-h"]


@pytest.mark.parametrize("arguments", [["launch", "digits", "--", "x"], ["ls", "--"], ["run", "digits", "--", "-x"]])
def test_two_dashes_mean_nothing_without_a_script(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2 and "arguments after --" in capsys.readouterr().err


def test_a_switch_takes_no_value() -> None:
    with pytest.raises(Refused):
        parse("digits", "--follow=yes")


def test_runs_stands_before_or_after_and_the_environment_is_asked_last(
    finished: Station, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def names(*arguments: str) -> list[str]:
        with pytest.raises(SystemExit) as end:
            cli.main(list(arguments))
        assert end.value.code == 0
        return [record["name"] for record in json.loads(capsys.readouterr().out)]

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRAIN_RUNS", raising=False)
    there = str(finished.runs)
    assert "done" in names("--runs", there, "ls", "--json")
    assert "done" in names(f"--runs={there}", "ls", "--json")
    assert "done" in names("ls", "--json", "--runs", there)
    assert "done" in names("ls", f"--runs={there}", "--json")
    assert names("ls", "--json") == []
    monkeypatch.setenv("TRAIN_RUNS", there)
    assert "done" in names("ls", "--json")
    assert names("--runs", str(tmp_path), "ls", "--json") == []


def test_show_gives_machines_the_record_with_the_effective_state(finished: Station) -> None:
    shown = json.loads(finished.ok("show", "done", "--json").stdout)
    assert shown == finished.record("done") | {"restarts": 0, "seconds_lost": 0.0}
    assert shown["state"] == "finished" and shown["step"] == shown["total_steps"] == 46
    assert shown["metrics"].keys() == {"loss", "accuracy"}
    assert [attempt["end"] for attempt in shown["attempts"]] == ["finished"]


def test_show_tells_people_the_story(finished: Station) -> None:
    text = finished.ok("show", "done").stdout
    assert text.startswith("done: finished\n")
    assert "  next         weights: train export done --to done.safetensors; train more: train resume done --ep" in text
    digest, saved = finished.record("done")["weights_sha256"], "step 20, step 40, step 46"
    for word in ("46/46", "accuracy", digest, "attempt 1", "steps 1-46", "1 rank,", saved):
        assert word in text


def test_logs_print_what_a_rank_wrote_and_know_the_ranks_there_are(finished: Station) -> None:
    text = finished.ok("logs", "done").stdout
    assert "finished after 46 steps" in text and "evaluation after step 23" in text
    assert finished.ok("logs", "done", "--follow", "--rank", 0, "--attempt", 1).stdout == text
    for arguments, words in ((["--rank", 1], "ranks with output: 0"), (["--attempt", 2], "no attempt 2")):
        refused = finished("logs", "done", *arguments)
        assert refused.returncode == 2 and words in refused.stderr


def test_stop_and_resume_of_a_finished_run_say_so_and_exit_0(finished: Station) -> None:
    before = finished.record("done")
    for command in ("stop", "resume"):
        done = finished.ok(command, "done")
        assert done.stdout == "" and done.stderr.count("\n") == 1 and "finished" in done.stderr
    assert finished.record("done") == before


def test_a_resume_of_all_says_that_there_is_nothing_to_resume(station: Station) -> None:
    done = station.ok("resume", "--all")
    assert (done.stdout, done.stderr) == (
        "",
        f"no run in {station.runs} was interrupted; to continue a stopped or failed run: train resume NAME\n",
    )


@pytest.mark.never_forgiven
def test_a_resume_refuses_what_would_change_the_result_and_changes_nothing(finished: Station) -> None:
    before = (finished.runs / "done" / "config.toml").read_bytes(), finished.record("done")
    done = finished("resume", "done", "--epochs", 3, "--optim.lr", 0.5)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "optim.lr was 0.1" in done.stderr and "train fork" in done.stderr and "--optim.lr 0.5" in done.stderr
    assert ((finished.runs / "done" / "config.toml").read_bytes(), finished.record("done")) == before


def test_a_reader_who_has_seen_enough_is_no_error(finished: Station) -> None:
    train = f"{sys.executable} -m train"
    for command in (f"{train} launch --help | head -1", f"{train} logs done | head -1", f"{train} ls >&-"):
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=finished.folder, env=finished.environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), command


def test_a_run_needs_no_standard_error(station: Station) -> None:
    run = (
        f"{sys.executable} -m train run digits --name quiet --steps 2 --cpu_threads 1 --log.tensorboard false"
        " <&- >&- 2>&-"
    )
    done = subprocess.run(
        ["bash", "-c", run], cwd=station.folder, env=station.environment("run"), stdout=subprocess.PIPE, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"")
    assert station.record("quiet")["state"] == states.FINISHED


@pytest.mark.parametrize("command", ["launch digits --steps 1", "ls"])
def test_a_current_folder_that_is_gone_is_said_to_be(station: Station, command: str) -> None:
    runs = "" if command == "ls" else f"--runs {station.runs}"
    gone = f"mkdir gone && cd gone && rmdir ../gone && {sys.executable} -m train {command} {runs}"
    done = subprocess.run(
        ["bash", "-c", gone], cwd=station.folder, env=station.environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "train: the current folder was removed; go to another one: cd\n"
    assert not station.runs.exists()


SLOW = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset

def model(config):
    return nn.Linear(4, 1)

def datasets(config):
    return TensorDataset(torch.ones(64, 4)), None

def loss(model, batch):
    time.sleep(0.02)
    return model(batch[0] * torch.rand(())).square().mean()
"""


def test_train_run_exits_75_when_stopped_with_a_checkpoint_to_continue_from(station: Station) -> None:
    (station.folder / "slow.py").write_text(SLOW)
    process = station.start("run", "slow.py", "--name", "s", "--steps", 10**6, "--log.every_steps", 1)
    station.wait_for_step("s", 2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert process.returncode == 75, output
    record = station.record("s")
    assert record["state"] == states.STOPPED and "SIGTERM" in record["reason"]
    assert station.run("s").steps_saved() == [record["step"]]
    assert output.splitlines()[-1].endswith("continue with: train resume s")
    assert not station.run("s").alive()
    assert _shown_losses(station, "s") == {station.metrics("s")[-1]["loss"]} == {record["loss"]}
    process = station.start("resume", "s", "--follow")
    station.wait_for_step("s", record["step"] + 20)
    record = station.record("s")
    for pid in (record["pids"]["agent"], *record["pids"]["ranks"]):
        os.kill(pid, signal.SIGKILL)  # nobody is left to write down how far it came
    process.communicate()
    station.wait_for_end("s")
    last = station.metrics("s")[-1]
    assert _shown_losses(station, "s") == {last["loss"]}
    assert json.loads(station.ok("show", "s", "--json").stdout)["step"] == last["step"]
    assert f"loss {format.figure(last['loss'])}" in station.ok("ls").stdout


def _shown_losses(station: Station, name: str) -> set[float]:
    """The loss of a run as programs are told."""
    table = station.ok("ls", name, "--csv", "--columns", "name,loss", "--sort", "loss").stdout.splitlines()
    (listed,) = json.loads(station.ok("ls", name, "--json").stdout)
    shown = json.loads(station.ok("show", name, "--json").stdout)
    return {float(table[1].split(",")[1]), listed["loss"], shown["loss"]}


@pytest.mark.never_forgiven
@pytest.mark.minutes
def test_a_signal_to_the_whole_process_group_costs_no_step_of_spawned_ranks(station: Station) -> None:
    (station.folder / "slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "train", "run", "slow.py", "--name", "g", "--steps", "1000000"]
    process = subprocess.Popen(
        [*command, "--spawn", "2", "--log.every_steps", "1"],
        cwd=station.folder, env=station.environment(), start_new_session=True, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    station.wait_for_step("g", 2)
    os.killpg(process.pid, signal.SIGTERM)  # as timeout(1), Slurm and service managers do
    output = process.communicate()[1]
    assert process.returncode == 75, output
    record = station.record("g")
    assert record["state"] == states.STOPPED and record["step"] >= 2
    assert station.run("g").steps_saved() == [record["step"]]
    assert station.metrics("g")[-1]["step"] == record["step"]


def test_train_run_exits_3_with_the_reason_in_its_last_line_and_keeps_the_last_good_checkpoint(
    station: Station,
) -> None:
    task = SLOW.replace("def loss(model, batch):", "calls = []\n\ndef loss(model, batch):\n    calls.append(1)")
    task = task.replace(".mean()", ".mean() * (float('nan') if len(calls) == 7 else 1)")
    (station.folder / "nan.py").write_text(task)
    done = station("run", "nan.py", "--name", "n", "--steps", 20, "--checkpoint.every_steps", 5)
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert "the loss is nan at step 7" in last and "--optim.lr" in last
    record = station.record("n")
    assert record["state"] == states.FAILED and "step 7" in record["reason"]
    assert station.run("n").steps_saved() == [5]


@pytest.mark.parametrize("command", ["ls --json", "--help", *later("doctor", "show done")])
def test_what_cannot_be_written_is_said_in_one_line_or_not_at_all(finished: Station, command: str) -> None:
    environ = {name: value for name, value in finished.environment().items() if name != "PYTHONUNBUFFERED"}

    def ended(rest: str) -> tuple[int, str]:
        shell = f'"{sys.executable}" -m train {rest}'
        done = subprocess.run(
            ["bash", "-c", shell], cwd=finished.folder, env=environ, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stderr

    full = "train: No space left on device; free space on that disk\n"
    assert ended(f"{command} >/dev/full") == (2, full)
    assert ended(f"{command} >/dev/full 2>&1") == (2, "")
    assert ended("show nope 2>/dev/full") == (2, "")
    assert ended(f"{command} | true; exit ${{PIPESTATUS[0]}}")[1] == ""

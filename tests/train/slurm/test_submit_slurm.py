"""What `train submit` refuses, and the batch script that it shows. No Slurm is needed here."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.tasks import TASKS
from tests.train.commands.test_bad_input import entries, refused
from tests.train.conftest import command

pytestmark = pytest.mark.never_forgiven

TASK = TASKS / "sine.py"
SHAPE = ("--on", "slurm", "--nodes", 2, "--gpus-per-node", 4)


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, on a machine without Slurm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRAIN_RUNS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["digits"], ["--on is missing", "--on slurm or --on kubernetes"]),
        (["digits", "--on", "pbs"], ["--on pbs", "--on slurm or --on kubernetes"]),
        (["digitz", *SHAPE], ["did you mean digits"]),
        (["digits", *SHAPE, "--optim.lrr", 1], ["did you mean --optim.lr"]),
        (["digits", "--on", "slurm"], ["--gpus-per-node", "--nproc"]),
        (["digits", *SHAPE, "--nproc", 5], ["more than the 4 GPUs"]),
        (["digits", *SHAPE, "--time", "soon"], ["--time soon", "8:00:00"]),
        (["digits", *SHAPE, "--time", 2, "--warn", 120], ["--warn 120", "time limit is 120 s"]),
        (["digits", *SHAPE, "--warn", 70000], ["65535"]),
        (["digits", *SHAPE, "--mem", "lots"], ["--mem lots", "64G"]),
        (["digits", *SHAPE, "--partition", "a b"], ["--partition 'a b'", "sinfo"]),
        (["digits", *SHAPE, "--container", "none.sif"], ["none.sif", "no such file"]),
        (["digits", *SHAPE, "--container-by", "docker"], ["pyxis or apptainer"]),
        (["digits", *SHAPE, "--sbatch", "export=WANDB_API_KEY=0123456789abcdef"], ["WANDB_API_KEY", "secret"]),
        (["digits", *SHAPE, "--sbatch", "depend=afterok:1"], ["write dependency in full"]),
        (["digits", *SHAPE, "--sbatch", "=x"], ["is no option", "NAME=VALUE"]),
        (["digits", *SHAPE, "--sbatch", "time=3"], ["--time cannot be given there"]),
        (["digits", *SHAPE, "--sbatch", "qos='a"], ["--sbatch"]),
        (["digits", *SHAPE, "--sbatch", "tim=3"], ["--time cannot be given there"]),
        (["digits", *SHAPE, "--dry-run", "--runs", "a\rb"], ["choose another --runs"]),
        (["digits", *SHAPE], ["no sbatch here", "--dry-run"]),
        (["digits", *SHAPE, "--dry-run", "--follow"], ["--follow", "--dry-run", "leave one of them out"]),
        (["digits", *SHAPE, "--dry-run", "--batch_size", 7], ["--batch_size 7", "ranks, 8;"]),
        (["digits", *SHAPE, "--dry-run", "--batch_size", 8, "--micro_batch_size", 4], ["2 micro batches"]),
        (["digits", *SHAPE, "--dry-run", "--init", "none.pt"], ["none.pt"]),
    ],
)
def test_a_wrong_request_is_refused_in_a_line(nowhere: Path, arguments: list[object], words: list[str]) -> None:
    refused(command("submit", *arguments), *words)
    assert entries(nowhere) == set()


def test_what_another_run_has_left_on_a_node_is_not_gone_on_with(nowhere: Path) -> None:
    (nowhere / "runs/.nodes/1/big").mkdir(parents=True)
    before = entries(nowhere)
    refused(command("submit", "digits", *SHAPE, "--name", "big"), "runs/.nodes/1/big", "another --name")
    assert entries(nowhere) == before


def script(*arguments: object) -> str:
    code, out, err = command("submit", TASK, *SHAPE, "--name", "big", "--dry-run", *arguments)
    assert (code, err) == (0, "")
    return out


def test_the_batch_script_says_what_was_asked_for(nowhere: Path) -> None:
    text = script(
        "--time", "1-8:00:00", "--warn", 300, "--partition", "gpu", "--account", "me", "--cpus-per-task", 32, "--mem",
        "200G", "--sbatch", "qos=long comment='two words' dependency=afterok:5",
    )  # fmt: skip
    name, *given = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert name.startswith("--job-name=big.")
    assert given == [
        "--dependency=singleton,afterok:5",
        "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=32", "--gpus-per-node=4", "--mem=200G",
        "--time=1-08:00:00", "--partition=gpu", "--account=me", f'--output="{nowhere}/runs/big/slurm-%j.log"',
        "--open-mode=append", "--requeue", "--signal=B:USR1@300", "--qos=long", '--comment="two words"',
    ]  # fmt: skip
    assert entries(nowhere) == set()


@pytest.mark.parametrize(
    ("container", "words"),
    [
        (["--container", "registry#trainstation:runtime"], ["--container-image='registry#trainstation:runtime'"]),
        (["--container", "docker://trainstation", "--container-by", "apptainer"], ["apptainer exec --nv --bind"]),
    ],
)
def test_the_batch_script_is_a_clean_shell_script(nowhere: Path, container: list[str], words: list[str]) -> None:
    import sys

    shown = nowhere / "job.sbatch"
    text = script(*container, "--runs", nowhere / "runs with blanks")
    shown.write_text(text)
    for word in (*words, 'env TRAIN_RUNS="$TRAIN_RUNS"'):  # the image has another
        assert word in text
    assert subprocess.run(["/bin/bash", "-n", shown], capture_output=True, check=False).stderr == b""
    checker = Path(sys.executable).with_name("shellcheck")
    if checker.exists():  # among the linters, which a test needs not have
        done = subprocess.run([checker, shown], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_the_files_that_every_node_reads_are_those_of_now(nowhere: Path) -> None:
    """And an sbatch that takes nothing, of a Slurm that has nothing, leaves nothing behind."""
    Path("own.toml").write_text("steps = 7\n")
    given = ("submit", TASK, "--on", "slurm", "--nproc", 1, "--name", "big", "--config", "own.toml", "--seed", 3)
    tool(nowhere, "sbatch", f"cp -r {nowhere}/runs/big {nowhere}/seen; exit 1")
    tool(nowhere, "squeue", "")
    refused(command(*given), "sbatch: exit code 1")
    assert not (nowhere / "runs" / "big").exists()
    content = json.loads((nowhere / "seen" / "submission.json").read_text())
    assert (nowhere / "seen" / content["task_copy"]).read_bytes() == TASK.read_bytes()
    assert (nowhere / "seen" / content["config_file"]).read_text() == "steps = 7\n"
    assert (content["task"], content["flags"], content["nodes"], content["nproc"]) == (str(TASK), {"seed": "3"}, 1, 1)


def test_where_nobody_says_whether_slurm_has_it_the_run_stays_to_be_resumed(nowhere: Path) -> None:
    tool(nowhere, "sbatch", "exit 1")
    refused(
        command("submit", "digits", "--on", "slurm", "--nproc", 1, "--name", "big"),
        "is not known (there is no squeue here", "train resume big",
    )  # fmt: skip
    assert (nowhere / "runs" / "big" / "run.json").exists()
    code, out, err = command("ls")
    assert code == 0 and " queued " in out and "slurm does not answer here" in err
    for line in (("stop", "big"), ("resume", "big"), ("rm", "big")):
        refused(command(*line), "slurm does not answer here", "go to where it does")
    refused(command("resume", "big", "--nproc", 3), "--nproc", "keeps its nodes and ranks")


def tool(nowhere: Path, name: str, text: str) -> None:
    """A command of Slurm's that is a script."""
    (nowhere / "bin").mkdir(exist_ok=True)
    (nowhere / "bin" / name).write_text(f"#!/bin/bash\nPATH=/usr/bin:/bin\n{text}\n")
    (nowhere / "bin" / name).chmod(0o755)


def test_a_node_that_is_refused_ends_the_job_though_srun_tells_of_who_waited_for_it(nowhere: Path) -> None:
    """An srun that has one of its two agents run, and kills the other one, which waits."""
    shown, run = nowhere / "job.sbatch", nowhere / "runs" / "big"
    shown.write_text(script("--nproc", 1))
    run.mkdir(parents=True)
    content = {"name": "big", "task": "none", "cwd": ".", "nodes": 2, "nproc": 1, "wait_minutes": 1, "max_restarts": 3}
    more = dict.fromkeys(("init", "config_file", "task_copy")) | {"id": "x", "flags": {}, "changes": {}}
    (run / "submission.json").write_text(json.dumps(content | more))
    agent = 'echo x >>starts\nwhile [ "${1#-}" != "$1" ]; do shift; done\nSLURM_NODEID=1 "$@" 2>>said\nexit 137'
    for name, text in (("srun", agent), ("squeue", ""), ("scontrol", "echo localhost")):
        tool(nowhere, name, text)
    given = os.environ | {"PATH": f"{nowhere}/bin:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b"}
    done = subprocess.run(["/bin/bash", shown], env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no task none" in Path("said").read_text() and Path("starts").read_text() == "x\n"

"""What `train submit` refuses, and the batch script that it shows. No Slurm is needed here."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.train.commands.test_bad_input import command, entries, refused

HERE = Path(__file__).parent
TASK = HERE / "task.py"
SHAPE = ("--on", "slurm", "--nodes", 2, "--gpus-per-node", 4)
HSDP = ["--parallel.strategy", "hsdp", "--parallel.shard_size", 3]


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
        (["digits"], ["--on is missing", "slurm or kubernetes"]),
        (["digits", "--on", "pbs"], ["--on pbs", "slurm or kubernetes"]),
        (["digitz", *SHAPE], ["did you mean digits"]),
        (["digits", *SHAPE, "--optim.lrr", 1], ["did you mean optim.lr"]),
        (["digits", *SHAPE, "--name", "a/b"], ["legal run name"]),
        (["digits", "--on", "slurm"], ["--gpus-per-node", "--nproc"]),
        (["digits", "--on", "slurm", "--nproc", 0], ["--nproc 0", "at least 1"]),
        (["digits", *SHAPE, "--nodes", 0], ["--nodes 0", "at least 1"]),
        (["digits", *SHAPE, "--nproc", 5], ["more ranks than the 4 GPUs"]),
        (["digits", *SHAPE, "--time", "soon"], ["--time soon", "8:00:00"]),
        (["digits", *SHAPE, "--time", "0"], ["--time 0"]),
        (["digits", *SHAPE, "--time", 2, "--warn", 120], ["--warn 120", "time limit is 120 s"]),
        (["digits", *SHAPE, "--warn", 70000], ["65535"]),
        (["digits", *SHAPE, "--mem", "lots"], ["--mem lots", "64G"]),
        (["digits", *SHAPE, "--partition", "a b"], ["--partition 'a b'", "sinfo"]),
        (["digits", *SHAPE, "--wait-minutes", 0], ["--wait-minutes 0"]),
        (["digits", *SHAPE, "--container", ""], ["--container ''"]),
        (["digits", *SHAPE, "--container", "none.sif"], ["none.sif", "no such file"]),
        (["digits", *SHAPE, "--container-by", "docker"], ["pyxis or apptainer"]),
        (["digits", *SHAPE, "--container-by", "pyxis"], ["needs --container"]),
        (["digits", *SHAPE, "--sbatch", "=x"], ["is no option", "NAME=VALUE"]),
        (["digits", *SHAPE, "--sbatch", "time=3"], ["--time", "flag of train submit"]),
        (["digits", *SHAPE, "--sbatch", "qos='a"], ["--sbatch"]),
        (["digits", *SHAPE, "--sbatch", "wait"], ["--wait", "see --follow"]),
        (["digits", *SHAPE, "--sbatch", "test-only"], ["--test-only", "see --dry-run"]),
        (["digits", *SHAPE, "--sbatch", "clusters=b"], ["--clusters", "whose default that cluster is"]),
        (["digits", *SHAPE, "--sbatch", "-M b"], ["is no option"]),
        (["digits", *SHAPE, "--sbatch", "tim=3"], ["--time", "flag of train submit"]),
        (["digits", *SHAPE, "--time", "99999999999999999"], ["--time 99999999999999999"]),
        (["digits", *SHAPE, "--time", "٣"], ["--time ٣"]),
        (["digits", *SHAPE, "--mem", "٣G"], ["--mem ٣G"]),
        (["digits", *SHAPE, "--dry-run", "--runs", "a\rb"], ["choose another --runs"]),
        (["digits", *SHAPE, "--dry-run", "--runs", "a\udcffb"], ["choose another --runs"]),
        (["digits", *SHAPE], ["no sbatch here", "--dry-run"]),
        (["digits", *SHAPE, "--dry-run", "--follow"], ["--follow and --dry-run", "leave one of them out"]),
        (["digits", *SHAPE, "--dry-run", "--batch_size", 7], ["--batch_size 7", "ranks 8;"]),
        (["digits", *SHAPE, "--dry-run", *HSDP], ["--parallel.shard_size 3", "the 8 ranks"]),
        (["digits", *SHAPE, "--dry-run", "--batch_size", 8, "--micro_batch_size", 4], ["2 micro batches"]),
        (["digits", *SHAPE, "--dry-run", "--init", "none.pt"], ["none.pt"]),
        (["digits", *SHAPE, "--dry-run", "--config", "none.toml"], ["none.toml"]),
    ],
)
def test_a_wrong_request_is_refused_in_a_line(nowhere: Path, arguments: list[object], words: list[str]) -> None:
    refused(command("submit", *arguments), *words)
    assert entries(nowhere) == set()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("true", "gives no number of a job: ''"), ("echo Hello World", "'Hello World"),
        ("printf '\\377\\n'", "no number"),
        ("kill -9 $$", "exit code -9"), ("printf '\\377' >&2; exit 1", "sbatch: "), ("#!/nowhere", "cannot be run"),
    ],
)  # fmt: skip
def test_an_sbatch_that_gives_no_job_leaves_nothing_behind(nowhere: Path, text: str, words: str) -> None:
    (nowhere / "bin").mkdir()
    tool = nowhere / "bin" / "sbatch"
    tool.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)
    before = entries(nowhere)
    refused(command("submit", "digits", "--on", "slurm", "--nproc", 1, "--name", "big"), words)
    assert not (nowhere / "runs" / "big").exists() and before <= entries(nowhere)


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
        "200G", "--sbatch", "qos=long comment='two words'",
    )  # fmt: skip
    given = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert given == [
        "--job-name=big", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=32", "--gpus-per-node=4", "--mem=200G",
        "--time=1-08:00:00", "--partition=gpu", "--account=me", f'--output="{nowhere}/runs/big/slurm-%j.log"',
        "--open-mode=append", "--requeue", "--signal=B:USR1@300", "--qos=long", '--comment="two words"',
    ]  # fmt: skip
    assert entries(nowhere) == set()


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ([], ["bash -c"]),
        (["--container", "registry#trainstation:runtime"], ["--container-image='registry#trainstation:runtime'"]),
        (["--container", "docker://trainstation", "--container-by", "apptainer"], ["apptainer exec --nv --bind"]),
    ],
)
def test_the_batch_script_is_a_clean_shell_script(nowhere: Path, container: list[str], words: list[str]) -> None:
    import sys

    shown = nowhere / "job.sbatch"
    text = script(*container, "--runs", nowhere / "runs with blanks")
    shown.write_text(text)
    for word in words:
        assert word in text
    assert subprocess.run(["/bin/bash", "-n", shown], capture_output=True, check=False).stderr == b""
    checker = Path(sys.executable).with_name("shellcheck")
    if checker.exists():  # among the linters, which a test needs not have
        done = subprocess.run([checker, shown], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_what_every_node_reads_is_whole() -> None:
    """The user's files travel as they are now: what is changed later is not trained."""
    from train.cluster.submission import Submission
    from train.runs import submit

    Path("own.toml").write_text("steps = 7\n")
    asked = Submission("slurm", Path("runs"), "a", str(TASK), {"seed": "3"}, config_file="own.toml", nodes=2, nproc=2)
    submit.prepare(asked)
    content = json.loads(asked.files["submission.json"])
    assert asked.files[content["task_copy"]] == TASK.read_bytes()
    assert asked.files[content["config_file"]] == b"steps = 7\n"
    assert (content["task"], content["flags"], content["nodes"], content["nproc"]) == (str(TASK), {"seed": "3"}, 2, 2)


def test_a_node_that_is_refused_ends_the_job_though_srun_tells_of_who_waited_for_it(nowhere: Path) -> None:
    """An srun that has one of its two agents run, and kills the other one, which waits."""
    shown, run = nowhere / "job.sbatch", nowhere / "runs" / "big"
    shown.write_text(script("--nproc", 1))
    run.mkdir(parents=True)
    content = {"name": "big", "task": "none", "cwd": ".", "nodes": 2, "nproc": 1, "wait_minutes": 1, "max_restarts": 3}
    more = dict.fromkeys(("flags", "init", "config_file", "task_copy"))
    (run / "submission.json").write_text(json.dumps(content | more | {"flags": {}}))
    agent = 'echo x >>starts\nwhile [ "$1" != bash ]; do shift; done\nSLURM_NODEID=1 "$@" 2>>said\nexit 137'
    for name, text in (("srun", agent), ("squeue", ""), ("scontrol", "echo localhost")):
        tool = nowhere / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/bash\n{text}\n")
        tool.chmod(0o755)
    given = os.environ | {"PATH": f"{nowhere}/bin:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b"}
    done = subprocess.run(["/bin/bash", shown], env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no task none" in Path("said").read_text() and Path("starts").read_text() == "x\n"

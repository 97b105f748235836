"""Slurm: a run as a batch job, with one agent on each node (job.sbatch).

Commands of Slurm alone are called; this project holds no queue. A job that ends before its run does (time limit,
preemption, a lost node) is queued again by Slurm, under the same number. The job's name ends with the id of its
submission: by that name it is looked for, and of several of one name Slurm runs one at a time.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import train
from train.cluster.engine import JobStatus, Submission, call, other_node_folders, template
from train.errors import Refused
from train.run import environment, states
from train.run.run_folder import Run

SCRIPT = "job.sbatch"
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT")
_MADE = """nodes cpus-per-task mem time partition account gpus-per-node gres gpus ntasks ntasks-per-node job-name output
    error open-mode requeue no-requeue wrap signal array wait test-only clusters parsable help usage version quiet"""
"""Options of sbatch that stand in the script already, or cannot stand there."""

__all__ = ["SCRIPT", "check", "jobs", "logs", "options", "place", "remove", "render", "stop", "submit"]


def options(parser: Any) -> None:
    """What sbatch alone knows."""
    add = parser.add_argument
    add("--partition", metavar="P", help="Slurm: the partition")
    add("--account", metavar="A", help="Slurm: the account that pays")
    add("--sbatch", metavar="OPTIONS", help="Slurm: further options of sbatch, in quotes: 'qos=long exclude=n7'")
    add("--container-by", metavar="TOOL", help="Slurm: pyxis or apptainer; default: apptainer for a .sif, else pyxis")


def check(asked: Submission) -> None:
    """Whether it can be handed to Slurm from here."""
    for option in ("partition", "account"):
        value = asked.own.get(option)
        if value is not None and not re.fullmatch(r"[A-Za-z0-9_.,+@-]+", value):
            raise Refused(f"--{option} {value!r}: give a name, as sinfo or sacctmgr show it")
    if asked.memory is not None and not re.fullmatch(r"[0-9]{1,15}[KMGT]?", asked.memory):
        raise Refused(f"--mem {asked.memory}: give a size such as 64G")
    if asked.seconds is not None and asked.warn >= asked.seconds:
        raise Refused(f"--warn {asked.warn}: the time limit is {asked.seconds} s; warn later, or give more --time")
    if asked.warn > 65535:
        raise Refused(f"--warn {asked.warn}: Slurm warns at most 65535 seconds before")
    _check_container(asked)
    _check_more(asked.own.get("sbatch"))
    if re.search(r"[\x00-\x1f\x7f\"\\\ud800-\udfff]", str(asked.folder)):
        raise Refused(f"{asked.folder} has a sign in it that batch scripts cannot have; choose another --runs")
    for left in other_node_folders(asked.runs, asked.name):
        raise Refused(f"{left} is left of another run; remove it, or choose another --name")
    if not asked.is_dry and shutil.which("sbatch") is None:
        raise Refused("there is no sbatch here; submit from a machine of the cluster, or see --dry-run")


def _check_container(asked: Submission) -> None:
    by, image = asked.own.get("container_by"), asked.image
    if by not in (None, "pyxis", "apptainer"):
        raise Refused(f"--container-by {by}: give pyxis or apptainer")
    if by is not None and image is None:
        raise Refused("--container-by needs --container IMAGE too")
    if image is not None and (not image or re.search(r"[\s,\"'\\]", image)):
        raise Refused(f"--container {image!r}: give an image without blanks, commas and quotes")
    if image is not None and image.endswith((".sif", ".sqsh")) and not Path(image).is_file():
        raise Refused(f"--container {image}: there is no such file")


def _check_more(text: str | None) -> None:
    try:
        words = _more_options(text)
    except ValueError as error:
        raise Refused(f"--sbatch {text!r}: {error}") from None
    for word in words:
        name = word.partition("=")[0]
        if not re.fullmatch(r"--[a-z][a-z-]+", name) or re.search(r"[\n\"\\]", word):
            raise Refused(f"--sbatch: {word!r} is no option; give them as NAME=VALUE, with blanks between them")
        made = next((one for one in _MADE.split() if one.startswith(name[2:])), None)  # sbatch takes abbreviations
        if made is not None:
            raise Refused(f"--sbatch: --{made} cannot be given there; see the options of: train submit --help")
        if "--dependency".startswith(name) and name != "--dependency":
            raise Refused(f"--sbatch: {name}: write dependency in full")
        for pair in word.removeprefix("--export=").split(",") if word.startswith("--export=") else ():
            if "=" in pair and environment.tells_secret(*pair.split("=", 1)):
                raise Refused(
                    f"--sbatch: export={pair.split('=')[0]} reads like a secret, and would stand in {SCRIPT}; set it "
                    "in your shell: Slurm hands that environment on"
                )


def _more_options(text: str | None) -> list[str]:
    """The options in `qos=long exclude=n7`, as sbatch has them. Raises ValueError: a quote is not closed."""
    return ["--" + word.removeprefix("--") for word in shlex.split(text or "")]


def place(asked: Submission) -> str | None:
    """Slurm has one place."""
    return None


def render(asked: Submission) -> str:
    """The batch script."""
    root = _checkout()
    return template(
        SCRIPT,
        name=asked.name,
        nodes=asked.nodes,
        nproc=asked.nproc,
        runs=shlex.quote(str(asked.runs)),
        run=shlex.quote(str(asked.folder)),
        options=_options(asked),
        root=root and shlex.quote(str(root)),
        max_restarts=asked.max_restarts,
        cpus=asked.cpus or asked.nproc,
        command=_command(asked, root),
    )


def _options(asked: Submission) -> list[str]:
    log = str(asked.folder / "slurm-").replace("%", "%%")
    more = _more_options(asked.own.get("sbatch"))
    after = [word.partition("=")[2] for word in more if word.startswith("--dependency=")]
    lines = [f"--job-name={asked.name}.{asked.id}", f"--dependency={','.join(['singleton', *after])}"]
    lines += [f"--nodes={asked.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={asked.cpus or asked.nproc}"]
    lines += [f"--gpus-per-node={asked.gpus_per_node}"] if asked.gpus_per_node else []
    lines += [f"--mem={asked.memory}"] if asked.memory else []
    lines += [f"--time={_time_of(asked.seconds)}"] if asked.seconds else []
    lines += [f"--{name}={asked.own[name]}" for name in ("partition", "account") if asked.own.get(name)]
    lines += [f'--output="{log}%j.log"', "--open-mode=append", "--requeue", f"--signal=B:USR1@{asked.warn}"]
    return lines + [_quoted(word) for word in more if not word.startswith("--dependency=")]


def _time_of(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    return f"{f'{days}-' if days else ''}{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"


def _quoted(word: str) -> str:
    name, equals, value = word.partition("=")
    return f'{name}="{value}"' if equals and not value.isalnum() else word


def _checkout() -> Path | None:
    """The folder that this package lies in, where it is not installed; a node's Python does not know it."""
    root = Path(train.__file__).resolve().parents[1]
    return None if root.is_relative_to(Path(sys.prefix).resolve()) and root.name == "site-packages" else root


def _command(asked: Submission, root: Path | None) -> str:
    """Python, in its container if there is one."""
    if asked.image is None:
        return shlex.quote(sys.executable)
    # an image may have values of its own for these
    inside = 'env TRAIN_RUNS="$TRAIN_RUNS" PYTHONPATH="${PYTHONPATH:-}" PYTHONHASHSEED="$PYTHONHASHSEED" python3'
    folders = sorted({str(folder) for folder in (asked.runs, Path.cwd(), root) if folder})
    by = asked.own.get("container_by") or ("apptainer" if asked.image.endswith(".sif") else "pyxis")
    if by == "apptainer":
        binds = " ".join(f"--bind {shlex.quote(folder)}" for folder in folders)
        nv = "--nv " if asked.gpus_per_node else ""
        return f"apptainer exec {nv}{binds} {shlex.quote(asked.image)} {inside}"
    mounts = shlex.quote(",".join(f"{folder}:{folder}" for folder in folders))
    return f"--container-image={shlex.quote(asked.image)} --container-mounts={mounts} {inside}"


def submit(run: Run) -> str:
    """Hand the batch script to sbatch."""
    output = call("sbatch", "--parsable", str(run.folder / SCRIPT))
    return f"job {output.strip().partition(';')[0]}"


def jobs(place: str | None) -> dict[str, JobStatus]:
    """The user's jobs that Slurm has not done with."""
    rows = (line.split("|", 3) for line in _squeue("%j|%i|%T|%r").splitlines() if line.count("|") >= 3)
    return {
        name.rpartition(".")[2]: JobStatus(
            states.RUNNING if state in _RUNNING else states.QUEUED,
            f"job {number} is {state.lower()}" + (f" ({why})" if why != "None" else ""),
        )
        for name, number, state, why in rows
    }


def _squeue(form: str, *more: str) -> str:
    return call("squeue", "--noheader", "--me", f"--format={form}", *more, seconds=20.0)


def stop(run: Run, job: JobStatus, now: bool) -> None:
    """Ask its ranks to end, by its folder; take from Slurm what waits, or has an end that a node has not heard of."""
    wanted = states.NOW if now else states.POLITE
    if job.state == states.QUEUED or run.read()["state"] not in (states.CREATED, states.RUNNING):
        remove(run)
    elif run.stop_asked() not in (wanted, states.NOW):  # one that is just starting overlooks the first
        run.ask_stop(wanted)


def logs(run: Run, rank: int, since: str | None = None) -> list[str] | None:
    """The output lies in the run folders, which all nodes share."""
    return None


def remove(run: Run) -> str:
    """Take its job from Slurm, if it has one."""
    numbers = _squeue("%i", f"--name={run.name}.{run.read()['submission']}").split()
    if numbers:
        call("scancel", *numbers)
    return ""

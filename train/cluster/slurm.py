"""Run on Slurm: a run is a batch job with one agent per node (job.sbatch).

Only commands of Slurm are called; this program has no queue. If a job ends before its run does (time limit,
preemption, a lost node), Slurm queues it again under the same number. The job's name ends with the id of the
submission, so it can be found by name. Slurm runs one job per name at a time.
"""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from ..errors import Refused
from ..run import environment, states
from ..run.record import Record
from ..run.run_folder import Run
from .engine import JobStatus, Submission, call, other_node_folders, template

SCRIPT = "job.sbatch"
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT")
_MADE = """nodes cpus-per-task mem time partition account gpus-per-node gres gpus ntasks ntasks-per-node job-name output
    error open-mode requeue no-requeue wrap signal array wait test-only clusters parsable help usage version quiet"""
"""Options of sbatch that the script already contains, or that cannot be in a script."""

__all__ = ["SCRIPT", "check", "jobs", "logs", "options", "place", "remove", "render", "stop", "submit"]


def options(parser: Any) -> None:
    """Add the options that only Slurm has."""
    add = functools.partial(parser.add_argument, section="options of --on slurm")
    add("--partition", metavar="P", help="Partition of the cluster.")
    add("--account", metavar="A", help="Account that is charged.")
    add("--sbatch", metavar="OPTIONS", help="Other options of sbatch, in quotes: 'qos=long exclude=n7'.")
    text = "pyxis or apptainer, which starts the --container. Default: apptainer for a .sif, else pyxis."
    add("--container-by", metavar="TOOL", help=text)


def check(asked: Submission) -> None:
    """Check whether a request can be submitted to Slurm from here.

    Raises:
        Refused: it cannot.
    """
    for option in ("partition", "account"):
        value = asked.own.get(option)
        if value is not None and not re.fullmatch(r"[A-Za-z0-9_.,+@-]+", value):
            raise Refused(f"--{option} {value!r}: give a name from sinfo or sacctmgr")
    if asked.memory is not None and not re.fullmatch(r"[0-9]{1,15}[KMGT]?", asked.memory):
        raise Refused(f"--mem {asked.memory}: give a size such as 64G")
    if asked.seconds is not None and asked.warn >= asked.seconds:
        raise Refused(f"--warn {asked.warn}: the time limit is {asked.seconds} s; give less --warn, or more --time")
    if asked.warn > 65535:
        raise Refused(f"--warn {asked.warn}: Slurm takes at most 65535; give fewer seconds")
    _check_container(asked)
    _check_more(asked.own.get("sbatch"))
    if re.search(r"[\x00-\x1f\x7f\"\\\ud800-\udfff]", str(asked.folder)):
        raise Refused(f"{asked.folder} has a character that batch scripts cannot contain; choose another --runs")
    for left in other_node_folders(asked.runs, asked.name):
        raise Refused(f"{left} is left over from another run; remove it, or choose another --name")
    if not asked.is_dry and shutil.which("sbatch") is None:
        raise Refused("there is no sbatch here; submit from a machine of the cluster, or use --dry-run")


def _check_container(asked: Submission) -> None:
    by, image = asked.own.get("container_by"), asked.image
    if by not in (None, "pyxis", "apptainer"):
        raise Refused(f"--container-by {by}: give pyxis or apptainer")
    if by is not None and image is None:
        raise Refused("--container-by needs a container: add --container IMAGE")
    if image is not None and (not image or re.search(r"[\s,\"'\\]", image)):
        raise Refused(f"--container {image!r}: give an image without spaces, commas and quotes")
    if image is not None and image.endswith((".sif", ".sqsh")) and not Path(image).is_file():
        raise Refused(f"--container {image}: no such file; give the path of an image")


def _check_more(text: str | None) -> None:
    try:
        words = _more_options(text)
    except ValueError as error:
        raise Refused(f"--sbatch {text!r}: {error}") from None
    for word in words:
        name = word.partition("=")[0]
        if not re.fullmatch(r"--[a-z][a-z-]+", name) or re.search(r"[\n\"\\]", word):
            raise Refused(f"--sbatch: {word!r} is no option; give NAME=VALUE, with spaces between them")
        made = next((one for one in _MADE.split() if one.startswith(name[2:])), None)  # sbatch takes abbreviations
        if made is not None:
            raise Refused(f"--sbatch: --{made} cannot be given there; use the options in: train submit --help")
        if "--dependency".startswith(name) and name != "--dependency":
            raise Refused(f"--sbatch: {name}: write dependency in full")
        for pair in word.removeprefix("--export=").split(",") if word.startswith("--export=") else ():
            if "=" in pair and environment.is_secret(*pair.split("=", 1)):
                raise Refused(
                    f"--sbatch: export={pair.split('=')[0]} looks like a secret, and {SCRIPT} would show it; set it "
                    "in your shell: Slurm passes that environment on"
                )


def _more_options(text: str | None) -> list[str]:
    """Split `qos=long exclude=n7` into options of sbatch.

    Raises:
        ValueError: a quote is not closed.
    """
    return ["--" + word.removeprefix("--") for word in shlex.split(text or "")]


def place(asked: Submission) -> str | None:
    """Return None: Slurm has one place."""
    return None


def render(asked: Submission) -> str:
    """Return the batch script."""
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
    """Return the folder of this package if it is not installed, because then a node's Python does not find it."""
    root = Path(__file__).resolve().parents[2]
    return None if root.is_relative_to(Path(sys.prefix).resolve()) and root.name == "site-packages" else root


def _command(asked: Submission, root: Path | None) -> str:
    """Return the command that runs Python, in a container if one was given."""
    if asked.image is None:
        return shlex.quote(sys.executable)
    # an image may set these to other values
    inside = 'env TRAIN_RUNS="$TRAIN_RUNS" PYTHONPATH="${PYTHONPATH:-}" PYTHONHASHSEED="$PYTHONHASHSEED" python3'
    folders = sorted({str(folder) for folder in (asked.runs, Path.cwd(), root) if folder})
    by = asked.own.get("container_by") or ("apptainer" if asked.image.endswith(".sif") else "pyxis")
    if by == "apptainer":
        binds = " ".join(f"--bind {shlex.quote(folder)}" for folder in folders)
        nv = "--nv " if asked.gpus_per_node else ""
        return f"apptainer exec {nv}{binds} {shlex.quote(asked.image)} {inside}"
    mounts = shlex.quote(",".join(f"{folder}:{folder}" for folder in folders))
    return f"--container-image={shlex.quote(asked.image)} --container-mounts={mounts} {inside}"


def submit(run: Run, record: Record) -> str:
    """Submit the batch script with sbatch."""
    output = call("sbatch", "--parsable", str(run.folder / SCRIPT))
    return f"job {output.strip().partition(';')[0]}"


def jobs(place: str | None) -> dict[str, JobStatus]:
    """Return the user's jobs that have not ended."""
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


def stop(run: Run, record: Record, job: JobStatus, now: bool) -> None:
    """Ask the ranks to end through the run folder. Cancel a job that waits, or whose run has already ended."""
    wanted = states.NOW if now else states.POLITE
    if job.state == states.QUEUED or record["state"] not in (states.CREATED, states.RUNNING):
        remove(record)
    elif run.stop_asked() not in (wanted, states.NOW):  # a starting run may miss the first request
        run.ask_stop(wanted)


def logs(record: Record, rank: int, since: str | None = None) -> list[str] | None:
    """Return None: the output is in the run folders, which all nodes share."""
    return None


def remove(record: Record) -> str:
    """Cancel the job of a run, if it has one."""
    numbers = _squeue("%i", f"--name={record['name']}.{record['submission']}").split()
    if numbers:
        call("scancel", *numbers)
    return ""

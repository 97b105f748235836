"""Slurm: a run as a batch job, with one agent on each node. What Slurm is told lies as job.sbatch in the run folder.

Commands of Slurm alone are called; this project holds no queue. A job that ends before its run does (time limit,
preemption, a lost node) is queued again by Slurm, under the same number.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

from train.cluster.script import MADE, more_options, render
from train.cluster.submission import Silent, Standing, Submission, Unanswered, of_others
from train.errors import Refused, one_line
from train.record import environment, folders, store
from train.record.store import Run

FAR = False
SCRIPT = "job.sbatch"
_PATIENCE, _GLANCE = 60.0, 5.0
"""Seconds for an answer of Slurm's, and for one that a list of runs can do without: its commands wait long for a
controller that is down."""
_MARK = "trainstation:"
"""Before the submission's id, in the comment of its job: by that a job is found whose number was never heard."""
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT")

__all__ = ["FAR", "adopt", "again", "check", "forget", "halt", "options", "render", "standings", "submit"]


def options(parser: Any) -> None:
    """What sbatch alone knows."""
    add = parser.add_argument
    add("--partition", metavar="P", help="Slurm: the partition")
    add("--account", metavar="A", help="Slurm: the account that pays")
    add("--sbatch", metavar="OPTIONS", help="Slurm: further options of sbatch, in quotes: 'qos=long exclude=n7'")
    add("--container-by", metavar="TOOL", help="Slurm: pyxis or apptainer; default: apptainer for a .sif, else pyxis")


def check(submission: Submission) -> None:
    """Whether it can be handed to Slurm from here."""
    asked = submission
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
    if asked.gpus_per_node and asked.nproc > asked.gpus_per_node:
        raise Refused(f"--nproc {asked.nproc}: more ranks than the {asked.gpus_per_node} GPUs of a node")
    _check_container(asked)
    _check_more(asked.own.get("sbatch"))
    if re.search(r"[\x00-\x1f\x7f\"\\\ud800-\udfff]", str(asked.folder)):
        raise Refused(f"{asked.folder} has a sign in it that batch scripts cannot have; choose another --runs")
    for left in of_others(asked.runs, asked.name):
        raise Refused(f"{left} is left of another run; remove it, or choose another --name")
    if not asked.is_dry:
        _tool("sbatch")


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
        words = more_options(text)
    except ValueError as error:
        raise Refused(f"--sbatch {text!r}: {error}") from None
    for word in words:
        name = word.partition("=")[0]
        if not re.fullmatch(r"--[a-z][a-z-]+", name) or re.search(r"[\n\"\\]", word):
            raise Refused(f"--sbatch: {word!r} is no option; give them as NAME=VALUE, with blanks between them")
        made = next((one for one in MADE if one.startswith(name)), None)  # sbatch takes abbreviations
        if made is not None:
            raise Refused(f"--sbatch: {made} cannot be given there; {MADE[made]}")
        for pair in word.removeprefix("--export=").split(",") if word.startswith("--export=") else ():
            if "=" in pair and environment.tells_secret(*pair.split("=", 1)):
                raise Refused(
                    f"--sbatch: export={pair.split('=')[0]} reads like a secret, and would stand in {SCRIPT}; set it "
                    "in your shell: Slurm hands that environment on"
                )


def submit(submission: Submission) -> str:
    """Create the run and hand it to sbatch; it is removed where Slurm does not take it."""
    asked = submission
    files = asked.files | {SCRIPT: render(asked)}
    record = asked.record | {"reason": "being handed to Slurm", "submitted": {"engine": "slurm", "job": None}}
    run = folders.create(asked.runs, asked.name, files, record)
    with run.handing_over():
        try:
            job = _hand_over(run)
        except Unanswered:
            raise
        except BaseException:
            folders.remove(run)
            raise
        _note(run, job)
    return f"job {job} of Slurm's: {run.folder / SCRIPT}; how it stands: train show {asked.name}"


def again(run: Run) -> None:
    """Hand it to sbatch once more."""
    before = run.read()["submitted"]
    run.update(submitted=before | {"job": None})  # else a job that starts at once finds another one's number there
    try:
        job = _hand_over(run)
    except Unanswered:
        raise
    except BaseException:
        run.update(submitted=before)
        raise
    _note(run, job)


def adopt(run: Run) -> None:
    """A job of it that Slurm has, and nobody has heard of."""
    job = _made(run)
    if job is not None:
        _note(run, job)


def another_job(run: Run) -> str | None:
    """The number of the job that has this run, if this process belongs to another one. A run without a known job is
    that of the first one that begins."""
    own, taken = os.environ.get("SLURM_JOB_ID"), run.read().get("submitted") or {}
    if own is None or taken.get("engine") != "slurm" or taken["job"] == own:
        return None

    def take(record: dict[str, Any]) -> None:
        if record["submitted"]["job"] is None:
            record["submitted"]["job"] = own

    if taken["job"] is None:
        run.update(take)
        taken = run.read()["submitted"]
    return taken["job"] if taken["job"] != own else None


def _note(run: Run, job: str) -> None:
    def change(record: dict[str, Any]) -> None:
        record["submitted"] = {"engine": "slurm", "job": job}
        if not run.alive():  # it may run already
            record["reason"] = f"handed to Slurm as job {job}"

    run.update(change)


def _hand_over(run: Run) -> str:
    """Hand it to sbatch. Returns the number of its job, also where sbatch has made one and could not say so.

    Raises:
        Unanswered: whether there is such a job is not known.
        Refused: Slurm does not take it.
    """
    try:
        return _sbatch(run)
    except BaseException as error:
        try:
            job = _made(run)
        except Silent as silence:
            raise Unanswered(
                f"{error}; and whether Slurm has a job of {run.name} now is not known ({silence}); once it answers, "
                f"this looks for it, and hands the run over if there is none: train resume {run.name}"
            ) from None
        if job is not None and isinstance(error, Refused):
            return job
        if job is not None:  # Ctrl+C
            _call("scancel", job)
        raise


def _made(run: Run) -> str | None:
    """The job that Slurm has of this run, by its mark.

    Raises:
        Silent: it does not say.
    """
    mark = _mark(run)
    if mark is None or shutil.which("squeue") is None:
        return None
    try:
        said = _call("squeue", "--me", "--noheader", "--format=%i|%k")
    except Refused as error:
        raise Silent(error) from None
    rows = (line.strip().partition("|") for line in said.splitlines())
    return next((job for job, _, comment in rows if job.isdecimal() and mark in comment.split()), None)


def _mark(run: Run) -> str | None:
    id_ = run.read().get("submission")
    return f"{_MARK}{id_}" if id_ else None


def _comment(run: Run) -> list[str]:
    """sbatch's option for the mark. It takes the place of the script's, so what the user has said there comes along."""
    words = [mark] if (mark := _mark(run)) else []
    with contextlib.suppress(OSError):
        for line in (run.folder / SCRIPT).read_text(encoding="utf-8").splitlines():
            if line.startswith("#SBATCH --com"):  # which sbatch takes for --comment, too
                words.insert(0, shlex.split(line)[1].partition("=")[2])
    return [f"--comment={' '.join(words)}"] if words else []


def _sbatch(run: Run) -> str:
    said = _call("sbatch", "--parsable", *_comment(run), str(run.folder / SCRIPT))
    job = (said.strip().splitlines() or [""])[-1].partition(";")[0]
    if not re.fullmatch(r"[0-9]+", job):
        raise Refused(f"sbatch gives no number of a job: {one_line(repr(said[:60]))}; see: squeue --name={run.name}")
    return job


def standings(at: str | None) -> dict[str, Standing]:
    """The user's jobs that Slurm has not done with, by number."""
    if shutil.which("squeue") is None:
        raise Silent("there is no squeue here")
    try:
        said = _call("squeue", "--noheader", "--me", "--format=%i|%T|%r", patience=_GLANCE)
    except Refused as error:
        raise Silent(error) from None
    rows = (line.split("|", 2) for line in said.splitlines() if line.count("|") >= 2)
    return {
        job: Standing(is_running=state in _RUNNING, words=state.lower() + (f", {why}" if why != "None" else ""))
        for job, state, why in rows
    }


def halt(run: Run, standing: Standing, now: bool) -> None:
    """Ask its ranks to end, or take it out of the queue."""
    record = run.read()
    if not standing.is_running:
        _call("scancel", str(record["submitted"]["job"]))
    elif record["state"] in (store.CREATED, store.RUNNING):
        wanted = store.NOW if now else store.POLITE
        if run.stop_asked() not in (wanted, store.NOW):  # one that is just starting overlooks the first
            run.ask_stop(wanted)


def forget(run: Run) -> str:
    """Slurm keeps nothing of a job that has ended."""
    return ""


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise Refused(f"there is no {name} here; submit from a machine of the cluster, or see --dry-run")
    return found


def _call(*command: str, patience: float = _PATIENCE) -> str:
    """What a command of Slurm's says.

    Raises:
        Refused: it is missing, fails, or does not answer.
    """
    try:
        done = subprocess.run(
            [_tool(command[0]), *command[1:]],
            capture_output=True, encoding="utf-8", errors="replace", timeout=patience, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Refused(f"{command[0]} does not answer; is the controller there? scontrol ping") from None
    except OSError as error:
        raise Refused(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        raise Refused(f"{command[0]}: {one_line(done.stderr) or f'exit code {done.returncode}'}")
    return done.stdout

"""The batch script that Slurm is given: to be read by whoever wants to know what happens."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import train
from train import hashing
from train.cluster.submission import FILE, NODES, Submission, time_of

_BY_FLAG = "give it as a flag of train submit"
MADE = {
    **dict.fromkeys(("--nodes", "--cpus-per-task", "--mem", "--time", "--partition", "--account"), _BY_FLAG),
    **dict.fromkeys(("--gpus-per-node", "--gres", "--gpus", "--ntasks", "--ntasks-per-node"), "see --gpus-per-node"),
    **dict.fromkeys(("--job-name",), "it is the run's name"),
    **dict.fromkeys(("--output", "--error", "--open-mode", "--requeue", "--no-requeue", "--wrap"), "leave it out"),
    "--signal": "see --warn", "--array": "submit several runs", "--wait": "see --follow",
    "--test-only": "see --dry-run",
    "--clusters": "submit from a machine whose default that cluster is",
    **dict.fromkeys(("--parsable", "--help", "--usage", "--version", "--quiet"), "leave it out"),
}  # fmt: skip
"""Options of sbatch that stand in the script already, or cannot stand there, and what to do instead."""

_BODY = r"""
runs={runs}
run={run}
python={python}
meet=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 10000))
{environment}
# What runs on each node: one agent, which starts the ranks there. Node 0 keeps the run in $runs, node R, whole too, in
# $runs/{nodes}/R.
# shellcheck disable=SC2016
agent='
    runs=$2
    if [ "$SLURM_NODEID" != 0 ]; then runs=$2/{nodes}/$SLURM_NODEID; fi
    exec "$0" -P -m train.own train.runs.placed "$1/{file}" --runs "$runs" --node "$SLURM_NODEID" --rendezvous "$3" \
        --tell "$1/.told-$SLURM_JOB_ID"'
told=$run/.told-$SLURM_JOB_ID

# Slurm warns this script (USR1) before the time limit, and where it is set up so, before it takes the nodes away (else
# TERM comes to the agents). The agents are told (USR2), all ranks save, and the agents exit with 75.
asked='' again='' step=''
# shellcheck disable=SC2317,SC2329
warn() {{
    asked=1 again=1
    if [ -n "$step" ]; then kill -USR2 "$step"; fi
}}
trap warn USR1 TERM

# A controller that is away has two minutes to come back.
patiently() {{ for _ in {{1..60}}; do if "$@"; then break; else sleep 2; fi; done; }}

# Slurm gives up a node that it does not reach, and starts the job elsewhere; what runs here hears of that when the node
# is back. From then on this job's number is the other start's.
state=''
is_this_start() {{
    local said starts
    said=$(patiently squeue --noheader --jobs="$SLURM_JOB_ID" --Format=State:20,RestartCnt:10)
    read -r state starts <<<"$said"
    [ -z "$state" ] || [ "$starts" = "${{SLURM_RESTART_COUNT:-0}}" ] # where nobody answers, nothing speaks against it
}}

# Where a run has two jobs, for the answer about one was lost, the one on record goes on with it, and the other ends.
is_on_record() {{
    local named
    named=$(sed -n '/^ "submitted": {{/,/^ }}/s/^  "job": "\([0-9]*\)".*/\1/p' "$run/run.json" 2>/dev/null)
    [ -z "$named" ] || [ "$named" = "$SLURM_JOB_ID" ]
}}

# Agents say how it ended by 0 finished, 1 interrupted, 2 refused, 3 failed, 75 stopped. Anything else: one was killed,
# and all begin again where the last checkpoint is. When one has ended, the others have a minute to end, too. Where they
# wait for it, srun then kills them and tells of that alone; what is refused or has failed is told by a file besides.
for ((deaths = 0; ; deaths++)); do
    again=''
    rm -f "$told"
    srun --label --ntasks-per-node=1 --cpus-per-task={cpus} --wait=60 --kill-on-bad-exit=0{container} &
    step=$!
    wait "$step"
    code=$?
    while [ -n "$again" ]; do # a signal ended the waiting, not the step
        again=''
        wait "$step"
        code=$?
    done
    if [ -s "$told" ]; then code=$(<"$told"); fi
    case $code in 0 | 1 | 2 | 3 | 75) break ;; esac
    if [ -n "$asked" ] || ((deaths == {deaths})) || ! is_on_record || ! is_this_start; then break; fi
    echo "train: an agent was killed (exit code $code); starting them again"
done

# Saved because it had to, or warned and killed before it could: the same job again, as often as it takes. Not if it was
# cancelled, nor if its user has stopped the run, nor if the run has another job.
if [[ $code == 75 || ( -n $asked && $code != [023] ) ]] && ! grep -qs '"stopped_by": "user"' "$run/run.json" &&
    is_on_record && is_this_start; then
    echo "train: the run has not come to its end (exit code $code); job $SLURM_JOB_ID is ${{state,,}}"
    if [ "$state" = RUNNING ]; then patiently scontrol requeue "$SLURM_JOB_ID"; fi
fi
exit "$code"
"""


def render(submission: Submission) -> str:
    """The batch script."""
    asked = submission
    shape = f"{asked.nodes} node{'s' * (asked.nodes > 1)}, {asked.nproc} rank{'s' * (asked.nproc > 1)} on each"
    head = [
        "#!/bin/bash",
        f"# The run {asked.name} ({shape}), as train submit hands it to Slurm.",
        f"# Once more: train resume {asked.name} --runs {shlex.quote(str(asked.runs))}",
        *(f"#SBATCH {line}" for line in _options(asked)),
    ]
    root = _checkout()
    body = _BODY.format(
        runs=shlex.quote(str(asked.runs)),
        run=shlex.quote(str(asked.folder)),
        python="python3" if asked.image else shlex.quote(sys.executable),
        environment=_environment(root),
        file=FILE,
        nodes=NODES,
        cpus=asked.cpus or asked.nproc,
        container=_command(asked, root),
        deaths=3 if asked.max_restarts is None else asked.max_restarts,
    )
    return "\n".join(head) + "\n" + body


def _environment(root: Path | None) -> str:
    """What Python reads as it starts: where this package is, and by what it hashes strings (train/hashing.py)."""
    path = f"export PYTHONPATH={shlex.quote(str(root))}${{PYTHONPATH:+:$PYTHONPATH}}\n" if root else ""
    return f"{path}export {hashing.SEED}=${{{hashing.SEED}:-{hashing.fixed({})[hashing.SEED]}}}\n"


def _options(asked: Submission) -> list[str]:
    log = str(asked.folder / "slurm-").replace("%", "%%")
    lines = [f"--job-name={asked.name}", f"--nodes={asked.nodes}", "--ntasks-per-node=1"]
    lines += [f"--cpus-per-task={asked.cpus or asked.nproc}"]
    lines += [f"--gpus-per-node={asked.gpus_per_node}"] if asked.gpus_per_node else []
    lines += [f"--mem={asked.memory}"] if asked.memory else []
    lines += [f"--time={time_of(asked.seconds)}"] if asked.seconds else []
    lines += [f"--{name}={asked.own[name]}" for name in ("partition", "account") if asked.own.get(name)]
    lines += [f'--output="{log}%j.log"', "--open-mode=append", "--requeue", f"--signal=B:USR1@{asked.warn}"]
    return lines + [_quoted(word) for word in more_options(asked.own.get("sbatch"))]


def more_options(text: str | None) -> list[str]:
    """The options in `qos=long exclude=n7`, as sbatch has them.

    Raises:
        ValueError: a quote is not closed.
    """
    return ["--" + word.removeprefix("--") for word in shlex.split(text or "")]


def _quoted(word: str) -> str:
    name, equals, value = word.partition("=")
    return f'{name}="{value}"' if equals and not value.isalnum() else word


def _checkout() -> Path | None:
    """The folder that this package lies in, where it is not installed; a node's Python has to be told."""
    root = Path(train.__file__).resolve().parents[1]
    return None if root.is_relative_to(Path(sys.prefix).resolve()) and root.name == "site-packages" else root


def _command(asked: Submission, root: Path | None) -> str:
    """The rest of srun's line: the agent, in its container if there is one."""
    agent = ' \\\n        bash -c "$agent" "$python" "$run" "$runs" "$meet"'
    if asked.image is None:
        return agent
    folders = sorted({str(folder) for folder in (asked.runs, Path.cwd(), root) if folder})
    by = asked.own.get("container_by") or ("apptainer" if asked.image.endswith(".sif") else "pyxis")
    if by == "apptainer":
        binds = " ".join(f"--bind {shlex.quote(folder)}" for folder in folders)
        nv = " --nv" if asked.gpus_per_node else ""
        return f" \\\n        apptainer exec{nv} {binds} {shlex.quote(asked.image)}{agent}"
    mounts = shlex.quote(",".join(f"{folder}:{folder}" for folder in folders))
    return f" \\\n        --container-image={shlex.quote(asked.image)} --container-mounts={mounts}{agent}"

"""The commands, one file each.

A command's module has `EXAMPLES` (command lines for its help), `add_arguments(parser)` and `run(options, runs)`. It
imports what is heavy (torch, matplotlib) only inside `run`.
"""

GROUPS = {
    "start a run": {
        "launch": "start a run inside tmux and return; the run outlives this shell",
        "run": "train in this terminal; under torchrun: act as one of its ranks",
        "submit": "hand a run to a cluster: Slurm or Kubernetes",
        "fork": "start a new run from a checkpoint of another run",
        "sweep": "launch a run for each combination of values, and compare them",
    },
    "watch runs": {
        "ls": "list runs, their state and results",
        "show": "tell one run's story: state, reason, attempts, checkpoints",
        "top": "live page of runs, their ranks and the GPUs",
        "gpus": "show who holds which GPU of this machine",
        "queue": "show which runs wait for GPUs or cores",
        "web": "show the runs in a browser: what happened, live curves, logs",
        "logs": "print the output of a rank",
        "wait": "wait until runs have ended",
        "notify": "say where notices of a run's end go, or send a test",
        "attach": "open the live terminal of a run (leave with Ctrl-b d)",
    },
    "control runs": {
        "stop": "save a run, then stop it",
        "resume": "continue a stopped, interrupted or failed run",
        "keeper": "resume interrupted runs; save all runs on SIGTERM",
        "mirror": "copy what the mirror of a run lacks",
        "fetch": "fetch a run from its mirror",
        "archive": "pack a run into one file, to resume it on another machine",
        "mv": "rename a run, even while it trains",
        "prune": "delete checkpoints of ended runs, except the last and the best",
        "rm": "delete runs that are not running",
    },
    "use the results": {
        "plot": "draw loss, metrics, learning rate and speed of runs",
        "report": "show where the time of a run went, or write an HTML page",
        "eval": "evaluate a checkpoint",
        "export": "write the weights to .safetensors, .pt or .onnx",
    },
    "check the machine": {
        "doctor": "find what is wrong with this machine and how to fix it",
        "prove": "show that no kill changes the bits of a run, or where one does",
        "bench": "measure this machine: checkpoint, collective, input, lr, scaling",
        "exporter": "serve metrics of runs and GPUs to Prometheus over HTTP",
    },
}
"""Maps a purpose to its commands, each with one line on what the command does."""

COMMANDS = {name: text for commands in GROUPS.values() for name, text in commands.items()}
"""Maps every command to what it does, in one line."""

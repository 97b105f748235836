"""The commands, one file each: `add_arguments(parser)` says what it takes, `run(options, runs)` does it.

Their modules import what is heavy (torch, matplotlib) only when they run.
"""

COMMANDS = {
    "run": "train here and now; under torchrun: be one of its ranks",
    "launch": "start a run inside tmux and return; it outlives this shell",
    "submit": "hand a run to a cluster: Slurm, Kubernetes",
    "ls": "list the runs and their state",
    "show": "everything about one run",
    "top": "a live page of runs, their ranks and the GPUs",
    "exporter": "figures of runs and GPUs for Prometheus, over HTTP",
    "logs": "the output of a rank",
    "attach": "the live terminal of a run (detach: Ctrl-b d)",
    "stop": "save and stop a run; of a script: ask it by SIGTERM",
    "resume": "continue a stopped, interrupted or failed run",
    "fork": "go on from a checkpoint in a new run, with other fields",
    "archive": "pack a run into one file, with which another machine goes on",
    "mv": "give a run another name, also while it trains",
    "rm": "delete runs that are not running",
    "keeper": "keep runs alive: resume what was interrupted, save all on SIGTERM",
    "eval": "evaluate a run's newest checkpoint",
    "export": "write a run's weights to .safetensors, .pt or .onnx",
    "doctor": "check this machine: what is wrong with it, and the command that mends it",
    "bench": "measure this machine; train bench --help says what",
    "report": "where the time of a run went; with --to: its figures and story as one HTML page",
    "plot": "draw loss, learning rate and throughput of runs",
}
"""Every command and what it does, in a line."""

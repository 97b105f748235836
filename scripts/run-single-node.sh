#!/usr/bin/env bash
# One run on all GPUs of this machine, or on two CPU processes where there is none; followed to its end.
#
#     scripts/run-single-node.sh digits --name first --epochs 5
#
# It runs in tmux and goes on when this terminal is closed. Inside the station `train` is there; on a machine without
# one the environment of `make setup` is used. With --torchrun first, torchrun itself starts the ranks, each a
# `train run`, in a tmux session of its own (docs/scripts.md says what differs then).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

torchrun=''
if [ "${1:-}" = --torchrun ]; then
    torchrun=1
    shift
fi
if [ $# -eq 0 ] || [ "${1#-}" != "$1" ]; then
    echo "usage: scripts/run-single-node.sh [--torchrun] TASK [--name NAME] [--FIELD VALUE …]" >&2
    exit 2
fi
if [ "${TRAINSTATION_IMAGE:-}" = 1 ]; then
    train=(train) python=python3
elif [ -x .venv/bin/python ]; then
    python=.venv/bin/python
    train=("$python" -m train) # of this checkout, also where .venv is a link to that of another
else
    echo "run-single-node: no environment here: make setup, or make up and make shell" >&2
    exit 2
fi
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || gpus=0
nproc=$((gpus > 0 ? gpus : 2))
if [ -n "$torchrun" ]; then
    # shellcheck source=scripts/torchrun.sh
    . scripts/torchrun.sh
    torchrun_in_tmux "$python" --standalone --nproc-per-node "$nproc" -- "$@"
fi
exec "${train[@]}" launch "$@" --nproc "$nproc" --follow

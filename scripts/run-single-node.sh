#!/usr/bin/env bash
# Trains one run on all GPUs of this machine, or with two processes on the CPU, and shows its output until the end.
#
#     scripts/run-single-node.sh digits --name demo1 --epochs 5
#
# The run is in tmux and continues when this terminal is closed. Outside the station the environment of `make setup` is
# used. With --torchrun as the first argument, torchrun itself starts the ranks, each a `train run`, in a separate tmux
# session (docs/coming-from.md explains the differences).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# shellcheck source=scripts/launching.sh
. scripts/launching.sh

torchrun=()
if [ "${1:-}" = --torchrun ]; then
    torchrun=(--standalone --nproc-per-node "$(ranks_here)")
    shift
fi
if [ $# -eq 0 ] || [ "${1#-}" != "$1" ]; then
    refuse "name a task to train: [--torchrun] TASK [--name NAME] [--FIELD VALUE …]"
fi
[ ${#torchrun[@]} = 0 ] || torchrun_in_tmux "$@"
exec "${train[@]}" launch "$@" --nproc "$(ranks_here)" --follow

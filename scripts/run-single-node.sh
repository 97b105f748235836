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

# shellcheck source=scripts/launching.sh
. scripts/launching.sh

torchrun=()
if [ "${1:-}" = --torchrun ]; then
    torchrun=(--standalone --nproc-per-node "$(ranks_here)")
    shift
fi
if [ $# -eq 0 ] || [ "${1#-}" != "$1" ]; then
    refuse "say what to train: [--torchrun] TASK [--name NAME] [--FIELD VALUE …]"
fi
[ ${#torchrun[@]} = 0 ] || torchrun_in_tmux "$@"
exec "${train[@]}" launch "$@" --nproc "$(ranks_here)" --follow

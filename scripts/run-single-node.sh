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
# shellcheck source=scripts/launching.sh
. scripts/launching.sh
[ -z "$torchrun" ] || torchrun_in_tmux --standalone --nproc-per-node "$(ranks_here)" -- "$@"
exec "${train[@]}" launch "$@" --nproc "$(ranks_here)" --follow

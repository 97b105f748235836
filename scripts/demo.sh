#!/usr/bin/env bash
# Trains a first run: two processes learn scanned digits inside tmux. Then it exports the weights and draws the curves.
# `make demo` runs this. Arguments go to `train launch`, for example `make demo ARGS="--nproc 1"`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# shellcheck source=scripts/launching.sh
. scripts/launching.sh

runs=${TRAIN_RUNS:-runs}
export TRAIN_RUNS=$runs
mkdir -p "$runs"

name=demo-$(date +%Y%m%d-%H%M%S)-$$ # with the process number, because another demo may start in the same second

echo "Training digits as run $name, with two processes in tmux. Ctrl-C ends the display, not the run."
trap : INT # the run continues, and this script too, to look at the run's state
status=0
"${train[@]}" launch digits --name "$name" --nproc 2 --follow "$@" || status=$?
trap - INT

if [ "$status" -ne 0 ]; then
    [ ! -d "$runs/$name" ] || echo "demo: the run did not finish (exit code $status)." >&2
    exit "$status"
fi
read -r state accuracy < <("${train[@]}" show "$name" --json | "$python" -c 'import json, sys
record = json.load(sys.stdin)
print(record["state"], round((record.get("metrics") or {}).get("accuracy", 0), 4))')
[ "$state" = finished ] || exit 0 # the user ended the display; train has printed how to return to the run

"${train[@]}" export "$name" --to "$runs/$name/model.safetensors" >/dev/null
"${train[@]}" plot "$name" --to "$runs/$name/plot.png" >/dev/null
checkpoints=("$runs/$name"/checkpoints/step-*) # their names sort by step

activate=""
type -P train >/dev/null || activate=$'\n  . .venv/bin/activate             put train on the PATH of this shell'
cat <<EOT

test accuracy  $accuracy
checkpoint     ${checkpoints[${#checkpoints[@]} - 1]}
weights        $runs/$name/model.safetensors
curves         $runs/$name/plot.png

What to type next:$activate
  train ls                         list all runs
  train show $name  show this run
  train logs $name  print the output of its processes
  train launch digits --name demo1 --nproc 2 --epochs 200
                                   start a longer run, which outlives this terminal
  train attach demo1               open its live terminal (leave with Ctrl-b d)
  train stop demo1                 save a checkpoint and stop
  train resume demo1               continue from that checkpoint
  train launch my_task.py          train your own task, see README
  make help                        list everything else
EOT

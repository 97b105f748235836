#!/usr/bin/env bash
# A first run from start to end: two processes learn scanned digits inside tmux, then the weights are exported and the
# curves drawn. `make demo` runs this; arguments go to `train launch`, as in `make demo ARGS="--nproc 1"`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# shellcheck source=scripts/launching.sh
. scripts/launching.sh

runs=${TRAIN_RUNS:-runs}
export TRAIN_RUNS=$runs
mkdir -p "$runs"

name=demo-$(date +%Y%m%d-%H%M%S)-$$ # another demo may start in the same second

echo "Training digits as $name, two processes in tmux; Ctrl-C stops the watching, not the run."
trap : INT # the run goes on, and so does this script, to see how things stand
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
[ "$state" = finished ] || exit 0 # no longer watched; train has said how to come back to it

"${train[@]}" export "$name" --to "$runs/$name/model.safetensors" >/dev/null
"${train[@]}" plot "$name" --to "$runs/$name/plot.png" >/dev/null
checkpoints=("$runs/$name"/checkpoints/step-*) # their names sort by step

activate=""
type -P train >/dev/null || activate=$'\n  . .venv/bin/activate             puts train on this shell\'s PATH'
cat <<EOT

test accuracy  $accuracy
checkpoint     ${checkpoints[${#checkpoints[@]} - 1]}
weights        $runs/$name/model.safetensors
curves         $runs/$name/plot.png

What to type next:$activate
  train ls                         all runs
  train show $name  what became of this one
  train logs $name  what its processes printed
  train launch digits --name mine --nproc 2 --epochs 200
                                   a longer one; it outlives this terminal
  train attach mine                its live screen (leave with Ctrl-b d)
  train stop mine                  saves a checkpoint and stops
  train resume mine                continues as if nothing had happened
  train launch my_task.py          a task of your own, see README
  make help                        everything else
EOT

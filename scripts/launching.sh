# shellcheck shell=bash disable=SC2034,SC2154 # train: for those that source it; torchrun: from them
# Shared by demo.sh, run-single-node.sh and train-multinode.sh, which source it in the checkout's folder.

refuse() {
    echo "$(basename "$0" .sh): $1" >&2
    exit 2
}

# shellcheck source=scripts/env.sh
. scripts/env.sh
mirrors_from_env
if [ "${TRAINSTATION_IMAGE:-}" = 1 ]; then
    train=(train) python=python3
else
    python=.venv/bin/python
    train=("$python" -m train) # this checkout's package, even if .venv is a link to another checkout's
    [ -x "$python" ] || refuse "this checkout has no environment: make setup, or make up and make shell"
fi

ranks_here() { # print one rank per GPU, or 2 without a GPU
    local gpus
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || gpus=0
    echo $((gpus > 0 ? gpus : 2))
}

# torchrun_in_tmux TASK [--name NAME] …: start torchrun with the options in $torchrun. Each rank is a `train run`.
torchrun_in_tmux() {
    local name session
    name=$(sed -nE 's/.* --name[ =]([^ ]+).*/\1/p' <<<" $*")
    if [ -z "$name" ]; then
        name=$(basename "$1" .py)-$(date +%Y%m%d-%H%M%S)
        set -- "$@" --name "$name"
    fi
    session=torchrun-$name
    ! tmux -L "$session" has-session 2>/dev/null || refuse "$session is already running: tmux -L $session attach"
    # Otherwise an attempt reads what the previous one left in its store.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    tmux -f /dev/null -L "$session" new-session -d -s "$session" -x 160 -y 48 -- \
        "$python" -m torch.distributed.run --max-restarts 3 "${torchrun[@]}" -m train run "$@"
    echo "torchrun has started. Its terminal: tmux -L $session attach. Look and stop: train show $name, train stop $name" >&2
    echo "$name"
    exit 0
}

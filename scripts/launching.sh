# shellcheck shell=bash disable=SC2034,SC2154 # train: for those that source it; torchrun: from them
# What demo.sh, run-single-node.sh and train-multinode.sh share; sourced by them in the checkout's folder.

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
    train=("$python" -m train) # of this checkout, also where .venv is a link to that of another
    [ -x "$python" ] || refuse "no environment here: make setup, or make up and make shell"
fi

ranks_here() { # one a GPU, or 2 where there is none
    local gpus
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || gpus=0
    echo $((gpus > 0 ? gpus : 2))
}

# torchrun_in_tmux TASK [--name NAME] …: torchrun itself, with the options in $torchrun, each rank a `train run`.
torchrun_in_tmux() {
    local name session
    name=$(sed -nE 's/.* --name[ =]([^ ]+).*/\1/p' <<<" $*")
    if [ -z "$name" ]; then
        name=$(basename "$1" .py)-$(date +%Y%m%d-%H%M%S)
        set -- "$@" --name "$name"
    fi
    session=torchrun-$name
    ! tmux -L "$session" has-session 2>/dev/null || refuse "$session runs already: tmux -L $session attach"
    # else an attempt reads what the one before has left in its store
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    tmux -f /dev/null -L "$session" new-session -d -s "$session" -x 160 -y 48 -- \
        "$python" -m torch.distributed.run --max-restarts 3 "${torchrun[@]}" -m train run "$@"
    echo "torchrun has begun; its terminal: tmux -L $session attach; then train show $name, train stop $name" >&2
    echo "$name"
    exit 0
}

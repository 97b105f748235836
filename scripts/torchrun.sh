# shellcheck shell=bash
# torchrun itself in a tmux session, each rank a `train run`; for the scripts that take --torchrun.
#
#     torchrun_in_tmux PYTHON TORCHRUN_OPTION… -- TASK [--name NAME] …
torchrun_in_tmux() {
    local python=$1 options=() name='' word previous='' session
    shift
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    shift
    for word in "$@"; do
        [ "$previous" != --name ] || name=$word
        case $word in --name=*) name=${word#--name=} ;; esac
        previous=$word
    done
    if [ -z "$name" ]; then
        name=$(basename "$1" .py)-$(date +%Y%m%d-%H%M%S)
        set -- "$@" --name "$name"
    fi
    session=torchrun-$name
    if tmux -L "$session" has-session 2>/dev/null; then
        echo "$session runs already: tmux -L $session attach" >&2
        exit 2
    fi
    # else an attempt reads what the one before has left in its store
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    tmux -f /dev/null -L "$session" new-session -d -s "$session" -x 160 -y 48 -- \
        "$python" -m torch.distributed.run --max-restarts 3 "${options[@]}" -m train run "$@"
    echo "torchrun has begun; its terminal: tmux -L $session attach; then train show $name, train stop $name" >&2
    echo "$name"
    exit 0
}

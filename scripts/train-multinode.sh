#!/usr/bin/env bash
# One run on several machines: copy this checkout to all of them, and call this on each with the same arguments.
#
#     scripts/train-multinode.sh --hosts node0,node1 --name first digits --epochs 5
#     scripts/train-multinode.sh --hosts node0,node1 --resume first
#
# It finds by itself which of the hosts this is: the one whose address is one of this machine's. The first host is where
# all meet. Options: --port P (29400), --nproc N (one rank a GPU, or 2 where there is none), --min M (nodes may leave
# and join; at least M go on), --rank R (which host this is, where addresses do not tell). Hosts may also stand in
# TRAIN_HOSTS, or, one a line, in a file: --hosts @FILE. It runs in tmux; train stop NAME on any of them stops all.
# With --torchrun torchrun itself starts the ranks (docs/scripts.md): all hosts must then see the same --runs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# shellcheck source=scripts/launching.sh
. scripts/launching.sh

hosts=${TRAIN_HOSTS:-} port=29400 nproc='' min='' rank='' resume='' torchrun='' rest=()
while [ $# -gt 0 ]; do
    option=$1
    shift
    case $option in
        --hosts | --port | --nproc | --min | --rank | --resume)
            [ $# -gt 0 ] || refuse "$option needs a value"
            printf -v "${option#--}" %s "$1"
            shift
            ;;
        --torchrun) torchrun=1 ;;
        *) rest+=("$option") ;;
    esac
done
[ -n "$hosts" ] || refuse "say which machines: --hosts HOST,HOST,… (the same list on each), or TRAIN_HOSTS"
if [ "${hosts#@}" != "$hosts" ]; then
    [ -f "${hosts#@}" ] && [ -r "${hosts#@}" ] || refuse "cannot read ${hosts#@}"
    hosts=$(sed 's/#.*//' "${hosts#@}")
fi
read -r -a list <<<"$(tr ',\n\t' '   ' <<<"$hosts")"
count=${#list[@]}

# hostname says all but those of the loopback.
addresses=$(printf '%s\n' 127.0.0.1 ::1 && hostname -I 2>/dev/null | tr ' ' '\n') || :

# Whether a host is this machine: one of its addresses is one of ours, or it has our name.
is_here() {
    local address
    while read -r address _; do
        grep -qxF "$address" <<<"$addresses" && return 0
    done < <(getent ahosts "$1")
    [ "$1" = "$(hostname)" ] || [ "$1" = "$(hostname -f 2>/dev/null)" ]
}

if [ -z "$rank" ]; then
    for index in "${!list[@]}"; do
        if is_here "${list[$index]}"; then
            [ -z "$rank" ] || refuse "${list[$rank]} and ${list[$index]} are both this machine; say which: --rank R"
            rank=$index
        fi
    done
    [ -n "$rank" ] || refuse "none of ${list[*]} is this machine ($(hostname)); correct the list, or say which: --rank R"
fi
case $rank in '' | *[!0-9]* | ?????*) refuse "--rank $rank: give a number from 0 to $((count - 1))" ;; esac
[ "$rank" -lt "$count" ] || refuse "--rank $rank: the $count hosts are counted from 0 to $((count - 1))"

case ${list[0]} in *:*) place="[${list[0]}]:$port" ;; *) place="${list[0]}:$port" ;; esac
cluster=(--nnodes "${min:+$min:}$count" --node-rank "$rank" --rendezvous "$place")
echo "train-multinode: this is node $rank of $count (${list[$rank]}); all meet at $place" >&2
if [ -n "$resume" ]; then
    [ -z "$torchrun" ] || refuse "--resume is for train launch; leave out --torchrun"
    exec "${train[@]}" resume "$resume" ${nproc:+--nproc "$nproc"} "${cluster[@]}" ${rest[@]+"${rest[@]}"}
fi
nproc=${nproc:-$(ranks_here)}
if [ -n "$torchrun" ]; then
    [ -z "$min" ] || refuse "--min is for train launch; torchrun starts all hosts, or none"
    torchrun=(--nnodes "$count" --node-rank "$rank" --master-addr "${list[0]}" --master-port "$port" --nproc-per-node "$nproc")
    torchrun_in_tmux "${rest[@]}"
fi
exec "${train[@]}" launch ${rest[@]+"${rest[@]}"} --nproc "$nproc" "${cluster[@]}"

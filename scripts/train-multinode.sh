#!/usr/bin/env bash
# Trains one run on several machines. Copy this checkout to all of them, and call this on each with the same arguments.
#
#     scripts/train-multinode.sh --hosts node0,node1 --name demo1 digits --epochs 5
#     scripts/train-multinode.sh --hosts node0,node1 --resume demo1
#
# The script finds its own place in the list: the host whose address is one of this machine's. All nodes meet at the
# first host. The run is in tmux. `train stop NAME` on any machine stops all.
#
#     --hosts LIST   host names with commas; or TRAIN_HOSTS; or --hosts @FILE with one host a line
#     --port P       port at the first host (29400)
#     --nproc N      ranks on this machine (one a GPU, or 2 without a GPU)
#     --min M        nodes may leave and join; at least M continue
#     --rank R       this machine's place in the list, if its addresses do not tell
#     --torchrun     torchrun itself starts the ranks (docs/coming-from.md); all hosts must see the same --runs
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
[ -n "$hosts" ] || refuse "name the machines: --hosts HOST,HOST,… (the same list on each), or TRAIN_HOSTS"
if [ "${hosts#@}" != "$hosts" ]; then
    [ -f "${hosts#@}" ] && [ -r "${hosts#@}" ] || refuse "cannot read ${hosts#@}"
    hosts=$(sed 's/#.*//' "${hosts#@}")
fi
read -r -a list <<<"$(tr ',\n\t' '   ' <<<"$hosts")"
count=${#list[@]}

# hostname prints all addresses except those of the loopback.
addresses=$(printf '%s\n' 127.0.0.1 ::1 && hostname -I 2>/dev/null | tr ' ' '\n') || :

# Succeed if a host is this machine: it has one of our addresses, or our name.
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
            [ -z "$rank" ] || refuse "${list[$rank]} and ${list[$index]} are both this machine; choose one: --rank R"
            rank=$index
        fi
    done
    [ -n "$rank" ] || refuse "none of ${list[*]} is this machine ($(hostname)); correct the list, or choose one: --rank R"
fi
case $rank in '' | *[!0-9]* | ?????*) refuse "--rank $rank: give a number from 0 to $((count - 1))" ;; esac
[ "$rank" -lt "$count" ] || refuse "--rank $rank: the $count hosts are counted from 0 to $((count - 1))"

case ${list[0]} in *:*) place="[${list[0]}]:$port" ;; *) place="${list[0]}:$port" ;; esac
cluster=(--nnodes "${min:+$min:}$count" --node-rank "$rank" --rendezvous "$place")
echo "train-multinode: this is node $rank of $count (${list[$rank]}); all nodes meet at $place" >&2
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

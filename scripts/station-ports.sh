# shellcheck shell=bash disable=SC2154 # is_station: from station-identity.sh
# The two ports: who has one that is taken, and which pair is taken instead. Sourced by station.sh.

jupyter_set="" ssh_set="" # what a person set, in the environment or in .env
chosen_ports=""           # what was chosen instead, and is remembered as that: "JUPYTER,SSH", or one of them

# set_by_person NAME CHOSEN: the port, unless .env has it because it was chosen by an earlier make up.
set_by_person() {
    local value=${!1:-}
    if [ -z "$value" ]; then
        value=$(env_value "$1") || value=""
        [ "$value" != "$2" ] || value=""
    fi
    printf '%s' "$value"
}
find_set_ports() { # once, before choose_ports sets the same names
    local chosen
    chosen=$(env_value STATION_PORTS) || chosen=,
    jupyter_set=$(set_by_person JUPYTER_PORT "${chosen%,*}")
    ssh_set=$(set_by_person SSH_PORT "${chosen#*,}")
}

# The address people use for what is published on all of them.
reachable() { case $1 in 0.0.0.0 | '') printf 127.0.0.1 ;; '[::]' | ::) printf ::1 ;; *) printf '%s' "${1//[\[\]]/}" ;; esac; }
# published ID PORT: address and port on the host, of a container that may be stopped
published() {
    docker inspect -f "{{with index .HostConfig.PortBindings \"$2/tcp\"}}{{(index . 0).HostIp}} {{(index . 0).HostPort}}{{end}}" "$1"
}

# Does anything listen where this port would be published?
busy() {
    local bind local_address
    bind=$(setting BIND_ADDRESS 127.0.0.1)
    if ! command -v ss >/dev/null; then
        (exec 3<>"/dev/tcp/$(reachable "$bind")/$1") 2>/dev/null
        return
    fi
    for local_address in $(ss -Hltn "sport = :$1" | awk '{print $4}'); do
        local_address=${local_address%:*}
        case ${local_address%%%*} in '*' | 0.0.0.0 | '[::]' | "$bind" | "[::ffff:$bind]") return 0 ;; esac
        case $bind in 0.0.0.0 | '[::]') return 0 ;; esac
    done
    return 1
}

who_has() {
    local id folder found=""
    id=$(docker ps --quiet --filter "publish=$1" | head -n 1)
    if [ -n "$id" ]; then
        folder=$(folder_of "$id")
        if [ "$(label "$id" org.opencontainers.image.title)" = trainstation ] && [ -n "$folder" ]; then
            printf 'the station of %s' "$folder"
        else
            printf 'container %s' "$(docker inspect -f '{{.Name}}' "$id" | tr -d /)"
        fi
        return
    fi
    if command -v ss >/dev/null; then
        found=$(ss -Hltnp "sport = :$1" | sed -nE 's/.*users:\(\("([^"]*)",pid=([0-9]+).*/\1 (process \2)/p' | head -n 1)
    elif command -v lsof >/dev/null; then
        found=$(lsof -nP -iTCP:"$1" -sTCP:LISTEN 2>/dev/null | awk 'NR == 2 {print $1 " (process " $2 ")"}')
    fi
    printf '%s' "${found:-a program of another user}"
}

# Ports that other stations have, stopped ones too: they want them back when they start.
reserved() {
    local id port
    for id in $(docker ps --all --quiet --no-trunc "${is_station[@]}"); do
        [ "$id" != "$1" ] || continue
        for port in 8888 2222; do published "$id" "$port" 2>/dev/null || :; done # it may go at this moment
    done | awk '{printf " %s ", $2}'
}


check_set_ports() { # OWN SKIP
    local name port
    for name in "JUPYTER_PORT $jupyter_set" "SSH_PORT $ssh_set"; do
        port=${name#* }
        if [ -z "$port" ] || [[ $1 == *" $port "* ]]; then continue; fi
        if [[ $2 == *" $port "* ]] || busy "$port"; then
            die "port $port is taken on $(reachable "$(setting BIND_ADDRESS 127.0.0.1)") by $(who_has "$port"): stop it, or set ${name% *} in .env to a free one"
        fi
    done
}

# choose_ports ID [SKIP]: sets JUPYTER_PORT and SSH_PORT. What a person set is taken or refused; else it is the first pair
# that is free: the one it has or had, the usual one, those after it. Ports that ID, our own container, holds are free.
choose_ports() {
    local id=$1 skip=${2:-} own="" taken jupyter ssh step had port why=""
    had=$(env_value JUPYTER_PORT),$(env_value SSH_PORT) || :
    if [ -n "$id" ]; then
        jupyter=$(published "$id" 8888) ssh=$(published "$id" 2222)
        had=${jupyter##* },${ssh##* }
        [ "$(docker inspect -f '{{.State.Running}}' "$id")" != true ] || own=" ${had/,/ } "
    fi
    check_set_ports "$own" "$skip"
    taken="$skip$(reserved "$id")"
    free() { [[ $own == *" $1 "* ]] || { [[ $taken != *" $1 "* ]] && ! busy "$1"; }; }
    for ((step = -1; step < 500; step++)); do
        if [ "$step" -lt 0 ]; then
            jupyter=${jupyter_set:-${had%,*}} ssh=${ssh_set:-${had#*,}}
            [ -n "$jupyter" ] && [ -n "$ssh" ] || continue
        else
            jupyter=${jupyter_set:-$((8888 + step))} ssh=${ssh_set:-$((2222 + step))}
        fi
        if [ "$jupyter" != "$ssh" ] && { [ -n "$jupyter_set" ] || free "$jupyter"; } && { [ -n "$ssh_set" ] || free "$ssh"; }; then
            break
        fi
    done
    [ "$step" -lt 500 ] || die "no free pair of ports from 8888 and 2222 on: set JUPYTER_PORT and SSH_PORT in .env"
    # Said when it is not what it was, or what one expects.
    if { [ -z "$jupyter_set" ] && [ "$jupyter" != "${had%,*}" ] && [ "$had,$jupyter" != ,,8888 ]; } ||
        { [ -z "$ssh_set" ] && [ "$ssh" != "${had#*,}" ] && [ "$had,$ssh" != ,,2222 ]; }; then
        for port in "${had%,*}" "${had#*,}" 8888 2222; do
            if [ -z "$why" ] && [ -n "$port" ] && [[ " $jupyter $ssh " != *" $port "* ]] && ! free "$port"; then why="$port is taken by $(who_has "$port")"; fi
        done
        say "ports: $jupyter and $ssh, for ${why:-the usual ones are taken}"
    fi
    export JUPYTER_PORT=$jupyter SSH_PORT=$ssh
    chosen_ports=$([ -n "$jupyter_set" ] || printf '%s' "$jupyter"),$([ -n "$ssh_set" ] || printf '%s' "$ssh")
}

# Puts into .env what was chosen; the usual port needs no line, and what a person set is left as it is.
remember_ports() {
    local before jupyter=${chosen_ports%,*} ssh=${chosen_ports#*,} settings=()
    before=$(env_value STATION_PORTS) || before=,
    [ "$jupyter" != 8888 ] || jupyter=""
    [ "$ssh" != 2222 ] || ssh=""
    if [ -z "$jupyter_set" ]; then settings+=(JUPYTER_PORT "$jupyter"); else jupyter=${before%,*}; fi
    if [ -z "$ssh_set" ]; then settings+=(SSH_PORT "$ssh"); else ssh=${before#*,}; fi
    if [ "$jupyter,$ssh" = , ]; then settings+=(STATION_PORTS ""); else settings+=(STATION_PORTS "$jupyter,$ssh"); fi
    remember "${settings[@]}"
}

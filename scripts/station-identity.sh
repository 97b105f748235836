# shellcheck shell=bash disable=SC2154,SC2034 # id, image, lowered: from station.sh and others; moved_from: for it
# Finds this checkout's station: its name, its ports, its container and volumes. Sourced by station.sh.
#
# The name is drawn once. It is kept in .env for docker compose, and with the checkout's path in .secrets/checkout. So a
# copy can be told from a moved checkout, and a lost .env loses nothing.

project="" # its name
from_environment="" # the name counts for this call only
drawn=""            # it was drawn just now
copied_from="" moved_from=""

checksum() { if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi | cut -c "1-$1"; }
label() { docker inspect -f "{{index .Config.Labels \"$2\"}}" "$1" 2>/dev/null; }
folder_of() { label "$1" com.docker.compose.project.working_dir; }
is_station=(--filter label=com.docker.compose.service=station --filter label=com.docker.compose.oneoff=False)
container() { docker ps --all --quiet --no-trunc --filter "label=com.docker.compose.project=$project" "${is_station[@]}" | head -n 1; }

find_project() {
    local name="" kept="" path=""
    name=$(of_env COMPOSE_PROJECT_NAME)
    { read -r kept; read -r path; } < <(as_owner cat .secrets/checkout 2>/dev/null) || :
    project=${COMPOSE_PROJECT_NAME:-${name:-$kept}}
    [ -z "$project" ] || [[ $project =~ ^[a-z0-9][a-z0-9_-]*$ ]] ||
        die "COMPOSE_PROJECT_NAME=$project: lower-case letters, digits, - and _, the first a letter or digit"
    if [ -n "${COMPOSE_PROJECT_NAME:-}" ] && [ "$project" != "$name" ]; then from_environment=yes; return; fi
    if [ -n "$path" ] && ! [ "$path" -ef . ]; then
        if [ "$(head -n 1 "$path/.secrets/checkout" 2>/dev/null)" = "$kept" ]; then copied_from=$path project=""; else moved_from=$path; fi
    fi
    # A copy of .env alone does not prove that the volumes are this checkout's.
    if [ -n "$name" ] && [ -z "$kept" ] && [ -n "$(volumes)" ] && ! [ "$(folder_of "$(container)")" -ef . ]; then
        die "volumes of a station $name exist, and no .secrets/checkout shows that they belong here: choose another COMPOSE_PROJECT_NAME in .env, or, if they do, write that file with two lines, $name and $PWD"
    fi
    [ -n "$project" ] || { project=trainstation-$(random 3) drawn=yes; }
}
# Write all this to .env, so that docker compose alone finds the same station.
remember_identity() {
    [ -z "$from_environment" ] || return 0
    remember COMPOSE_PROJECT_NAME "$project" COMPOSE_FILE "$(compose_files)" STATION_BUILT "$([ -n "$(named_image)" ] && built_image || printf '%s' "$image")" \
        STATION_HOSTNAME "$STATION_HOSTNAME" STATION_LOWERED "" ${lowered[@]+"${lowered[@]}"} ${own_ports[@]+"${own_ports[@]}"}
    ! is_of_before || remember STATION_IMAGE ""
    secret checkout <<<"$project"$'\n'"$PWD"
}

# Print the container of this checkout's station. Prints nothing if there is none, or if the name is another checkout's.
station_id() { [ -n "$(other_checkout)" ] || container; }
# Print the checkout that owns the station of this name, unless it is this one.
other_checkout() {
    local id folder
    id=$(container)
    [ -n "$id" ] || return 0
    folder=$(folder_of "$id")
    [ -z "$folder" ] || [ "$folder" -ef . ] || [ "$folder" = "$moved_from" ] || [ ! -e "$folder/docker-compose.yml" ] || say "$folder"
}
volumes() { docker volume ls --quiet --filter "label=com.docker.compose.project=$project"; }
check_no_other() { # refuse if docker compose alone started a station here, under another name
    local other
    [ -n "$drawn" ] || return 0
    for other in $(docker ps --all --quiet --no-trunc "${is_station[@]}"); do
        [ "$(folder_of "$other")" -ef . ] && [ "$other" != "$id" ] || continue
        other=$(label "$other" com.docker.compose.project)
        die "docker compose alone started a station here: docker compose --project-name $other down, or keep it with COMPOSE_PROJECT_NAME=$other in .env"
    done
}

# Print a name as one label of a host name: lower-case letters, digits and hyphens, up to a length.
dns_label() { printf '%s' "$1" | tr '[:upper:]' '[:lower:]' | tr _ - | tr -cd 'a-z0-9-' | cut -c "1-${2:-63}" | sed 's/^-*//; s/-*$//'; }
# Choose the name in prompts and in the records of runs: the project and this machine. It stays the same when the
# machine is renamed, as laptops are.
choose_host_name() {
    local begins now
    begins=$(dns_label "$project" 40)-
    now=$(setting STATION_HOSTNAME)
    [[ $now == "$begins"?* ]] || now=$(dns_label "$begins$(uname -n | cut -d. -f1)" 56) # -second still fits behind it
    export STATION_HOSTNAME=$now
}

# Print the address to open for a port that is published on all addresses.
reachable() { case $1 in 0.0.0.0 | '') printf 127.0.0.1 ;; '[::]' | ::) printf ::1 ;; *) printf '%s' "${1//[\[\]]/}" ;; esac; }
# Print this machine's addresses in the network, one a line.
addresses_of_machine() {
    local name address
    { ip -o addr show up scope global 2>/dev/null || ifconfig 2>/dev/null | awk '/^[a-z]/ {name = $1} $1 == "inet" {print 0, name, "inet", $2}'; } |
        while read -r _ name _ address _; do
            case $name in docker* | br-* | veth* | lo*) continue ;; esac
            address=${address%%/*}
            [[ $address != 127.* ]] || continue
            case $1,$address in 0.0.0.0,*:*) ;; *,*:*) printf '[%s]\n' "$address" ;; *) printf '%s\n' "$address" ;; esac
        done
}
# Succeed if another program or station listens where this port would be published.
busy() {
    [ -z "$id" ] || [[ $'\n'$(docker port "$id")$'\n' != *":$1"$'\n'* ]] || return 1
    (exec 3<>"/dev/tcp/$(reachable "$(setting BIND_ADDRESS 127.0.0.1)")/$1") 2>/dev/null
}
who_has() {
    local id
    id=$(docker ps --quiet --filter "publish=$1" | head -n 1)
    if [ -z "$id" ]; then printf 'another program (ss -ltnp shows it)'
    elif [ "$(label "$id" com.docker.compose.service)" = station ]; then printf 'the station of %s' "$(folder_of "$id")"
    else printf 'container %s' "$(docker inspect -f '{{.Name}}' "$id" | tr -d /)"
    fi
}
own_ports=() # ports that make up chose, for .env

# choose_ports [TAKEN]: set JUPYTER_PORT and SSH_PORT. Ports that a person has set are used or refused. Otherwise they
# are 8888 and 2222, or, if one of these is taken, a pair computed from the station's name, or one of the next nine.
choose_ports() {
    local taken=${1:-} jupyter="" ssh="" port usual pair tries
    if [ -z "$copied_from" ]; then jupyter=$(setting JUPYTER_PORT) ssh=$(setting SSH_PORT); fi
    for port in JUPYTER_PORT=$jupyter SSH_PORT=$ssh; do
        [ -z "${port#*=}" ] || ! busy "${port#*=}" ||
            die "port ${port#*=} is taken on $(reachable "$(setting BIND_ADDRESS 127.0.0.1)") by $(who_has "${port#*=}"): stop it, or set ${port%=*} in .env to a free one"
    done
    usual="${jupyter:-8888} ${ssh:-2222}"
    for port in $usual; do [ -n "$taken" ] || ! busy "$port" || taken=$port; done
    if [ -n "$taken" ]; then
        pair=$((20000 + 2 * (16#$(printf '%s' "$project" | checksum 6) % 5000)))
        for ((tries = 0; tries < 10; tries++)); do # another station or program may have this pair: then the next one
            usual="${jupyter:-$pair} ${ssh:-$((pair + 1))}" port=""
            for port in $usual ""; do [ -n "$port" ] && busy "$port" && break || :; done
            [ -n "$port" ] || break
            pair=$((pair + 2))
        done
        [ -z "$port" ] || die "ports $taken and $port are taken: set JUPYTER_PORT and SSH_PORT in .env to free ones"
        say "ports: ${usual/ / and }, because $taken is taken by $(who_has "$taken")"
    fi
    export JUPYTER_PORT=${usual% *} SSH_PORT=${usual#* }
    own_ports=()
    # The default ports need no line.
    [ -n "$jupyter" ] || own_ports+=(JUPYTER_PORT "$([ "$JUPYTER_PORT" = 8888 ] || printf '%s' "$JUPYTER_PORT")")
    [ -n "$ssh" ] || own_ports+=(SSH_PORT "$([ "$SSH_PORT" = 2222 ] || printf '%s' "$SSH_PORT")")
}

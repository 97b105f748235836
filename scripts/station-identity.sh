# shellcheck shell=bash disable=SC2154,SC2034 # id, image, lowered: from station.sh and others; moved_from: for it
# Which station is this checkout's: its name, its ports, and what of the engine belongs to it. Sourced by station.sh.
#
# The name is drawn once and kept in .env, for docker compose, and in .secrets/checkout with the path it was given to: so a
# copy is told from a checkout that was moved, and a lost .env loses nothing.

project="" # its name
from_environment="" # the name counts for this call alone
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
    # A copy of .env alone does not say whose the volumes are.
    if [ -n "$name" ] && [ -z "$kept" ] && [ -n "$(volumes)" ] && ! [ "$(folder_of "$(container)")" -ef . ]; then
        die "there are volumes of a station $name, and no .secrets/checkout here says that it is this one's: give .env another COMPOSE_PROJECT_NAME, or, where it is, make that file with two lines, $name and $PWD"
    fi
    [ -n "$project" ] || { project=trainstation-$(random 3) drawn=yes; }
}
# What .env keeps of all this, so that docker compose alone finds the same station.
remember_identity() {
    [ -z "$from_environment" ] || return 0
    remember COMPOSE_PROJECT_NAME "$project" COMPOSE_FILE "$(compose_files)" STATION_BUILT "$([ -n "$(named_image)" ] && built_image || printf '%s' "$image")" \
        STATION_HOSTNAME "$STATION_HOSTNAME" ${lowered[@]+"${lowered[@]}"} ${own_ports[@]+"${own_ports[@]}"}
    ! is_of_before || remember STATION_IMAGE ""
    secret checkout <<<"$project"$'\n'"$PWD"
}

# The container of this checkout's station; nothing where there is none, or where the name is another's.
station_id() { [ -n "$(other_checkout)" ] || container; }
# The checkout that the station of this name belongs to, if it is not this one.
other_checkout() {
    local id folder
    id=$(container)
    [ -n "$id" ] || return 0
    folder=$(folder_of "$id")
    [ -z "$folder" ] || [ "$folder" -ef . ] || [ "$folder" = "$moved_from" ] || [ ! -e "$folder/docker-compose.yml" ] || say "$folder"
}
volumes() { docker volume ls --quiet --filter "label=com.docker.compose.project=$project"; }
check_no_other() { # a station that docker compose alone started here has another name
    local other
    [ -n "$drawn" ] || return 0
    for other in $(docker ps --all --quiet --no-trunc "${is_station[@]}"); do
        [ "$(folder_of "$other")" -ef . ] && [ "$other" != "$id" ] || continue
        other=$(label "$other" com.docker.compose.project)
        die "docker compose alone has started a station here: docker compose --project-name $other down, or keep it by COMPOSE_PROJECT_NAME=$other in .env"
    done
}

# A name as one part of a host's name: lower-case letters, digits and hyphens, as many as asked.
dns_label() { printf '%s' "$1" | tr '[:upper:]' '[:lower:]' | tr _ - | tr -cd 'a-z0-9-' | cut -c "1-${2:-63}" | sed 's/^-*//; s/-*$//'; }
# What the station is called in prompts and in the records of runs: its project and this machine. It keeps its name though
# the machine gets another, as laptops do.
choose_host_name() {
    local begins now
    begins=$(dns_label "$project" 40)-
    now=$(setting STATION_HOSTNAME)
    [[ $now == "$begins"?* ]] || now=$(dns_label "$begins$(uname -n | cut -d. -f1)" 56) # -second still fits behind it
    export STATION_HOSTNAME=$now
}

# The address people use for what is published on all of them.
reachable() { case $1 in 0.0.0.0 | '') printf 127.0.0.1 ;; '[::]' | ::) printf ::1 ;; *) printf '%s' "${1//[\[\]]/}" ;; esac; }
# What machines of the network call this one, where a port is published on all of its addresses: each in its line.
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
# Does another program, or another station, listen where this port would be published?
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
own_ports=() # those that no person has set, for .env

# choose_ports [TAKEN]: sets JUPYTER_PORT and SSH_PORT. What a person has set is taken or refused. Else they are 8888 and 2222, or,
# where one of these is taken, a pair that follows from the station's name.
choose_ports() {
    local taken=${1:-} jupyter="" ssh="" port usual pair
    if [ -z "$copied_from" ]; then jupyter=$(setting JUPYTER_PORT) ssh=$(setting SSH_PORT); fi
    for port in JUPYTER_PORT=$jupyter SSH_PORT=$ssh; do
        [ -z "${port#*=}" ] || ! busy "${port#*=}" ||
            die "port ${port#*=} is taken on $(reachable "$(setting BIND_ADDRESS 127.0.0.1)") by $(who_has "${port#*=}"): stop it, or set ${port%=*} in .env to a free one"
    done
    usual="${jupyter:-8888} ${ssh:-2222}"
    for port in $usual; do [ -n "$taken" ] || ! busy "$port" || taken=$port; done
    if [ -n "$taken" ]; then
        pair=$((20000 + 2 * (16#$(printf '%s' "$project" | checksum 6) % 5000)))
        usual="${jupyter:-$pair} ${ssh:-$((pair + 1))}"
        for port in $usual; do ! busy "$port" || die "ports $taken and $port are taken: set JUPYTER_PORT and SSH_PORT in .env to free ones"; done
        say "ports: ${usual/ / and }, for $taken is taken by $(who_has "$taken")"
    fi
    export JUPYTER_PORT=${usual% *} SSH_PORT=${usual#* }
    own_ports=()
    # The usual port needs no line.
    [ -n "$jupyter" ] || own_ports+=(JUPYTER_PORT "$([ "$JUPYTER_PORT" = 8888 ] || printf '%s' "$JUPYTER_PORT")")
    [ -n "$ssh" ] || own_ports+=(SSH_PORT "$([ "$SSH_PORT" = 2222 ] || printf '%s' "$SSH_PORT")")
}

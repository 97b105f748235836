# shellcheck shell=bash disable=SC2154,SC2034 # moved_from: for station.sh; image: from station-image.sh
# Which station is this checkout's, and what of the engine belongs to it. Sourced by station.sh.
#
# A checkout's station is a compose project whose name .env remembers, with the path of the checkout it was given to:
# so a copy is told from a checkout that was moved, and neither takes what is not its own.

project="" # its name
named_by="" # environment, file, engine (found there), copy or path (given anew)

checksum() { if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi | cut -c "1-$1"; }

# A path as one line without a character that means something in .env.
encode() { local p=${1//%/%25}; p=${p//\'/%27}; p=${p//\\/%5C}; p=${p//\$/%24}; printf '%s' "${p//$'\n'/%0A}"; }
decode() { local p=${1//%0A/$'\n'}; p=${p//%24/\$}; p=${p//%5C/\\}; p=${p//%27/\'}; printf '%s' "${p//%25/%}"; }

label() { docker inspect -f "{{index .Config.Labels \"$2\"}}" "$1" 2>/dev/null; }
folder_of() { label "$1" com.docker.compose.project.working_dir; }
of_project() { printf 'label=com.docker.compose.project=%s' "$1"; }
is_station=(--filter label=com.docker.compose.service=station --filter label=com.docker.compose.oneoff=False)

# still_in PATH NAME: is the checkout that had this name still there? Where nobody may look, it is.
still_in() {
    local up=$1
    if [ -e "$1/.env" ]; then
        [ -r "$1/.env" ] || return 0
        [ "$(env_value COMPOSE_PROJECT_NAME "$1/.env")" = "$2" ]
        return
    fi
    while [ ! -e "$up" ] && [ "$up" != / ]; do up=$(dirname "$up"); done
    [ -d "$up" ] && [ ! -x "$up" ]
}
# elsewhere PATH: does what carries this label belong to another checkout than this one?
elsewhere() {
    [ -n "$1" ] && ! [ "$1" -ef . ] || return 1
    if [ "$named_by" = file ]; then still_in "$1" "$project"; else [ -e "$1/docker-compose.yml" ]; fi
}

# The container of this checkout's station; nothing where there is none, or where the name is another's.
station_id() {
    local id
    id=$(docker ps --all --quiet --no-trunc --filter "$(of_project "$project")" "${is_station[@]}" | head -n 1)
    if [ -n "$id" ] && ! elsewhere "$(folder_of "$id")"; then say "$id"; fi
}
other_checkout() {
    local id folder
    id=$(docker ps --all --quiet --no-trunc --filter "$(of_project "$project")" "${is_station[@]}" | head -n 1)
    [ -n "$id" ] || return 0
    folder=$(folder_of "$id")
    if elsewhere "$folder"; then say "$folder"; fi
}
volumes() { docker volume ls --quiet --filter "$(of_project "$project")"; }
in_use() { # NAME: does anything in the engine carry this project's name?
    [ -n "$(docker ps --all --quiet --filter "$(of_project "$1")")$(docker volume ls --quiet --filter "$(of_project "$1")")" ]
}

# A station found in the engine that was started from this very folder, whatever its name.
started_from_here() {
    local id
    for id in $(docker ps --all --quiet --no-trunc "${is_station[@]}"); do
        [ "$(folder_of "$id")" -ef . ] || continue
        label "$id" com.docker.compose.project
        return
    done
    return 1
}

probe_image() { docker image inspect trainstation-probe >/dev/null 2>&1 || tar -cf - -T /dev/null | docker import - trainstation-probe >/dev/null; }

# The name that docker compose alone gives a station in this folder.
name_by_compose() { printf '%s' "${PWD##*/}" | tr '[:upper:]' '[:lower:]' | tr -cd 'a-z0-9_-' | sed 's/^[_-]*//'; }

# volumes_are_ours NAME: do volumes with no container belong here? The one with the host key says for whom it was made;
# older ones do not, but then .secrets/known_hosts has the same host key.
volumes_are_ours() {
    local box made_for="" key=""
    docker volume inspect "$1_hostkeys" >/dev/null 2>&1 || return 1
    [ -z "$(docker ps --all --quiet --filter "$(of_project "$1")")" ] || return 1
    probe_image
    box=$(docker create --network none --volume "$1_hostkeys:/keys:ro" trainstation-probe /nothing) || return 1
    made_for=$(docker cp "$box:/keys/checkout" - 2>/dev/null | tar -xO 2>/dev/null) || :
    key=$(docker cp "$box:/keys/ssh_host_ed25519_key.pub" - 2>/dev/null | tar -xO 2>/dev/null | cut -d' ' -f2) || :
    docker rm "$box" >/dev/null
    if [ -n "$made_for" ]; then [ "$made_for" -ef . ] || { [ -e "$made_for" ] && return 1; }; fi
    [ -n "$key" ] && grep -qsF "$key" .secrets/known_hosts
}

# A name as one part of a host's name: lower-case letters, digits and hyphens, as many as asked.
dns_label() { printf '%s' "$1" | tr '[:upper:]' '[:lower:]' | tr _ - | tr -cd 'a-z0-9-' | cut -c "1-${2:-63}" | sed 's/^-*//; s/-*$//'; }

# What the station is called in prompts and in the records of runs: its project and this machine. One that is there keeps
# its name though the machine gets another, as laptops do.
choose_host_name() {
    local begins now=""
    begins=$(dns_label "$project" 40)-
    [ -z "$id" ] || now=$(docker inspect -f '{{.Config.Hostname}}' "$id")
    [[ $now == "$begins"?* ]] || now=$(dns_label "$begins$(uname -n | cut -d. -f1)" 56) # -second still fits behind it
    export STATION_HOSTNAME=$now
}

find_project() {
    local name path candidate count=1
    name=$(env_value COMPOSE_PROJECT_NAME) || name=""
    if [ -n "${COMPOSE_PROJECT_NAME:-}" ] && [ "$COMPOSE_PROJECT_NAME" != "$name" ]; then
        project=$COMPOSE_PROJECT_NAME named_by=environment
        [[ $project =~ ^[a-z0-9][a-z0-9_-]*$ ]] ||
            die "COMPOSE_PROJECT_NAME=$project: lower-case letters, digits, - and _, the first a letter or digit"
        return
    fi
    path=$(decode "$(env_value STATION_CHECKOUT)") || path=""
    if [ -n "$name" ]; then
        [[ $name =~ ^[a-z0-9][a-z0-9_-]*$ ]] ||
            die "COMPOSE_PROJECT_NAME=$name in .env: lower-case letters, digits, - and _, the first a letter or digit"
        project=$name named_by=file
        if [ -z "$path" ] || [ "$path" -ef . ]; then return; fi
        if ! still_in "$path" "$name"; then moved_from=$path; return; fi
        copied_from=$path
    fi
    named_by=engine
    if project=$(started_from_here); then return; fi
    candidate=trainstation-$(printf '%s' "$PWD" | checksum 6)
    if [ -z "${copied_from:-}" ]; then
        # made before checkouts had names of their own; by docker compose alone; or .env was lost
        for project in trainstation "$candidate" "$(name_by_compose)"; do
            if volumes_are_ours "$project"; then return; fi
        done
    fi
    named_by=path project=$candidate
    while in_use "$project"; do project=$candidate-$((++count)); done
}

# What .env keeps of all this, so that docker compose alone finds the same station; not where the name came from
# outside, for then it is not this checkout's for good.
remember_identity() {
    [ "$named_by" != environment ] || return 0
    remember COMPOSE_PROJECT_NAME "$project" STATION_CHECKOUT "$(encode "$PWD")" \
        COMPOSE_FILE "$(compose_files)" STATION_IMAGE "$image" STATION_HOSTNAME "$STATION_HOSTNAME"
    [ -z "$shm_lowered" ] || remember SHM_SIZE "$SHM_SIZE"
    remember_ports
}
# Kept with the host key, where only root writes: the volumes say whose they are when all else is gone.
claim_volumes() { docker exec -i "$1" sh -c 'umask 077; cat >/etc/trainstation/hostkeys/checkout' <<<"$PWD" 2>/dev/null || :; }

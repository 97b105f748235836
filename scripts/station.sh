#!/usr/bin/env bash
# The station from outside: up, down, shell, ssh, ssh-command, logs, url, rotate, status, rebuild, clean-station,
# clean-cache.
# `make up` and the other targets of docker/station.mk call this. Settings are in .env; .env.example explains them.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '%s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 2; }

# shellcheck source=scripts/env.sh
. scripts/env.sh
# shellcheck source=scripts/progress.sh
. scripts/progress.sh
# shellcheck source=scripts/station-settings.sh
. scripts/station-settings.sh
# shellcheck source=scripts/station-identity.sh
. scripts/station-identity.sh
# shellcheck source=scripts/station-image.sh
. scripts/station-image.sh
# shellcheck source=scripts/station-checks.sh
. scripts/station-checks.sh

mode=""                        # gpu or cpu
devices=""                     # YAML with the list of chosen GPUs, for compose; variables in its file cannot hold a list
id="" engine_options="" config=""
# Name every file, because compose would prefer others in the checkout, which dev could have put there.
compose_files() {
    printf docker-compose.yml
    [ "$mode" != cpu ] || printf :docker-compose.cpu.yml
    [ "$mode" != gpu ] || ! has_rdma || printf :docker-compose.rdma.yml
    [ -z "$(setting CLUSTER_NETWORK)" ] || printf :docker-compose.cluster.yml
    more_files | while IFS= read -r file; do printf ':%s' "$file"; done
}
compose() {
    local file files=()
    while IFS= read -r -d : file; do files+=(--file "$file"); done < <(compose_files; printf :)
    docker compose --project-name "$project" "${files[@]}" ${devices:+--file -} "$@" <<<"$devices"
}

# Set $id to the container of this checkout's own station, or to nothing.
find_station() {
    check_engine
    load_settings
    find_project
    id=$(station_id)
}
need_station() {
    local other
    find_station
    [ -z "$id" ] || return 0
    other=$(other_checkout)
    die "this checkout has no station: make up${other:+ (COMPOSE_PROJECT_NAME=$project is the station of $other)}"
}
is_running() { [ -n "$id" ] && [ "$(docker inspect -f '{{.State.Running}}' "$id")" = true ]; }
need_running() {
    need_station
    is_running || die "the station is not running: make up"
}

# Choose GPU or CPU and say why. GPUS in the environment or .env decides. Without it we ask the engine.
choose_mode() {
    local gpus why first ids=all
    gpus=$(setting GPUS)
    if [ "$gpus" = none ]; then
        mode=cpu
        say "CPU: GPUS=none says so"
    elif why=$(engine_gives_gpus); then
        mode=gpu
        case $gpus in
            '' | all) ;;
            *,*) ids=${gpus%,} ;;
            *) ids=0; for ((first = 1; first < gpus; first++)); do ids+=,$first; done ;;
        esac
        say "GPU: the engine hands out NVIDIA devices${gpus:+ (GPUS=$gpus)}"
        ! has_rdma || say "InfiniBand: the station gets /dev/infiniband, so that NCCL can use it"
        keep_gpus
        if [ "$ids" != all ]; then
            devices="{deploy: {resources: {reservations: {devices: !override [{driver: nvidia, device_ids: [\"${ids//,/\",\"}\"], capabilities: [gpu]}]}}}}"
            devices="{services: {station: $devices, second: $devices, dcgm-exporter: $devices}}"
        fi
    elif [ -n "$gpus" ]; then
        die "GPUS=$gpus, but $why"
    else
        mode=cpu
        say "CPU: $why"
    fi
    export GPU_IDS=$ids
}

# Wait until the station is healthy. Ask it directly, because the engine checks only every 15 seconds. A container that
# fails is removed again after its reason was shown.
wait_healthy() {
    local health="" reason since=$SECONDS
    while [ $((SECONDS - since)) -lt 300 ]; do
        health=$(docker exec "$id" /usr/local/bin/station-health 2>/dev/null) || :
        case $health in
            healthy) return ;;
            'the keeper '* | 'the exporter '*) say "warning: $health"; return ;; # an error in train/, which dev may edit
            '' | 'JupyterLab '*) ;; # still starting; this may take minutes beside training
            *) [ $((SECONDS - since)) -lt 60 ] || break ;;
        esac
        [[ $(docker inspect -f '{{.State.Status}} {{.RestartCount}}' "$id" 2>/dev/null) =~ ^(running|created)\ 0$ ]] || break
        sleep 1
    done
    reason=$(docker logs --tail 200 "$id" 2>&1 | grep -E 'error:|health:' | tail -n 1 | sed -E 's/^trainstation: (error: )?//' | tr -d '\000-\037\177')
    take_back
    die "the station did not start: ${reason:-see make logs}"
}
# After a first start that failed: remove what it made, keep what was there before.
take_back() {
    [ "$fresh" = yes ] || return 0
    if [ -n "$had_volumes" ]; then compose down; else compose down --volumes; fi >/dev/null 2>&1 || true
}

# Name the running runs if compose will create the container again, because its image or settings changed.
warn_of_interruption() {
    local runs
    is_running && [[ $(compose up --detach --no-build --dry-run station 2>&1) == *' Recreate'* ]] || return 0
    runs=$(timeout 20 docker exec --user dev "$id" "$as_dev" train ls --state running --json 2>/dev/null |
        sed -n 's/^  "name": "\(.*\)",$/\1/p' | tr '\n' ' ' | tr -d '\000-\037\177' | cut -c 1-300) || :
    [ -z "$runs" ] || say "the image or settings changed, so the container is created again; these runs are saved, and the keeper resumes them: ${runs% }"
}

# Start the station. Try once more with other ports if these are taken, for example by another make up at this moment.
start() {
    local output only=() try
    ! wants_monitoring || only=(station)
    for try in 1 2; do
        if output=$(compose up --detach --no-build --remove-orphans ${only[@]+"${only[@]}"} 2>&1); then return; fi
        [[ $try${#own_ports[@]} = 14 && $output =~ already\ allocated|already\ in\ use|ports\ are\ not\ available ]] || break
        choose_ports "$JUPYTER_PORT"
        remember_identity
    done
    take_back
    die "the engine did not start the station: $(tail -n 1 <<<"$output" | sed 's/^Error response from daemon: //')"
}

grafana="" # its address, once it is started
# Start the monitoring after the station, so that the station neither waits for these images nor fails without them.
start_monitoring() {
    local output
    wants_monitoring || return 0
    say "starting Prometheus and Grafana (the first start downloads their images)"
    if output=$(compose up --detach --no-build 2>&1); then
        grafana="
  Grafana      http://$(reachable "$(setting MONITORING_ADDRESS 127.0.0.1)"):$(setting GRAFANA_PORT 3000)  (admin; password: .secrets/grafana_password)"
        return
    fi
    say "warning: the station is up, but the monitoring is not: $(tail -n 1 <<<"$output"); PROMETHEUS_IMAGE, GRAFANA_IMAGE and DCGM_EXPORTER_IMAGE in .env can name copies in a mirror"
}

up() { # [rebuild ARGUMENTS…]
    local fresh=yes had_volumes other others address same="" needs_build
    find_station
    check_users
    check_settings
    take_back_lowered SHM_SIZE
    take_back_lowered PIDS_LIMIT
    check_compose_files
    check_shared_memory
    check_processes
    say_what_rises
    check_neighbours
    other=$(other_checkout)
    [ -z "$other" ] || die "COMPOSE_PROJECT_NAME=$project is the name of the station of $other: choose another name, or remove that setting"
    check_no_other
    had_volumes=$(volumes)
    [ -z "$id" ] || fresh=no
    [ "$(setting PROTECT_CHECKOUT true)" = true ] ||
        say "warning: PROTECT_CHECKOUT=false: whoever works inside can change what make and docker compose do on this machine"
    [ -z "$moved_from" ] || say "this checkout was moved here from $moved_from: it keeps its station"
    [ -z "$copied_from" ] || say "this checkout is a copy of $copied_from: it gets its own station, and the other one stays as it is"
    choose_ports
    choose_host_name
    choose_mode
    [ $# = 0 ] || [ -z "$(named_image)" ] || die "STATION_IMAGE=$(named_image) is not built here: remove that line from .env to build one"
    if find_image && [ $# = 0 ]; then needs_build=""; else check_engine_disk; needs_build=yes; fi
    make_missing_files
    remember_identity
    warn_of_credentials
    if [ "$needs_build" ]; then
        build "${@:2}"
        remember_identity # it may be without the compiler
    fi
    export STATION_IMAGE=$image
    warn_of_interruption
    start
    id=$(station_id)
    wait_healthy
    keep_image
    start_monitoring
    address=$(url)
    others=$(for_colleagues)
    case $address in
        *.localhost:*) same="
               (Safari and other browsers that do not know such names: http://127.0.0.1:$(where 8888 | cut -d' ' -f2))" ;;
    esac
    cat <<TEXT

  Browser      $address$same
               the page with the runs, and from there JupyterLab
  TensorBoard  in JupyterLab's launcher
  ssh          $(ssh_line)
  shell        make shell$grafana
${others:+$others
}
  First notebook:          01-the-station, which JupyterLab opens at your first visit
  First run, in any shell: train launch digits --name demo1 --follow
  All commands:            make help
TEXT
}

# Print address and port of a service as the running container has them. The settings may have changed since.
where() {
    local at
    at=$(docker port "$id" "$1" 2>/dev/null) || die "the station publishes no port at the moment: make logs says why"
    at=${at%%$'\n'*}
    say "$(reachable "${at%:*}") ${at##*:}"
}
url() { # [ADDRESS]
    local at host port token
    at=$(where 8888) || exit
    read -r host port <<<"$at"
    token=$(as_owner cat .secrets/jupyter_token 2>/dev/null) || token=""
    [[ $token =~ ^[A-Za-z0-9_-]{16,}$ ]] || die ".secrets/jupyter_token holds no token, or you may not read it: make down up makes one"
    # A separate host name, because browsers send cookies to every port of a host: another station would get this one's.
    host=${1:-$host}
    case $host in 127.0.0.1) host=$(dns_label "$project").localhost ;; [![]*:*) host="[$host]" ;; esac
    say "http://$host:$port/?token=$token"
}

# Print the private key that may log in and that ssh would not find without being told.
own_key() {
    local public key
    for public in "$PWD/.secrets/id_ed25519.pub" "$(expand "$(setting SSH_PUBLIC_KEY)")"; do
        [[ $public == *.pub && -e $public && -e ${public%.pub} ]] || continue
        key=$(public_keys <"$public" | sed -E 's/.*(AAAA[0-9A-Za-z+/]+=*).*/\1/;q')
        if [ -n "$key" ] && as_owner grep -qsF -- "$key" .secrets/authorized_keys; then
            printf '%s' "${public%.pub}"
            return
        fi
    done
}

# If the ports are open to the network: print the addresses for other machines.
for_colleagues() {
    local bound address at
    bound=$(docker port "$id" 8888 2>/dev/null | head -n 1)
    bound=${bound%:*}
    case $bound in 127.* | '[::1]' | ::1 | '') return 0 ;; esac
    say
    say "  On other machines (plain HTTP: others in the network can read token and work; safer: ssh -L 8888:127.0.0.1:8888)"
    at=$(where 2222)
    case $bound in 0.0.0.0 | :: | '[::]') addresses_of_machine "$bound" ;; *) printf '%s\n' "$bound" ;; esac |
        while IFS= read -r address; do
            say "  Browser      $(url "$address")"
            say "  ssh          ssh -p ${at#* } dev@${address//[\[\]]/}   (a key in .secrets/authorized_keys)"
        done
}

# Build one line to paste into any shell. We fetch the station's host key through the engine, so ssh asks nothing.
ssh_command() { # sets ssh_words
    local at port host key known=UserKnownHostsFile=$PWD/.secrets/known_hosts
    at=$(where 2222) || exit
    read -r host port <<<"$at"
    key=$(docker exec "$id" cut -d' ' -f1,2 /etc/trainstation/hostkeys/ssh_host_ed25519_key.pub) || key=""
    [[ $key =~ ^ssh-ed25519\ [A-Za-z0-9+/=]+$ ]] || die "the station has no host key yet: make status shows its state"
    [ "$(as_owner cat .secrets/known_hosts 2>/dev/null)" = "[$host]:$port $key" ] || secret known_hosts <<<"[$host]:$port $key"
    case $PWD in *' '*) known="UserKnownHostsFile=\"$PWD/.secrets/known_hosts\"" ;; esac # ssh splits it at blanks
    ssh_words=(ssh -p "$port")
    key=$(own_key)
    [ -z "$key" ] || ssh_words+=(-i "$key")
    ssh_words+=(-o "$known" "dev@$host")
}
ssh_line() {
    local word line=""
    ssh_command
    for word in "${ssh_words[@]}"; do
        [[ $word =~ ^[A-Za-z0-9_./:=@,+-]+$ ]] || word="'$word'"
        line+=" $word"
    done
    say "${line# }"
}

# For when someone leaves: that person's token, keys, processes and files give no access any more. Runs are resumed.
rotate() {
    local key keys before="" found one code=0
    key=$(expand "$(setting SSH_PUBLIC_KEY)")
    keys=$({ if [ -n "$key" ]; then cat "$key"; else cat "$HOME"/.ssh/id_*.pub; fi 2>/dev/null || :; } | public_keys)
    before=$(as_owner cat .secrets/authorized_keys 2>/dev/null | public_keys)
    as_owner rm -f .secrets/authorized_keys .secrets/id_ed25519 .secrets/id_ed25519.pub .secrets/jupyter_token
    [ -z "$before" ] || secret authorized_keys.before <<<"$before"
    [ -z "$keys" ] || secret authorized_keys <<<"$keys" # the station makes a pair where there is none
    say "saving the runs, then ending every process of user dev; the keeper resumes the runs"
    for one in $(docker ps --quiet --no-trunc --filter "label=com.docker.compose.project=$project" --filter label=trainstation.torch); do
        docker exec "$one" /usr/bin/python3 -I -S /usr/local/lib/trainstation/rotate.py 2>&1 | printable || code=$?
    done
    [ "$code" = 0 ] || die "some steps failed, see above: make down up starts with the new token and keys"
    wait_healthy
    found=$(comm -23 <(sort <<<"$before") <(as_owner cat .secrets/authorized_keys | sort) | sed -E 's/.*(AAAA[^ ]+) ?//' | printable | paste -sd , -)
    [ -z "$found" ] || say "ssh keys that no longer count: $found; for people who stay, copy their lines from .secrets/authorized_keys.before to .secrets/authorized_keys"
    found=$(as_owner git status --porcelain -- train tests docs notebooks 2>/dev/null | cut -c 4- | head -n 20 | printable | paste -sd ' ' -) || found=""
    [ -z "$found" ] || say "uncommitted files that user dev may have written: $found"
    say "the new address: $(url)"
    say "the new ssh command: $(ssh_line)"
}

# Remove control characters, which could steer a terminal, from what dev's processes print.
printable() {
    if command -v python3 >/dev/null; then python3 -I -S scripts/printable.py; else LC_ALL=C tr -cd '\t\n\r -~'; fi
}

terminal=(--interactive)
if [ -t 0 ] && [ -t 1 ]; then terminal+=(--tty); fi
as_dev=/usr/local/lib/trainstation/as-dev # gives the command the whole environment, and changes to /workspace
enter_printable() { # print output of dev's processes on a terminal that may be root's
    local size=""
    [ ${#terminal[@]} = 1 ] || size=$(stty size) || size="" # docker passes on the size of a terminal only
    {
        docker exec "${terminal[@]}" ${size:+--env "LINES=${size% *}" --env "COLUMNS=${size#* }"} --user dev "$id" "$as_dev" "$@" 2>&1 >&3 |
            printable >&2
    } 3>&1 | printable
}
enter() { exec docker exec "${terminal[@]}" --user dev "$id" "$as_dev" "$@"; }

command=${1:-}
[ $# -eq 0 ] || shift
# ARGS of make: ssh passes it whole to the shell inside. For the other commands it is split at blanks. Nothing of it is
# evaluated here.
if [ -n "${STATION_ARGS:-}" ]; then
    if [ "$command" = ssh ]; then set -- "$STATION_ARGS"; else read -d '' -ra words <<<"$STATION_ARGS" || :; set -- ${words[@]+"${words[@]}"}; fi
fi
[ "$command" = inputs ] || check_own_files
case $command in
    up) one_at_a_time; up ;;
    rebuild) one_at_a_time; up rebuild "$@" ;;
    down)
        find_station
        if [ -z "$id$(volumes)" ]; then
            say "this checkout has no station"
        elif [ -z "$(other_checkout)" ]; then
            compose --profile '*' down --remove-orphans "$@" # also what was started with --profile alone
        fi
        ;;
    shell) need_running; enter bash --login "$@" ;;
    exec)
        need_running
        case "${1:-} ${2:-}" in
            'train attach' | 'train top') enter "$@" ;; # screens, which need control characters
            *) enter_printable "$@" ;;
        esac
        ;;
    ssh) need_running; ssh_command; exec "${ssh_words[@]}" "$@" ;;
    ssh-command) need_running; ssh_line ;;
    logs) need_station; compose logs --tail 200 "$@" station 2>&1 | printable ;;
    url) need_running; url; for_colleagues ;;
    rotate) one_at_a_time; need_running; rotate ;;
    inputs) load_settings; inputs ;; # print the checksum in the image's name
    id) find_station; say "$id" ;;
    status)
        need_running
        say "name     $(docker inspect -f '{{.Config.Hostname}}' "$id")"
        say "station  $(docker inspect -f '{{.State.Status}}, image {{.Config.Image}}' "$id"), ports $(where 8888 | cut -d' ' -f2) and $(where 2222 | cut -d' ' -f2) on $(where 8888 | cut -d' ' -f1)"
        say "health   $(docker exec "$id" /usr/local/bin/station-health | printable)" || :
        say "runs"
        # -I: no file of dev's home folder runs first
        docker exec --user dev "$id" "$as_dev" /usr/bin/python3 -I /usr/local/lib/trainstation/command.py ls 2>&1 | printable
        ;;
    clean-station)
        find_station
        if [ -z "$id$(volumes)" ] || [ -n "$(other_checkout)" ]; then die "this checkout has no station"; fi
        if [ -n "$id" ]; then image=$(docker inspect -f '{{.Config.Image}}' "$id"); else image=$(built_image); fi
        compose --profile '*' down --volumes --remove-orphans
        [ -z "$image" ] || [ "$image" = "$(named_image)" ] || drop_image "$image"
        say "removed: container, volumes (home folder, host keys), and the image unless another station uses it. Kept: runs, data, .env, .secrets"
        ;;
    clean-cache)
        check_engine
        say "removing the build cache of this engine; images and stations stay"
        docker builder prune --all --force | tail -n 1
        ;;
    *) die "usage: scripts/station.sh up|down|rebuild|shell|exec|ssh|ssh-command|logs|url|rotate|status|clean-station|clean-cache" ;;
esac

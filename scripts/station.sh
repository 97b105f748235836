#!/usr/bin/env bash
# The station from outside: up, down, shell, ssh, ssh-command, logs, url, status, rebuild, clean.
# `make up` and its siblings (docker/station.mk) call this; settings are in .env, explained in .env.example.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '%s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 2; }

# A setting: the environment first, then .env, then the default; as docker compose itself reads them.
setting() {
    local name=$1 value
    if [ -n "${!name:-}" ]; then printf '%s' "${!name}"; return; fi
    value=$([ ! -r .env ] || sed -n "s/^$name=//p" .env | tail -n 1 | sed -E "s/^(['\"])(.*)\1\$/\2/")
    printf '%s' "${value:-${2:-}}"
}

# shellcheck source=scripts/station-checks.sh
. scripts/station-checks.sh

mode=""             # gpu or cpu
devices=""          # the devices of a GPU station, as compose wants them: a list, which its file cannot hold
gpu_ids=all
compose() {
    if [ "$mode" = cpu ]; then
        docker compose -f docker-compose.yml -f docker-compose.cpu.yml "$@"
    elif [ -n "$devices" ]; then
        docker compose -f docker-compose.yml -f - "$@" <<<"$devices"
    else
        docker compose -f docker-compose.yml "$@"
    fi
}
container() { docker compose ps --all --quiet station 2>/dev/null | head -n 1; }
state() { docker inspect -f '{{.State.Status}} {{if .State.Health}}{{.State.Health.Status}}{{end}} {{.RestartCount}}' "$1" 2>/dev/null || echo gone; }
need_running() {
    check_engine
    id=$(container)
    [ -n "$id" ] && [ "$(docker inspect -f '{{.State.Running}}' "$id")" = true ] || die "the station is not running: make up"
}

# GPU or CPU, and why. GPUS in the environment or .env decides; without it the engine is asked.
choose_mode() {
    local gpus why first
    gpus=$(setting GPUS)
    case $gpus in
        none) mode=cpu; say "CPU: GPUS=none says so"; return ;;
    esac
    if why=$(engine_gives_gpus); then
        mode=gpu
        case $gpus in
            '' | all) gpu_ids=all ;;
            *,*) gpu_ids=${gpus%,} ;;
            *) gpu_ids=0; for ((first = 1; first < gpus; first++)); do gpu_ids+=,$first; done ;;
        esac
        say "GPU: the engine hands out NVIDIA devices${gpus:+ (GPUS=$gpus)}"
        if [ "$gpu_ids" != all ]; then
            devices="services: {station: {deploy: {resources: {reservations: {devices: !override [{driver: nvidia, device_ids: [\"${gpu_ids//,/\",\"}\"], capabilities: [gpu]}]}}}}}"
        fi
    elif [ -n "$gpus" ]; then
        die "GPUS=$gpus, but $why"
    else
        mode=cpu
        say "CPU: $why"
    fi
    export GPU_IDS=$gpu_ids
}

# What the image is made of. The package train/ is not: it is mounted, and a change in it needs no build.
inputs() {
    {
        cat Dockerfile entrypoint.sh requirements.lock
        find docker -type f ! -name '*.mk' | LC_ALL=C sort | while read -r file; do cksum "$file"; done
        for name in BASE_IMAGE CUDA_IMAGE APT_MIRROR EXTRA_APT PIP_INDEX_URL; do setting "$name"; echo; done
    } | cksum | tr ' ' -
}
image() { if [ "$mode" = cpu ]; then say trainstation:runtime; else say "trainstation:$(setting STATION_TARGET cuda)"; fi; }

build() {
    local base toolkit
    base=$(setting BASE_IMAGE debian:bookworm-slim)
    if ! have_image "$base"; then
        [ "$base" = debian:bookworm-slim ] || die "BASE_IMAGE=$base is neither here nor in a registry that answers"
        say "no image registry answers: building the base image from Debian's package archive instead"
        scripts/base.sh
        base=trainstation-base:bookworm
    fi
    toolkit=$(setting CUDA_IMAGE nvidia/cuda:12.1.1-devel-ubuntu22.04@sha256:7012e535a47883527d402da998384c30b936140c05e2537158c80b8143ee7425)
    if [ "$mode" = gpu ] && [ "$(setting STATION_TARGET cuda)" = cuda ] && ! have_image "$toolkit"; then
        [ -z "$(setting CUDA_IMAGE)" ] || die "CUDA_IMAGE=$toolkit is neither here nor in a registry that answers"
        say "NVIDIA's toolkit image cannot be had: building without the CUDA compiler (CUDA_IMAGE can name a mirror's copy)"
        export STATION_TARGET=runtime
    fi
    say "building $(image) (a few minutes the first time)"
    BASE_IMAGE=$base STATION_VERSION=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' train/__init__.py) \
        STATION_REVISION=$(git rev-parse --short HEAD 2>/dev/null || echo unknown) STATION_INPUTS=$(inputs) \
        DOCKER_BUILDKIT=1 compose build "$@" || die "the image could not be built, see above; behind a mirror or proxy: .env.example has the settings"
}

make_missing_files() {
    local key made=""
    mkdir -p "$(expand "$(setting RUNS_DIR ./runs)")"
    [ -e .env ] || { cp .env.example .env; made+=" .env"; }
    # What this machine trusts the station trusts: a network may check TLS by certificates of its own.
    if ! grep -q '^CA_BUNDLE=' .env && [ -s /etc/ssl/certs/ca-certificates.crt ]; then
        echo "CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt" >>.env
    fi
    if ! grep -q '^DEV_UID=' .env && [ "$(owner_of .)" != 0 ]; then
        printf 'DEV_UID=%s\nDEV_GID=%s\n' "$(owner_of .)" "$(group_of .)" >>.env
    fi
    [ -d .secrets ] || { mkdir -m 700 .secrets; made+=" .secrets/"; }
    if [ ! -s .secrets/jupyter_token ]; then
        (umask 077; od -An -N24 -tx1 /dev/urandom | tr -d ' \n' >.secrets/jupyter_token)
        made+=" .secrets/jupyter_token"
    fi
    key=$(expand "$(setting SSH_PUBLIC_KEY)")
    if [ -n "$key" ]; then
        cat "$key" >.secrets/authorized_keys
    elif [ ! -s .secrets/authorized_keys ]; then
        if compgen -G "$HOME/.ssh/id_*.pub" >/dev/null; then
            cat "$HOME"/.ssh/id_*.pub >.secrets/authorized_keys
            say "ssh: your own keys in ~/.ssh may log in (.secrets/authorized_keys)"
        elif command -v ssh-keygen >/dev/null; then
            rm -f .secrets/id_ed25519 .secrets/id_ed25519.pub
            ssh-keygen -q -t ed25519 -N '' -C trainstation -f .secrets/id_ed25519
            cp .secrets/id_ed25519.pub .secrets/authorized_keys
            made+=" .secrets/id_ed25519"
        fi # else the station makes a pair when it starts
    fi
    # With sudo in a person's checkout, the person still owns what is made.
    [ "$(id -u)" != 0 ] || chown -R "$(owner_of .):$(group_of .)" .env .secrets
    [ -z "$made" ] || say "made:$made"
}

volumes() { docker volume ls --quiet --filter "label=com.docker.compose.project=$(setting COMPOSE_PROJECT_NAME trainstation)"; }
# After a first start that failed: what it made goes again, and what was there before stays.
take_back() {
    [ "$fresh" = yes ] || return 0
    if [ -n "$had_volumes" ]; then compose down; else compose down --volumes; fi >/dev/null 2>&1 || true
}

# Waits until both services answer. A container that gives up is taken away again, after its reason was shown.
wait_healthy() {
    local id=$1 now reason i
    for ((i = 0; i < 600; i++)); do
        now=$(state "$id")
        case $now in
            'running healthy '*) return 0 ;;
            'running starting 0' | 'created '*' 0') ;;
            *)
                reason=$(docker logs --tail 200 "$id" 2>&1 | grep -E 'error:|health:' | tail -n 1 | sed -E 's/^trainstation: (error: )?//')
                take_back
                die "the station did not start: ${reason:-its state is $now, see make logs}"
                ;;
        esac
        sleep 0.1
    done
    die "the station was not healthy within a minute: make logs"
}

up() {
    local id output fresh=yes had_volumes
    check_engine
    check_compose
    check_settings
    id=$(container)
    had_volumes=$(volumes)
    if [ -n "$id" ]; then
        fresh=no
    else
        check_ports
    fi
    [ -n "$mode" ] || choose_mode
    make_missing_files
    if [ "$(docker image inspect -f '{{index .Config.Labels "trainstation.inputs"}}' "$(image)" 2>/dev/null)" != "$(inputs)" ]; then
        if [ "${REBUILD:-}" != no ]; then build; fi
    fi
    # Without root the engine would make this folder as root; here it is made as it should be.
    if ! output=$(compose up --detach --no-build --remove-orphans 2>&1); then
        take_back
        die "the engine did not start the station: $(tail -n 1 <<<"$output" | sed 's/^Error response from daemon: //')"
    fi
    id=$(container)
    wait_healthy "$id"
    cat <<TEXT

  JupyterLab   $(url)
  ssh          $(ssh_command)

  A first run, in either:  train launch digits --name first --follow
  All commands:            make help
TEXT
}

address() {
    local bind
    bind=$(setting BIND_ADDRESS 127.0.0.1)
    case $bind in 0.0.0.0 | '[::]') say 127.0.0.1 ;; *) say "$bind" ;; esac
}
url() { say "http://$(address):$(setting JUPYTER_PORT 8888)/lab?token=$(cat .secrets/jupyter_token)"; }

# One line to paste. The station's host key is fetched through the engine, so ssh has nothing to ask the first time.
ssh_command() {
    local port host
    port=$(setting SSH_PORT 2222)
    host=$(address)
    host=${host#[}
    host=${host%]}
    printf '[%s]:%s %s\n' "$host" "$port" \
        "$(docker exec "$(container)" cut -d' ' -f1,2 /etc/trainstation/hostkeys/ssh_host_ed25519_key.pub)" >.secrets/known_hosts
    printf 'ssh -p %s' "$port"
    [ ! -e .secrets/id_ed25519 ] || printf ' -i %q' "$PWD/.secrets/id_ed25519"
    printf ' -o UserKnownHostsFile=%q dev@%s\n' "$PWD/.secrets/known_hosts" "$host"
}

command=${1:-}
[ $# -eq 0 ] || shift
case $command in
    up) up ;;
    down)
        check_engine
        # Also a container that was started with other settings: the project's name is what counts.
        docker compose down --remove-orphans "$@"
        ;;
    rebuild)
        check_engine
        check_compose
        check_settings
        choose_mode
        make_missing_files
        build "$@"
        REBUILD=no up
        ;;
    shell) need_running; exec docker compose exec --user dev --workdir /workspace --env HOME=/home/dev --env USER=dev station bash -l "$@" ;;
    exec)
        need_running
        tty=()
        [ -t 0 ] && [ -t 1 ] || tty=(--no-TTY)
        exec docker compose exec ${tty[@]+"${tty[@]}"} --user dev --workdir /workspace --env HOME=/home/dev --env USER=dev station "$@"
        ;;
    ssh) need_running; eval "exec $(ssh_command) \"\$@\"" ;;
    ssh-command) need_running; ssh_command ;;
    logs) check_engine; exec docker compose logs --tail 200 "$@" station ;;
    url) need_running; url ;;
    inputs) inputs ;; # what an image has to be built from to be taken as it is
    status)
        need_running
        say "station  $(docker inspect -f '{{.State.Status}}, image {{.Config.Image}}' "$id")"
        say "health   $(docker inspect -f '{{range .State.Health.Log}}{{.Output}}{{end}}' "$id" | grep . | tail -n 1)"
        say "runs"
        docker compose exec --no-TTY --user dev --env HOME=/home/dev station train ls
        ;;
    clean)
        check_engine
        docker compose -f docker-compose.yml down --volumes --remove-orphans
        docker image rm trainstation:cuda trainstation:runtime 2>/dev/null || true
        say "removed: container, volumes (home folder, host keys), images. Still here: runs, data, .env, .secrets"
        ;;
    *) die "usage: scripts/station.sh up|down|rebuild|shell|exec|ssh|ssh-command|logs|url|status|clean" ;;
esac

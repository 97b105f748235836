#!/usr/bin/env bash
# Installs a Docker engine with compose and buildx on this machine and starts it (Debian and Ubuntu, as root).
#
#     make engine          (or: sudo make engine)
#
# If all three already work, it sets the firewall rule that an old engine needs, and says so. Everything comes from the
# distribution's packages. A machine with another engine (Docker Desktop, Docker's packages) needs none of this.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
. scripts/env.sh
mirrors_from_env

say() { printf 'engine: %s\n' "$*"; }
die() { printf 'engine: %s\n' "$*" >&2; exit 1; }

have_compose() { docker compose version >/dev/null 2>&1; }
have_buildx() { docker buildx version >/dev/null 2>&1; }
running() { docker info >/dev/null 2>&1; }

# Before Docker 28, machines of the same network reach ports on 127.0.0.1. scripts/firewall.sh prevents that.
keep_neighbours_out() {
    local version
    version=$(docker version --format '{{.Server.Version}}')
    [ "${version%%.*}" -lt 28 ] && [[ $(docker info --format '{{.SecurityOptions}}') != *name=rootless* ]] || return 0
    if [ "$(id -u)" = 0 ]; then
        scripts/firewall.sh set
    elif [ ! -e /run/trainstation-firewall ]; then
        say "machines of the same network can reach containers past 127.0.0.1; to prevent that: sudo make engine"
    fi
}
# Install NVIDIA's container toolkit, which gives GPUs to containers, from the repository in .env.
install_toolkit() {
    local list=/etc/apt/sources.list.d/nvidia-container-toolkit.list key=/etc/apt/keyrings/nvidia-container-toolkit.asc
    [ -n "${NVIDIA_TOOLKIT_MIRROR:-}" ] && ! command -v nvidia-ctk >/dev/null && nvidia-smi -L >/dev/null 2>&1 || return 0
    [ "$(id -u)" = 0 ] || { say "NVIDIA's container toolkit is missing; to install it: sudo make engine"; return; }
    mkdir -p /etc/apt/keyrings
    /usr/lib/apt/apt-helper download-file "${NVIDIA_TOOLKIT_MIRROR%/}/gpgkey" "$key" >/dev/null ||
        die "NVIDIA_TOOLKIT_MIRROR=$NVIDIA_TOOLKIT_MIRROR has no file gpgkey, see above: name the folder that holds it"
    chmod 644 "$key" # apt reads it as its own user
    echo "deb [signed-by=$key] ${NVIDIA_TOOLKIT_MIRROR%/}/stable/deb/$(dpkg --print-architecture) /" >"$list"
    apt_install nvidia-container-toolkit
    nvidia-ctk runtime configure --runtime=docker >/dev/null 2>&1 || die "nvidia-ctk could not configure the engine; to see why: nvidia-ctk runtime configure --runtime=docker"
    say "NVIDIA's container toolkit is installed; restart the engine so that it uses the toolkit (systemctl restart docker)"
}
# The engine pulls images itself and reads the proxy from its own environment.
set_proxy() {
    local folder=/etc/systemd/system/docker.service.d name
    [ -d /run/systemd/system ] && [ -n "${HTTP_PROXY:-}${HTTPS_PROXY:-}" ] || return 0
    mkdir -p "$folder"
    {
        echo '[Service]'
        for name in HTTP_PROXY HTTPS_PROXY NO_PROXY; do [ -z "${!name:-}" ] || echo "Environment=\"$name=${!name//%/%%}\""; done
    } >"$folder/trainstation-proxy.conf"
    systemctl daemon-reload
}
finish() {
    install_toolkit
    keep_neighbours_out
    if [ -n "${HTTP_PROXY:-}${HTTPS_PROXY:-}" ] && [ -z "$(docker info --format '{{.HTTPProxy}}{{.HTTPSProxy}}')" ]; then
        say "the engine pulls images without the proxy of .env; to set one: docs/station.md, \"Proxy and mirrors\""
    fi
    say "Docker $(docker version --format '{{.Server.Version}}') with compose $(docker compose version --short) is running"
    exit
}

# shellcheck source=scripts/apt.sh
. scripts/apt.sh
! { running && have_compose && have_buildx; } || finish

[ "$(id -u)" = 0 ] || die "no Docker engine with compose and buildx answers; to install and start one: sudo make engine"
command -v apt-get >/dev/null || die "this is no Debian or Ubuntu: install Docker Engine with its compose plugin (docs.docker.com/engine/install), then run this again"
# shellcheck source=/dev/null
. /etc/os-release

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work" # apt drops to its own user to download

# Debian 12's docker-compose is version 1, which does not know the GPU reservations used here. Debian 13's compose and
# buildx are single Go programs that run with Debian 12's C library. So we take these two packages from Debian 13: the
# same archive and keys under another suite name. No other package changes.
install_from_next_release() {
    local options=(-o "Dir::Etc::sourcelist=$work/next.list" -o Dir::Etc::sourceparts=/dev/null
        -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache")
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs"
    local archive
    archive=$(archive_of bookworm)
    [ -n "$archive" ] || die "found no source for bookworm main in apt's configuration"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive trixie main" >"$work/next.list"
    apt-get -qq "${options[@]}" update || die "could not read Debian 13's package list, see above"
    (cd "$work/debs" && apt-get -qq "${options[@]}" download docker-compose docker-buildx) ||
        die "could not download docker-compose and docker-buildx, see above"
    # Their files have the same paths as the old package's. --force-overwrite lets version 2 replace version 1.
    dpkg -i --force-overwrite "$work"/debs/*.deb >/dev/null || die "dpkg refused docker-compose and docker-buildx, see above"
}

if ! { command -v dockerd && have_compose && have_buildx; } >/dev/null; then
    say "installing Docker from the packages of $PRETTY_NAME"
    apt-get -qq update || die "apt-get update failed, see above"
fi
if ! command -v dockerd >/dev/null; then
    needed=(docker.io iptables ca-certificates)
    # In Debian 13 and later the client is a separate package.
    apt-cache show docker-cli >/dev/null 2>&1 && needed+=(docker-cli)
    # If the kernel uses AppArmor, the engine cannot start a container without AppArmor's parser.
    [ "$(cat /sys/module/apparmor/parameters/enabled 2>/dev/null)" = Y ] && needed+=(apparmor)
    # Without an init system the control groups may not be mounted.
    mountpoint -q /sys/fs/cgroup || needed+=(cgroupfs-mount)
    if [ ! -e /etc/docker/daemon.json ]; then # without this a systemctl daemon-reload takes GPUs from running containers
        mkdir -p /etc/docker
        echo '{"exec-opts": ["native.cgroupdriver=cgroupfs"]}' >/etc/docker/daemon.json
    fi
    set_proxy
    apt_install "${needed[@]}" # which starts the engine
fi
if ! have_compose || ! have_buildx; then
    if [ "${VERSION_CODENAME:-}" = bookworm ]; then
        install_from_next_release
    elif apt-cache show docker-compose-v2 >/dev/null 2>&1; then
        apt_install docker-compose-v2 docker-buildx # Ubuntu's name
    else
        apt_install docker-compose docker-buildx
    fi
fi

if ! running; then
    if [ -d /run/systemd/system ]; then
        systemctl enable --now docker || die "systemctl could not start docker: journalctl -u docker"
    else
        mountpoint -q /sys/fs/cgroup || cgroupfs-mount
        # Without an init system: start the engine in its own session, so that it outlives this shell.
        rm -f /var/run/docker.pid
        setsid -f dockerd >/var/log/dockerd.log 2>&1 </dev/null
    fi
    for _ in $(seq 60); do
        if running; then break; fi
        sleep 1
    done
    running || die "the engine did not start: $(grep -m1 -o 'failed to start daemon.*' /var/log/dockerd.log 2>/dev/null || echo 'see its log')"
fi
have_compose || die "docker compose is missing after the installation: which docker is first on PATH? ($(command -v docker))"
finish

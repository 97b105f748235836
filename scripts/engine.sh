#!/usr/bin/env bash
# Gives this machine a Docker engine with compose and buildx, and starts it: Debian and Ubuntu, as root.
#
#     make engine          (or: sudo make engine)
#
# Where all three already work, it sets the firewall rule that an old engine needs, and says so. Everything comes from the distribution's own
# packages. A machine with an engine of its own (Docker Desktop, Docker's packages) needs none of this.
set -euo pipefail

say() { printf 'engine: %s\n' "$*"; }
die() { printf 'engine: %s\n' "$*" >&2; exit 1; }

have_compose() { docker compose version >/dev/null 2>&1; }
have_buildx() { docker buildx version >/dev/null 2>&1; }
running() { docker info >/dev/null 2>&1; }

# Before Docker 28, machines of the same network pass a port's 127.0.0.1. scripts/firewall.sh ends that.
keep_neighbours_out() {
    local version
    version=$(docker version --format '{{.Server.Version}}')
    [ "${version%%.*}" -lt 28 ] && [[ $(docker info --format '{{.SecurityOptions}}') != *name=rootless* ]] || return 0
    if [ "$(id -u)" = 0 ]; then
        "$(dirname "${BASH_SOURCE[0]}")/firewall.sh" set
    elif [ ! -e /run/trainstation-firewall ]; then
        say "machines of the same network can reach containers past 127.0.0.1, to end that: sudo make engine"
    fi
}
finish() {
    keep_neighbours_out
    say "Docker $(docker version --format '{{.Server.Version}}') with compose $(docker compose version --short) is running"
    exit
}

! { running && have_compose && have_buildx; } || finish

[ "$(id -u)" = 0 ] || die "no Docker engine with compose and buildx answers here; to install and start one: sudo make engine"
command -v apt-get >/dev/null || die "this is no Debian or Ubuntu: install Docker Engine with its compose plugin (docs.docker.com/engine/install), then run this again"
# shellcheck source=/dev/null
. /etc/os-release

# shellcheck source=scripts/apt.sh
. "$(dirname "${BASH_SOURCE[0]}")/apt.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work" # apt drops to its own user to download

# Debian 12's docker-compose is version 1, which does not know the GPU reservations used here. Debian 13's
# compose and buildx are single Go programs that need only the C library Debian 12 has, so they are taken from
# there: same archive, same keys, only the suite's name differs, and no other package is touched.
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
    # Their files stand where the old package's do; --force-overwrite lets version 2 take the place of version 1.
    dpkg -i --force-overwrite "$work"/debs/*.deb >/dev/null || die "dpkg refused docker-compose and docker-buildx, see above"
}

if ! { command -v dockerd && have_compose && have_buildx; } >/dev/null; then
    say "installing Docker from the packages of $PRETTY_NAME"
    apt-get -qq update || die "apt-get update failed, see above"
fi
if ! command -v dockerd >/dev/null; then
    needed=(docker.io iptables ca-certificates)
    # Debian 13 and later split the client off.
    apt-cache show docker-cli >/dev/null 2>&1 && needed+=(docker-cli)
    # Where the kernel confines by AppArmor, the engine cannot start a container without its parser.
    [ "$(cat /sys/module/apparmor/parameters/enabled 2>/dev/null)" = Y ] && needed+=(apparmor)
    # A machine with no init system may have mounted no control groups.
    mountpoint -q /sys/fs/cgroup || needed+=(cgroupfs-mount)
    if [ ! -e /etc/docker/daemon.json ]; then # else a systemctl daemon-reload takes GPUs from running containers
        mkdir -p /etc/docker
        echo '{"exec-opts": ["native.cgroupdriver=cgroupfs"]}' >/etc/docker/daemon.json
    fi
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
        # No init system: the engine lives in a session of its own, so that it outlives this shell.
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

#!/usr/bin/env bash
# Builds the base image from Debian's archive, for an engine that reaches no image registry.
#
#     make base            (as root; `make up` calls it when needed)
#
# The result equals debian:bookworm-slim: Debian 12's minimal system without documentation and package lists. It uses
# APT_MIRROR, or the mirror of this machine's apt.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
. scripts/env.sh
mirrors_from_env

readonly tag=trainstation-base:bookworm
readonly keyring=/usr/share/keyrings/debian-archive-keyring.gpg

say() { printf 'base: %s\n' "$*"; }
die() { printf 'base: %s\n' "$*" >&2; exit 1; }

docker info >/dev/null 2>&1 || die "no Docker engine answers; to install and start one: make engine"
! docker image inspect "$tag" >/dev/null 2>&1 || { say "$tag exists already (to build it again, first: docker image rm $tag)"; exit; }
[ "$(id -u)" = 0 ] || die "building a base image needs root: sudo make base"
# shellcheck source=scripts/apt.sh
. scripts/apt.sh
# shellcheck source=scripts/progress.sh
. scripts/progress.sh
{ command -v debootstrap && [ -e "$keyring" ]; } >/dev/null || apt_install debootstrap debian-archive-keyring

# The mirror of this machine's apt. Ubuntu's apt has none for Debian, so debootstrap's default is used there.
mirror=${APT_MIRROR:-$(archive_of bookworm)}
mirror=${mirror%/}

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
chmod 755 "$root"
say "building $tag from the package archive"
bootstrap() { debootstrap --variant=minbase --keyring="$keyring" bookworm "$root" ${mirror:+"$mirror"} >"$root.log" 2>&1; }
how_far() { printf '%s, %d MB' "$(tail -n 1 "$root.log" | cut -c 4-50)" "$(du -sm "$root" 2>/dev/null | cut -f 1)"; }
with_progress base how_far bootstrap || {
    tail -n 20 "$root.log" >&2
    die "debootstrap failed; the whole log: $root.log"
}
rm -f "$root.log"

# debootstrap uses one archive. Updates and security fixes come from the two beside it.
: "${mirror:=$(awk '$1 == "deb" {print $2; exit}' "$root/etc/apt/sources.list")}"
security=""
[ "${APT_MIRROR:-}" ] || security=$(archive_of bookworm-security) || :
rm -f "$root/etc/apt/sources.list"
docker/debian-sources.sh "$mirror" "$security" >"$root/etc/apt/sources.list.d/debian.sources"

# Like the slim image: no manuals, no translations, and of the documentation only the licences. This also applies to
# packages installed later.
cat >"$root/etc/dpkg/dpkg.cfg.d/slim" <<'SLIM'
path-exclude /usr/share/doc/*
path-include /usr/share/doc/*/copyright
path-exclude /usr/share/man/*
path-exclude /usr/share/info/*
path-exclude /usr/share/locale/*
SLIM
printf 'Acquire::Languages "none";\nAPT::Install-Recommends "false";\n' >"$root/etc/apt/apt.conf.d/slim"
find "$root/usr/share/doc" -mindepth 2 ! -name copyright ! -type d -delete
rm -rf "$root"/usr/share/{man,info,locale}/* "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/* \
    "$root"/var/log/{apt,*.log} "$root"/etc/{resolv.conf,hostname}

tar -C "$root" --numeric-owner -c . |
    docker import -c 'CMD ["bash"]' -m "Debian 12, from its package archive" - "$tag" >/dev/null
say "$tag is built ($(docker image inspect -f '{{.Size}}' "$tag" | awk '{printf "%.0f MB", $1 / 1e6}'))"

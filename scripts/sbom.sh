#!/usr/bin/env bash
# Lists the parts of the image of this checkout's station.
#
#     make sbom                     write build/sbom.json (CycloneDX): every package with its version, for your scanner
#     make audit                    print security updates of Debian since the image was built; fails if there are any
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
die() { printf 'error: %s\n' "$*" >&2; exit 2; }
# shellcheck source=scripts/station-settings.sh
. scripts/station-settings.sh
load_settings

image=$(docker inspect -f '{{.Config.Image}}' "$(scripts/station.sh id)" 2>/dev/null) || image=$(setting STATION_IMAGE "$(setting STATION_BUILT trainstation:runtime)")
made=$(docker image inspect -f '{{.Id}} {{.Created}}' "$image" 2>/dev/null) || die "there is no image $image yet: make up"

case ${1:-sbom} in
    sbom)
        mkdir -p build
        # shellcheck disable=SC2086 # $made is two words
        docker run --rm --interactive --network none --entrypoint /usr/bin/python3 "$image" -I - "$image" $made \
            <scripts/sbom.py >build/.sbom.json
        mv build/.sbom.json build/sbom.json
        echo "build/sbom.json: $(grep -c '"purl"' build/sbom.json) packages of $image"
        ;;
    audit)
        # Use this machine's network and certificates, like the build. apt names the source of each pending package.
        bundle=$(realpath "$(expand "$(setting CA_BUNDLE /dev/null)")")
        pending=$(docker run --rm --entrypoint /bin/bash --volume "$bundle:/bundle:ro" "$image" -c '
            [ ! -s /bundle ] || echo "Acquire::https::CAInfo \"/bundle\";" >/etc/apt/apt.conf.d/bundle
            apt-get -o APT::Update::Error-Mode=any -qq update >&2 && apt-get -s dist-upgrade') ||
            die "Debian's archive did not answer, see above"
        pending=$(grep -E '^Inst .*Debian-Security' <<<"$pending" || :)
        [ -z "$pending" ] || { printf '%s\n' "$pending" "Debian has fixed these since $image was built: make rebuild ARGS=--no-cache"; exit 1; }
        echo "$image has every security update of Debian"
        ;;
    *) die "usage: scripts/sbom.sh [sbom|audit]" ;;
esac

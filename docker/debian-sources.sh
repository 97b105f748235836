#!/bin/sh
# Prints apt's list of sources for Debian 12: debian-sources.sh MIRROR [SECURITY]
#
# MIRROR ends in /debian, or in the folder of one day in a snapshot archive (/debian/20261101T000000Z): the same packages
# come out of that whenever the image is built. The security updates lie beside it unless SECURITY says where.
set -eu
mirror=${1%/}
security=${2:-$(printf '%s\n' "$mirror" | sed -E 's#(/debian(/[0-9]+T[0-9]+Z)?)?$#/debian-security\2#')}
checks=""
case $mirror in *Z) checks="
Check-Valid-Until: no" ;; esac # a snapshot's lists have passed their date
for source in "$mirror bookworm bookworm-updates" "${security%/} bookworm-security"; do
    cat <<SOURCE
Types: deb
URIs: ${source%% *}
Suites: ${source#* }
Components: main$checks
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

SOURCE
done

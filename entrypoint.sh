#!/bin/bash -p
# Starts the container: runs each step in docker/rootfs/usr/local/lib/trainstation/steps in order, then the services.
# The first step only checks, so nothing changes if a request cannot be met.
#
# Root trusts only what only root can write. So -p keeps this shell from reading files that variables name, PATH is
# set here, and services start with a short list of variables. Variables given to the container go to user dev
# (as-dev). docs/security.md lists what runs as root.
set -euo pipefail

# shellcheck disable=SC2034 # steps read it
mapfile -d '' -t given </proc/self/environ # NAME=VALUE, as the container was started
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

readonly station=/usr/local/lib/trainstation
# On stderr, because stdout belongs to the command of `docker run IMAGE COMMAND`.
say() { printf 'trainstation: %s\n' "$*" >&2; }
die() { printf 'trainstation: error: %s\n' "$*" >&2; exit 2; }

[ "$EUID" = 0 ] || [ "$PWD" != / ] || cd /workspace || : # for `docker run --user` with a command, which as-dev does not run
for step in "$station"/steps/*; do
    # shellcheck source=/dev/null
    . "$step"
done

# Run a command as user dev instead of the services: docker run … trainstation python -V
if [ $# -gt 0 ]; then
    exec "$station/as-dev" "$@"
fi
cd /
kept=()
[[ ! ${TZ:-} =~ ^[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*$ ]] || kept+=("TZ=$TZ") # a name, not a path to a file
[[ ! ${LANG:-} =~ ^[A-Za-z0-9_.@-]+$ ]] || kept+=("LANG=$LANG")
# -I: Python imports nothing from the current folder, a user's folder or PYTHONPATH.
exec /usr/bin/env -i PATH="$PATH" TMPDIR=/run/trainstation ${kept[@]+"${kept[@]}"} \
    /usr/bin/python3 -I /usr/bin/supervisord -n -c /etc/trainstation/supervisord.conf

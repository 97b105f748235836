#!/bin/bash -p
# What a container does when it starts: each step in docker/rootfs/usr/local/lib/trainstation/steps in its order,
# then the services. The first step only looks; nothing is changed unless everything asked for can be had.
#
# Root trusts only what root alone can write: -p, so that no variable names a file for this shell to read; a PATH of
# its own; and services that start with a short list of variables. What people gave the container is for user dev,
# who gets all of it (as-dev). docs/security.md lists what runs as root.
set -euo pipefail

# shellcheck disable=SC2034 # steps read it
mapfile -d '' -t given </proc/self/environ # NAME=VALUE, as the container was started
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

readonly station=/usr/local/lib/trainstation
# On stderr: `docker run IMAGE COMMAND` has stdout for what the command prints.
say() { printf 'trainstation: %s\n' "$*" >&2; }
die() { printf 'trainstation: error: %s\n' "$*" >&2; exit 2; }

[ "$EUID" = 0 ] || [ "$PWD" != / ] || cd /workspace || : # `docker run --user` with a command, which is not run by as-dev
for step in "$station"/steps/*; do
    # shellcheck source=/dev/null
    . "$step"
done

# Another command instead of the services, as user dev: docker run … trainstation python -V
if [ $# -gt 0 ]; then
    exec "$station/as-dev" "$@"
fi
cd /
kept=()
[[ ! ${TZ:-} =~ ^[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*$ ]] || kept+=("TZ=$TZ") # a name, and no path to a file of anybody's
[[ ! ${LANG:-} =~ ^[A-Za-z0-9_.@-]+$ ]] || kept+=("LANG=$LANG")
# -I: Python takes no module from the current folder, a user's folder or PYTHONPATH.
exec /usr/bin/env -i PATH="$PATH" TMPDIR=/run/trainstation ${kept[@]+"${kept[@]}"} \
    /usr/bin/python3 -I /usr/bin/supervisord -n -c /etc/trainstation/supervisord.conf

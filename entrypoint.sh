#!/bin/bash
# What a container does when it starts: each step in docker/rootfs/usr/local/lib/trainstation/steps in its order,
# then the services. The first step only looks; nothing is changed unless everything asked for can be had.
set -euo pipefail

# The PATH people get begins with a folder that user dev can write to; root does not search there.
export STATION_PATH=$PATH
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

readonly station=/usr/local/lib/trainstation
say() { printf 'trainstation: %s\n' "$*"; }
die() { printf 'trainstation: error: %s\n' "$*" >&2; exit 2; }

for step in "$station"/steps/*; do
    # shellcheck source=/dev/null
    . "$step"
done

# Another command instead of the services, as user dev: docker run … trainstation python -V
if [ $# -gt 0 ]; then
    exec "$station/as-dev" "$@"
fi
exec supervisord -n -c /etc/trainstation/supervisord.conf

#!/usr/bin/env bash
# Measures the station on this machine, without a GPU: size, build, start. Prints the table of benchmarks/README.md.
#
#     benchmarks/station.sh
#
# It runs under a project name and on ports of its own, and takes away what it made, the image excepted.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export COMPOSE_PROJECT_NAME=station-bench GPUS=none JUPYTER_PORT=${JUPYTER_PORT:-18888} SSH_PORT=${SSH_PORT:-12222}
trap 'scripts/station.sh down --volumes >/dev/null 2>&1 || true' EXIT

seconds() { # seconds COMMAND…: how long it took, in seconds
    local begun=$EPOCHREALTIME
    "$@" >/tmp/bench-station.log 2>&1 || { cat /tmp/bench-station.log >&2; exit 1; }
    awk -v a="$begun" -v b="$EPOCHREALTIME" 'BEGIN {printf "%.1f", b - a}'
}

base=$(sed -n 's/^ARG BASE_IMAGE=//p' Dockerfile)
docker image inspect "$base" >/dev/null 2>&1 || base=trainstation-base:bookworm
scripts/station.sh up >/dev/null # whatever is missing is built before anything is measured
scripts/station.sh down >/dev/null 2>&1

docker builder prune --force --filter type=regular >/dev/null # the layers; packages stay in their cache mounts
cold=$(seconds docker build --no-cache --target runtime --build-arg BASE_IMAGE="$base" \
    --secret "id=ca_bundle,src=${CA_BUNDLE:-/etc/ssl/certs/ca-certificates.crt}" -t station-bench:cold .)
docker image rm station-bench:cold >/dev/null
size=$(docker image inspect -f '{{.Size}}' trainstation:runtime | awk '{printf "%.2f", $1 / 1e9}')

first=$(seconds scripts/station.sh up)
again=$(seconds scripts/station.sh up)
down=$(seconds scripts/station.sh down)
second=$(seconds scripts/station.sh up)
id=$(scripts/station.sh id)
up=$(docker inspect -f '{{.State.StartedAt}} {{(index .State.Health.Log 0).End}}' "$id" | awk '{print $1}')
healthy=$(docker inspect -f '{{range .State.Health.Log}}{{.ExitCode}} {{.End.UTC.Format "2006-01-02T15:04:05.000Z"}}{{"\n"}}{{end}}' "$id" |
    awk '$1 == 0 {print $2; exit}')
started=$(awk -v a="$(date -d "$up" +%s.%N)" -v b="$(date -d "$healthy" +%s.%N)" 'BEGIN {printf "%.1f", b - a}')

cat <<TABLE
| what | measured |
|---|---|
| image \`runtime\` | $size GB |
| cold build, packages in the cache mounts | $cold s |
| container started until healthy | $started s |
| \`make up\` with the image built, first time (volumes are made) | $first s |
| \`make up\` after \`make down\` | $second s |
| \`make up\` when it is up | $again s |
| \`make down\` | $down s |
TABLE

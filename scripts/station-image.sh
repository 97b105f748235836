# shellcheck shell=bash disable=SC2154 # mode: from station.sh
# The image: found or built under a tag that says what it is made of, so that checkouts at different revisions do not
# take each other's. Sourced by station.sh.
#
# trainstation:runtime-0123456789ab   made of exactly this; what containers are started from
# trainstation:runtime                the one started last, for people to type

image="" # of this checkout's station, set by find_image

# What the image is made of. The package train/ is not: it is mounted, and a change in it needs no build.
inputs() {
    local file name
    {
        cat Dockerfile entrypoint.sh requirements.lock
        find docker -type f ! -name '*.mk' ! -name '*.yml' ! -name '.*' | LC_ALL=C sort | while IFS= read -r file; do
            printf '%s %s\n' "$file" "$([ -x "$file" ] && echo x)"
            cat "$file"
        done
        for name in BASE_IMAGE CUDA_IMAGE APT_MIRROR EXTRA_APT PIP_INDEX_URL; do setting "$name"; echo; done
    } | checksum 12
}

have_image() { docker image inspect "$1" >/dev/null 2>&1 || docker pull --quiet "$1" >/dev/null 2>&1; }
image_id() { docker image inspect -f '{{.Id}}' "$1" 2>/dev/null; }

# Succeeds where the image need not be built. A GPU station may run on one without the CUDA compiler, where NVIDIA's
# toolkit could not be had when it was built.
find_image() {
    local now target=runtime
    now=$(inputs)
    [ "$mode" = cpu ] || target=$(setting STATION_TARGET cuda)
    image=trainstation:$target-$now
    [ -z "$(image_id "$image")" ] || return 0
    [ "$target" = cuda ] && [ "$(setting STATION_IMAGE)" = "trainstation:runtime-$now" ] && [ -n "$(image_id "trainstation:runtime-$now")" ] || return 1
    image=trainstation:runtime-$now
}

default_image() { sed -n "s/^ARG $1=//p" Dockerfile; }
build() {
    local base toolkit log
    docker buildx version >/dev/null 2>&1 || die "Docker's buildx plugin is missing, which building the image takes: make engine installs it, as root"
    base=$(setting BASE_IMAGE "$(default_image BASE_IMAGE)")
    if ! have_image "$base"; then
        [ -z "$(setting BASE_IMAGE)" ] || die "BASE_IMAGE=$base is neither here nor in a registry that answers"
        say "no image registry answers: building the base image from Debian's package archive instead"
        scripts/base.sh
        base=trainstation-base:bookworm
    fi
    toolkit=$(setting CUDA_IMAGE "$(default_image CUDA_IMAGE)")
    if [[ $image == trainstation:cuda-* ]] && ! have_image "$toolkit"; then
        [ -z "$(setting CUDA_IMAGE)" ] || die "CUDA_IMAGE=$toolkit is neither here nor in a registry that answers"
        say "NVIDIA's toolkit image cannot be had: building without the CUDA compiler (CUDA_IMAGE can name a mirror's copy)"
        export STATION_TARGET=runtime
        image=trainstation:runtime-${image##*-}
    fi
    log=$(mktemp "${TMPDIR:-/tmp}/trainstation-build.XXXXXX")
    say "building $image (a few minutes the first time); its log: $log"
    BASE_IMAGE=$base CUDA_IMAGE=$toolkit STATION_VERSION=$([ ! -f train/__init__.py ] || sed -n 's/^__version__ = "\(.*\)"/\1/p' train/__init__.py) \
        STATION_REVISION=$(git rev-parse --short HEAD 2>/dev/null || echo unknown) STATION_IMAGE=$image DOCKER_BUILDKIT=1 \
        BUILDKIT_PROGRESS=plain compose build "$@" >"$log" 2>&1 </dev/null && return
    tail -n 20 "$log" >&2
    die "the image could not be built, see above and $log; behind a mirror or proxy: .env.example has the settings"
}

# After a start: the tag that people type, and the image that this checkout had before goes.
keep_image() {
    local before
    before=$(setting STATION_IMAGE)
    docker tag "$image" "${image%-*}" 2>/dev/null || : # what docker compose takes by itself where .env names no image
    [ -z "$from_environment" ] || return 0             # .env has the image of another station
    [[ $before != trainstation:*-* || $before == "$image" ]] || drop_image "$before"
}
# Removes an image, unless a container of any station needs it.
drop_image() {
    local tag id
    id=$(image_id "$1") || return 0
    [ -z "$(docker ps --all --quiet --filter "ancestor=$id")" ] || { say "kept: $1, which another station uses"; return; }
    for tag in "${1%-*}" "$1"; do [ "$(image_id "$tag")" != "$id" ] || docker image rm "$tag" >/dev/null 2>&1 || :; done
}

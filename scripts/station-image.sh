# shellcheck shell=bash disable=SC2154 # mode, project, named_by: from station.sh and station-identity.sh
# The image: found or built under a tag that says what it is made of, so that checkouts at different revisions do not
# take each other's. Sourced by station.sh.
#
# trainstation:runtime-0123456789ab   made of exactly this; what containers are started from
# trainstation:runtime                the one started last, for people to type
# trainstation:used-by-NAME           keeps an image for a checkout whose station is down

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
made_of() { docker image inspect -f '{{index .Config.Labels "trainstation.inputs"}}' "$1" 2>/dev/null; }

# Succeeds where the image need not be built. A GPU station may run on one without the CUDA compiler, where NVIDIA's
# toolkit could not be had when it was built.
find_image() {
    local now target
    now=$(inputs)
    target=runtime
    [ "$mode" = cpu ] || target=$(setting STATION_TARGET cuda)
    image=trainstation:$target-$now
    [ "$(made_of "$image")" != "$now" ] || return 0
    if [ "$target" = cuda ] && [ "$(env_value STATION_IMAGE)" = "trainstation:runtime-$now" ]; then
        image=trainstation:runtime-$now
        [ "$(made_of "$image")" != "$now" ] || return 0
        image=trainstation:cuda-$now
    fi
    return 1
}

default_image() { sed -n "s/^ARG $1=//p" Dockerfile; }
build() {
    local base toolkit now
    check_buildx
    now=$(inputs)
    base=$(setting BASE_IMAGE "$(default_image BASE_IMAGE)")
    if ! have_image "$base"; then
        [ -z "$(setting BASE_IMAGE)" ] || die "BASE_IMAGE=$base is neither here nor in a registry that answers"
        say "no image registry answers: building the base image from Debian's package archive instead"
        scripts/base.sh
        base=trainstation-base:bookworm
    fi
    toolkit=$(setting CUDA_IMAGE "$(default_image CUDA_IMAGE)")
    if [ "$mode" = gpu ] && [ "$(setting STATION_TARGET cuda)" = cuda ] && ! have_image "$toolkit"; then
        [ -z "$(setting CUDA_IMAGE)" ] || die "CUDA_IMAGE=$toolkit is neither here nor in a registry that answers"
        say "NVIDIA's toolkit image cannot be had: building without the CUDA compiler (CUDA_IMAGE can name a mirror's copy)"
        export STATION_TARGET=runtime
        image=trainstation:runtime-$now
    fi
    say "building $image (a few minutes the first time)"
    BASE_IMAGE=$base CUDA_IMAGE=$toolkit STATION_VERSION=$([ ! -f train/__init__.py ] || sed -n 's/^__version__ = "\(.*\)"/\1/p' train/__init__.py) \
        STATION_REVISION=$(git rev-parse --short HEAD 2>/dev/null || echo unknown) STATION_INPUTS=$now STATION_IMAGE=$image \
        DOCKER_BUILDKIT=1 logged_build "$@" || die "the image could not be built, see above; $(why_not_built)"
    docker tag "$image" "${image%-*}"
}
# Builds with a line a step, on a terminal with one line for all of them; the whole output goes to a file.
logged_build() {
    local log
    log=$(mktemp "${TMPDIR:-/tmp}/trainstation-build.XXXXXX")
    say "the whole log: $log"
    if compose build "$@" 2>&1 </dev/null | tee "$log" | show_steps; then return; fi
    tail -n 20 "$log" >&2
    return 1
}
# BuildKit's plain output names each step as it begins: #7 [station runtime 3/9] RUN …
show_steps() {
    local line step="" seen=" " clock since=$SECONDS
    while IFS= read -r line; do
        printf -v clock '%d:%02d' $(((SECONDS - since) / 60)) $(((SECONDS - since) % 60))
        if [[ $line =~ ^#[0-9]+\ \[station\ ?([a-z]+\ [0-9]+/[0-9]+)?\]\ (.*) && $seen != *" $line "* ]]; then
            seen+="$line "
            step="${BASH_REMATCH[1]:+${BASH_REMATCH[1]}: }$(sed -E 's/--mount=[^ ]+ *//g; s/  +/ /g' <<<"${BASH_REMATCH[2]}")"
            [ -t 1 ] || printf '  %s  %.90s\n' "$clock" "$step"
        fi
        [ ! -t 1 ] || printf '\r\033[K  %s  %.68s' "$clock" "$step"
    done
    [ ! -t 1 ] || printf '\r\033[K'
}
why_not_built() {
    local free
    free=$(engine_disk_free)
    if [ -n "$free" ] && [ "$free" -lt 1000 ]; then
        printf '%s' "the engine's disk has $free MB left: docker system df shows what may go"
    else
        printf '%s' "behind a mirror or proxy: .env.example has the settings"
    fi
}

# unused ID: no other station's container was started from this image, and no other checkout has put its tag on it.
unused() {
    local users
    users=$(docker ps --all --filter "ancestor=$1" --format '{{.Label "com.docker.compose.project"}}' | grep -vx "$project")
    [ -z "$users" ] || return 1
    users=$(docker image inspect -f '{{range .RepoTags}}{{println .}}{{end}}' "$1" 2>/dev/null | grep '^trainstation:used-by-' | grep -vx "trainstation:used-by-$project")
    [ -z "$users" ]
}
# Takes this checkout's tag from an image, and the image away with it unless another station uses it.
release_image() {
    local id tag
    docker image rm "trainstation:used-by-$project" >/dev/null 2>&1 || :
    id=$(docker image inspect -f '{{.Id}}' "$1" 2>/dev/null) || return 0
    if ! unused "$id"; then
        say "kept: $1, which another station uses"
        return
    fi
    for tag in $(docker image inspect -f '{{range .RepoTags}}{{println .}}{{end}}' "$id" | grep '^trainstation:'); do
        docker image rm "$tag" >/dev/null 2>&1 || :
    done
    docker image rm "$id" >/dev/null 2>&1 || : # one whose tags have all gone to a newer build
}
# After a start: this checkout keeps the image it runs, and lets go of the one it ran before.
keep_image() {
    local before
    docker tag "$image" "${image%-*}" 2>/dev/null || : # what docker compose takes by itself where .env names no image
    [ "$named_by" != environment ] || return 0
    before=$(docker image inspect -f '{{.Id}}' "trainstation:used-by-$project" 2>/dev/null) || before=""
    if [ -n "$before" ] && [ "$before" != "$(docker image inspect -f '{{.Id}}' "$image")" ]; then
        release_image "$before" >/dev/null
    fi
    docker tag "$image" "trainstation:used-by-$project" 2>/dev/null || :
}

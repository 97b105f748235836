# shellcheck shell=bash disable=SC2154 # mode: from station.sh
# Finds or builds the image. Its tag has a checksum of what it is built from, so that checkouts at different revisions
# use different images. Sourced by station.sh.
#
# trainstation:runtime-0123456789ab   built from exactly these inputs; containers are started from it
# trainstation:runtime                the image started last, a short name for typing
#
# .env holds the tag as STATION_BUILT. STATION_IMAGE is a person's own image. It is used as it is and never removed.

image="" # of this checkout's station, set by find_image

# Succeed if .env is of an earlier make up, which kept the tag of its image in STATION_IMAGE.
is_of_before() { [[ -z $(setting STATION_BUILT) && $(setting STATION_IMAGE) =~ ^trainstation:(runtime|cuda)-[0-9a-f]{12}$ ]] && as_owner test -e .secrets/checkout; }
named_image() { is_of_before || setting STATION_IMAGE; }
built_image() { if is_of_before; then setting STATION_IMAGE; else setting STATION_BUILT; fi; }

# Print the checksum of what the image is built from. The package train/ does not count: it is mounted, so a change
# there needs no build.
inputs() {
    local file name
    {
        cat Dockerfile entrypoint.sh requirements.lock
        find docker -type f ! -name '*.mk' ! -name '*.yml' ! -name '.*' | LC_ALL=C sort | while IFS= read -r file; do
            printf '%s %s\n' "$file" "$([ -x "$file" ] && echo x)"
            cat "$file"
        done
        for name in BASE_IMAGE CUDA_IMAGE APT_MIRROR EXTRA_APT PIP_INDEX_URL NPM_MIRROR; do setting "$name"; echo; done
    } | checksum 12
}

have_image() {
    local log
    docker image inspect "$1" >/dev/null 2>&1 && return
    log=$(mktemp "${TMPDIR:-/tmp}/trainstation-pull.XXXXXX")
    with_progress "asking for $1" layers_fetched logged docker pull "$1" || { rm -f "$log"; return 1; }
    rm -f "$log"
}
image_id() { docker image inspect -f '{{.Id}}' "$1" 2>/dev/null; }

# Succeed if the image need not be built. A GPU station may use an image without the CUDA compiler if NVIDIA's toolkit
# was unreachable at build time.
find_image() {
    local now target=runtime
    image=$(named_image)
    if [ -n "$image" ]; then
        have_image "$image" || die "STATION_IMAGE=$image is neither here nor in a registry that answers"
        return
    fi
    now=$(inputs)
    [ "$mode" = cpu ] || target=$(setting STATION_TARGET cuda)
    image=trainstation:$target-$now
    [ -z "$(image_id "$image")" ] || return 0
    [ "$target" = cuda ] && [ "$(built_image)" = "trainstation:runtime-$now" ] && [ -n "$(image_id "trainstation:runtime-$now")" ] || return 1
    image=trainstation:runtime-$now
}

log="" # of the build
logged() { "$@" >"$log" 2>&1 </dev/null; }

# Print the progress of docker pull and docker build, read from their log.
layers_fetched() { awk '/: Pulling fs layer/ {all++} /: Pull complete/ {done++} END {printf "%d of %d layers", done, all}' "$log"; }
build_step() {
    awk '
        BEGIN {
            about["system"] = "Debian packages"; about["toolkit"] = "CUDA compiler"; about["runtime"] = "Python packages, services"
            step = "begins"
        }
        /^#[0-9]+ \[station [a-z]+ +[0-9]+\/[0-9]+\]/ {split($0, part, /[][]/); split(part[2], word, " +"); step = about[word[2]] " (step " word[3] ")"}
        / exporting /     {step = "writing the image"}
        / Get:[0-9]/      {add(substr($(NF - 1), 2), $NF)}           # apt: Get:1 … [12.3 kB]
        / Downloading /   {split($5, size, /[()]/); of[$4] = size[2]} # uv: Downloading torch (783.1MiB)
        / Downloaded /    {add(of[$4], of[$4]); of[$4] = ""}
        function add(number, unit) {total += number * (unit ~ /G/ ? 1000 : unit ~ /M/ ? 1 : unit ~ /[kK]/ ? 0.001 : 0.000001)}
        END {printf "%s, %d of about 3300 MB downloaded", step, total}' "$log"
}
# Print the output of the failed step, without the lines of the Dockerfile that BuildKit repeats after it.
build_failure() {
    local step
    step=$(sed -n 's/^#\([0-9]*\) ERROR: .*/\1/p' "$log" | tail -n 1)
    if [ -z "$step" ]; then grep -v '^#' "$log" | tail -n 40; return; fi
    sed -nE "s/^#$step ([0-9.]+ )?//p" "$log" | grep -v '^(Reading database' |
        sed -E 's/^ERROR: (executor|process) .*(exit code)/ERROR: \2/' | tail -n 40
}

default_image() { sed -n "s/^ARG $1=//p" Dockerfile; }
build() {
    local base toolkit since=$SECONDS
    log=$(mktemp "${TMPDIR:-/tmp}/trainstation-build.XXXXXX")
    docker buildx version >/dev/null 2>&1 || die "Docker's buildx plugin is missing: make engine installs it, as root"
    base=$(setting BASE_IMAGE "$(default_image BASE_IMAGE)")
    if ! have_image "$base"; then
        [ -z "$(setting BASE_IMAGE)" ] || die "BASE_IMAGE=$base is neither here nor in a registry that answers"
        say "no image registry answers: building the base image from Debian's package archive instead"
        scripts/base.sh
        base=trainstation-base:bookworm
    fi
    toolkit=$(setting CUDA_IMAGE "$(default_image CUDA_IMAGE)")
    [[ $image != trainstation:cuda-* ]] || docker image inspect "$toolkit" >/dev/null 2>&1 ||
        say "the CUDA compiler comes from $toolkit, 4 GB (STATION_TARGET=runtime in .env leaves it out)"
    if [[ $image == trainstation:cuda-* ]] && ! have_image "$toolkit"; then
        [ -z "$(setting CUDA_IMAGE)" ] || die "CUDA_IMAGE=$toolkit is neither here nor in a registry that answers"
        say "NVIDIA's toolkit image is unreachable: building without the CUDA compiler (CUDA_IMAGE can name a copy in a mirror)"
        export STATION_TARGET=runtime
        image=trainstation:runtime-${image##*-}
    fi
    say "building $image: downloads about 3.3 GB, less if an earlier build has left its cache; needs 12 GB of disk; its log: $log"
    BASE_IMAGE=$base CUDA_IMAGE=$toolkit STATION_VERSION=$([ ! -f train/__init__.py ] || sed -n 's/^__version__ = "\(.*\)"/\1/p' train/__init__.py) \
        STATION_REVISION=$(git rev-parse --short HEAD 2>/dev/null || echo unknown) STATION_IMAGE=$image DOCKER_BUILDKIT=1 \
        BUILDKIT_PROGRESS=plain with_progress building build_step logged compose build "$@" || {
        build_failure >&2
        die "the image could not be built, see above and $log; .env.example has the settings for mirrors and proxies"
    }
    say "built in $((SECONDS - since)) s, $(docker image inspect -f '{{.Size}}' "$image" | awk '{printf "%d MB", $1 / 1e6}')"
}

# After a start: set the short tag, and remove this checkout's previous image.
keep_image() {
    local before
    [ -z "$(named_image)" ] || return 0
    before=$(built_image)
    docker tag "$image" "${image%-*}" 2>/dev/null || :
    [ -z "$from_environment" ] || return 0 # .env names the image of another station
    [ -z "$before" ] || [ "$before" = "$image" ] || drop_image "$before"
}
# Remove an image unless a container of any station needs it.
drop_image() {
    local tag id
    id=$(image_id "$1") || return 0
    [ -z "$(docker ps --all --quiet --filter "ancestor=$id")" ] || { say "kept: $1, which another station uses"; return; }
    for tag in "${1%-*}" "$1"; do [ "$(image_id "$tag")" != "$id" ] || docker image rm "$tag" >/dev/null 2>&1 || :; done
}

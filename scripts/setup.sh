#!/usr/bin/env bash
# Makes .venv at the root hold exactly requirements.lock and this package. `make setup` and all that needs it run this;
# when nothing changed it returns at once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }
trap 'exit 130' INT

log=$(mktemp)
trap 'rm -f "$log"' EXIT

# quietly LABEL COMMAND…: a clock on a terminal while it runs, its whole output only when it fails.
quietly() {
    local label=$1 clock="" status=0
    shift
    if [ -t 2 ]; then
        (
            begun=$EPOCHSECONDS
            while kill -0 $$ 2>/dev/null; do
                spent=$((EPOCHSECONDS - begun))
                printf '\rsetup: %s … %d:%02d ' "$label" $((spent / 60)) $((spent % 60)) >&2
                sleep 1
            done
        ) &
        clock=$!
    else
        say "$label"
    fi
    "$@" >"$log" 2>&1 </dev/null || status=$?
    if [ -n "$clock" ]; then
        kill "$clock" 2>/dev/null || true
        wait "$clock" 2>/dev/null || true
        printf '\n' >&2
    fi
    if [ "$status" -ne 0 ]; then
        cat "$log" >&2
    fi
    return "$status"
}

# --- what the system has to provide: a Python that can make environments, and tmux

python=""
missing=()

# Prints the interpreter behind a name, if torch's locked wheels exist for its version. A name alone proves nothing:
# version managers leave names on the PATH that only print an error, and .venv itself may be on it.
suitable() {
    "$1" -c 'import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13): sys.exit(1)
print(getattr(sys, "_base_executable", None) or sys.executable)' 2>/dev/null
}

find_python() {
    local name
    python=""
    if [ -n "${PYTHON:-}" ]; then
        python=$(suitable "$PYTHON") || die "PYTHON=$PYTHON is not a Python 3.11 to 3.13."
        return
    fi
    for name in python3 python3.12 python3.11 python3.13 /usr/bin/python3; do
        if python=$(suitable "$name"); then
            return
        fi
    done
}

look_for_system_packages() {
    missing=()
    find_python
    if [ -n "$python" ]; then
        if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
            missing+=("$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')")
        fi
    elif ! command -v python3 >/dev/null; then
        missing+=(python3 python3-venv)
    else
        die "Python 3.11 to 3.13 is needed, found $(python3 --version 2>&1 | head -n 1):" \
            "install one and name it, as in: make setup PYTHON=/path/to/python3.12"
    fi
    look_for_tmux
}

look_for_tmux() { command -v tmux >/dev/null || missing+=(tmux); }

apt_install() {
    # shellcheck source=scripts/apt.sh
    . scripts/apt.sh
    with_apt apt-get update && with_apt apt-get install -y --no-install-recommends "$@"
}

install_missing() {
    [ ${#missing[@]} -gt 0 ] || return 0
    command -v apt-get >/dev/null || die "${missing[*]} is missing: install it with this system's package manager."
    [ "$(id -u)" -eq 0 ] || die "missing on this system; please run: sudo apt-get install -y ${missing[*]}"
    quietly "installing ${missing[*]} with apt-get" apt_install "${missing[@]}" || die "apt-get failed, see above."
}

if [ "${TRAINSTATION_IMAGE:-}" = 1 ]; then
    # The image's Python has everything; the mounted .venv, if any, belongs to the host.
    look_for_tmux
    install_missing
    exit 0
fi

# A link is somebody's choice, as for a second worktree: it stays, and so does what it leads to.
if [ -L .venv ]; then
    place=$(readlink .venv)
    .venv/bin/python -c '' 2>/dev/null || die ".venv is a link to $place, where no environment is: make setup there, or rm .venv"
    cmp -s requirements.lock "$(cat .venv/.home 2>/dev/null)/requirements.lock" ||
        say ".venv is a link to $place, whose packages may not be those of requirements.lock here; make setup is for there."
    look_for_tmux
    install_missing
    exit 0
fi

# --- one at a time, and nothing twice

exec 9>>.venv.lock
if ! flock --nonblock 9; then
    say "another make is setting up this checkout; waiting for it."
    flock 9
fi

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
if [ -n "${PYTHON:-}" ] && have=$(version_of .venv/bin/python) && [ "$have" != "$(version_of "$PYTHON")" ]; then
    die ".venv has Python $have, which PYTHON=$PYTHON is not; run make clean first to change it."
fi

# The folder is part of the key: an environment that was moved has the old path in all of its scripts.
key=$({ pwd; cat requirements.lock pyproject.toml scripts/setup.sh; } | sha256sum | cut -d' ' -f1)
stamp=.venv/.setup

if [ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && .venv/bin/python -c '' 2>/dev/null; then
    look_for_tmux
    install_missing
    exit 0
fi

look_for_system_packages
if [ ${#missing[@]} -gt 0 ]; then
    install_missing
    look_for_system_packages
    [ ${#missing[@]} -eq 0 ] || die "still missing after apt-get: ${missing[*]}"
fi

# --- the environment

if [ "$(cat "$stamp" 2>/dev/null)" = unfinished ]; then
    say "an earlier setup was interrupted; starting afresh."
    rm -rf .venv
elif [ -e .venv ] && { [ "$(cat .venv/.home 2>/dev/null)" != "$PWD" ] || ! suitable .venv/bin/python >/dev/null; }; then
    say "making .venv anew: this one was moved or its Python is gone."
    rm -rf .venv
fi
started=$SECONDS
fresh=no
[ -e .venv ] || fresh=yes
mkdir -p .venv
echo unfinished >"$stamp"
pwd >.venv/.home
if [ "$fresh" = yes ]; then
    say "$("$python" --version) in .venv; the first time downloads about 3 GB, takes some minutes and 6 GB of disk."
    quietly "making .venv" "$python" -m venv .venv || die "could not make .venv, see above."
fi

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0 PIP_NO_INPUT=1
venv_python=.venv/bin/python
options=(--require-hashes --no-deps -r requirements.lock)
package=(--no-deps --no-build-isolation -e .) # built with the locked setuptools: nothing unpinned is fetched

get_uv() {
    awk '/^[^ #]/ { wanted = /^uv==/ } wanted && !/^ *#/' requirements.lock >.venv/uv.lock
    "$venv_python" -m pip install -q --require-hashes --no-deps --only-binary :all: -r .venv/uv.lock
}

with_uv() {
    # shellcheck source=scripts/uv-like-pip.sh
    . scripts/uv-like-pip.sh
    uv_like_pip "$venv_python"
    # Python keeps compiled modules at their first import. Where that is off, as in many containers, each process
    # would compile torch anew, for twice the time of its start.
    [ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || export UV_COMPILE_BYTECODE=1
    .venv/bin/uv pip install --python "$venv_python" "${options[@]}" &&
        .venv/bin/uv pip install --python "$venv_python" "${package[@]}"
}

with_pip() {
    "$venv_python" -m pip install "${options[@]}" && "$venv_python" -m pip install "${package[@]}"
}

# pip alone does the same several times slower; it stays as the way out where uv cannot be had or reaches nothing.
if ! quietly "fetching the installer" get_uv; then
    say "uv could not be installed (see above); pip does it alone."
    quietly "installing the packages with pip" with_pip || die "the packages could not be installed, see above."
elif ! quietly "installing the packages" with_uv; then
    say "uv could not install them (see above); trying with pip."
    quietly "installing the packages with pip" with_pip || die "the packages could not be installed, see above."
fi

echo "$key" >"$stamp.new"
mv "$stamp.new" "$stamp"
say "done in $((SECONDS - started)) s."

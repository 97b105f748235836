#!/usr/bin/env bash
# Makes .venv at the root hold exactly requirements.lock and this package. `make setup` and all targets that need
# .venv run this. It returns at once if nothing changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }
trap 'exit 130' INT

# shellcheck source=scripts/progress.sh
. scripts/progress.sh
# quietly LABEL COMMAND…: run a command and show its output only if it fails.
quietly() {
    local log
    say "$1"
    log=$(mktemp)
    shift
    if with_progress setup size_of_venv logged "$@"; then rm -f "$log"; return; fi
    cat "$log" >&2
    rm -f "$log"
    return 1
}

logged() { "$@" >"$log" 2>&1 </dev/null; }
size_of_venv() { printf '%d MB' "$(du -sm .venv | cut -f 1)"; }

need() { # need PACKAGE…: install packages of the system
    # shellcheck source=scripts/apt.sh
    . scripts/apt.sh
    apt_install "$@"
}
# shellcheck source=scripts/env.sh
. scripts/env.sh
mirrors_from_env
command -v tmux >/dev/null || need tmux

# The image's Python has everything; the mounted .venv, if any, belongs to the host.
[ "${TRAINSTATION_IMAGE:-}" != 1 ] || exit 0

# A link was made on purpose, for example in a second worktree. Keep it and its target.
if [ -L .venv ]; then
    place=$(readlink .venv)
    .venv/bin/python -c '' 2>/dev/null || die ".venv is a link to $place, which holds no environment: run make setup there, or rm .venv"
    cmp -s requirements.lock "$(cat .venv/.home 2>/dev/null)/requirements.lock" ||
        say ".venv is a link to $place, whose packages may differ from requirements.lock here; run make setup there."
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
    die ".venv has Python $have, and PYTHON=$PYTHON is another version; to change it, run make clean first."
fi
# The folder is part of the key, because a moved environment has the old path in all its scripts.
key=$({ pwd; cat requirements.lock pyproject.toml scripts/setup.sh; } | sha256sum | cut -d' ' -f1)
stamp=.venv/.setup
if [ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && .venv/bin/python -c '' 2>/dev/null; then exit 0; fi

# --- a Python of a version for which torch's locked wheels exist

# Print the interpreter behind a name. The name alone proves nothing: version managers put names on PATH that only
# print an error, and .venv itself may be on PATH.
suitable() {
    "$1" -c 'import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13): sys.exit(1)
print(getattr(sys, "_base_executable", None) or sys.executable)' 2>/dev/null
}
find_python() {
    local name
    for name in ${PYTHON:-python3 python3.12 python3.11 python3.13 /usr/bin/python3}; do
        if python=$(suitable "$name"); then return; fi
    done
    [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not a Python 3.11 to 3.13."
    return 1
}
if ! find_python; then
    ! command -v python3 >/dev/null || die "Python 3.11 to 3.13 is needed, found $(python3 --version 2>&1 | head -n 1):" \
        "install one and name it, for example: make setup PYTHON=/path/to/python3.12"
    need python3 python3-venv
    find_python || die "apt-get installed no Python 3.11 to 3.13: install one and name it, for example: make setup PYTHON=/path/to/python3.12"
fi
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    need "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"

# --- the environment

if [ -e .venv ] && {
    [ "$(cat "$stamp" 2>/dev/null)" = unfinished ] || [ "$(cat .venv/.home 2>/dev/null)" != "$PWD" ] || ! suitable .venv/bin/python >/dev/null
}; then
    say "creating .venv again: its setup was interrupted, it was moved, or its Python is gone."
    rm -rf .venv
fi
started=$SECONDS
if [ ! -e .venv ]; then
    say "$("$python" --version) in .venv; the first setup downloads about 3 GB and needs 6 GB of disk."
    quietly "creating .venv" "$python" -m venv .venv || die "could not create .venv, see above."
fi
echo unfinished >"$stamp"
pwd >.venv/.home

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0 PIP_NO_INPUT=1
venv_python=.venv/bin/python
install() {
    awk '/^[^ #]/ { wanted = /^uv==/ } wanted && !/^ *#/' requirements.lock >.venv/uv.lock
    "$venv_python" -m pip install -q --require-hashes --no-deps --only-binary :all: -r .venv/uv.lock || return
    # shellcheck source=scripts/uv-like-pip.sh
    . scripts/uv-like-pip.sh
    uv_like_pip "$venv_python"
    # Python caches compiled modules at their first import. If that is off, as in many containers, each process would
    # compile torch again and start twice as slowly.
    [ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || export UV_COMPILE_BYTECODE=1
    .venv/bin/uv pip install --python "$venv_python" --require-hashes --no-deps -r requirements.lock || return
    unset UV_COMPILE_BYTECODE # uv would go through all packages again
    .venv/bin/uv pip install --python "$venv_python" --no-deps --no-build-isolation -e . # with the locked setuptools
}
quietly "installing the packages" install || die "could not install the packages, see above."
warning=$("$venv_python" docker/uplot.py 2>&1) ||
    say "warning: $(tail -n 1 <<<"$warning"); the page draws simpler curves; to try again: $venv_python docker/uplot.py"

echo "$key" >"$stamp.new"
mv "$stamp.new" "$stamp"
say "done in $((SECONDS - started)) s."

#!/usr/bin/env bash
# Tests the station from outside, with a real engine: `make test-image`. Some tests only:
#
#     make test-image IN=tests/image/test_ssh.py ARGS="-k sftp"
#
# It first installs what is missing (an engine, a browser, an ssh client), which needs root. No test is skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'test-image: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }

scripts/engine.sh

missing=()
command -v chromium >/dev/null || missing+=(chromium fonts-dejavu-core)
command -v ssh >/dev/null || missing+=(openssh-client)
command -v strace >/dev/null || missing+=(strace)
# shellcheck source=scripts/apt.sh
. scripts/apt.sh
[ ${#missing[@]} = 0 ] || apt_install "${missing[@]}"

# The tests' own packages in a separate environment: a run needs no browser driver and no linters.
env=.venv/image-tests
mark=$env/.requirements.lock
if ! cmp -s tests/image/requirements.lock "$mark"; then
    .venv/bin/python -m venv --without-pip --clear "$env"
    # shellcheck source=scripts/uv-like-pip.sh
    . scripts/uv-like-pip.sh
    uv_like_pip .venv/bin/python
    VIRTUAL_ENV=$PWD/$env UV_LINK_MODE=copy .venv/bin/uv pip sync --quiet --compile-bytecode --require-hashes tests/image/requirements.lock
    cp tests/image/requirements.lock "$mark"
fi

export PATH=$PWD/$env/bin:$PATH # the linters, which the tests call by name
exec "$env/bin/python" -m pytest --durations=10 "$@"

#!/usr/bin/env bash
# Writes requirements.lock from pyproject.toml: all extras, Python 3.11 and later, with hashes, without the
# address of an index. It keeps known versions. `make lock ARGS=--upgrade` updates all, `make lock ARGS="-P numpy"`
# updates one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# pyproject.toml names the versions that the package runs on. These are the tested versions, which the image ships.
pins='torch==2.7.1
torchvision==0.22.1'

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

PATH=$PWD/.venv/bin:$PATH

# Use one index, the public one or its mirror, so that no build of this machine gets into the lock.
# shellcheck source=scripts/uv-like-pip.sh
. scripts/uv-like-pip.sh
uv_like_pip python
unset UV_FIND_LINKS UV_INDEX UV_EXTRA_INDEX_URL UV_CONSTRAINT UV_OVERRIDE
export UV_NO_CONFIG=1

cp requirements.lock "$work/requirements.lock" 2>/dev/null || true
echo "$pins" >"$work/pins.txt"
uv pip compile pyproject.toml --quiet --all-extras --universal --python-version 3.11 --generate-hashes \
    --no-emit-index-url --no-emit-find-links --annotation-style line \
    --constraints "$work/pins.txt" --custom-compile-command 'make lock' -o "$work/requirements.lock" "$@"

# uv names the constraints by a temporary file: remove these references.
sed -i "s|-c $work/pins.txt, ||; s|, -c $work/pins.txt||" "$work/requirements.lock"
if grep -nE '://|file:|^-|==[^ ;]*\+| @ |/tmp/' "$work/requirements.lock"; then
    echo "lock: the lines above tie the lock to this machine or to an index; requirements.lock is unchanged." >&2
    exit 1
fi
cat "$work/requirements.lock" >requirements.lock
echo "requirements.lock: $(grep -c '^[a-z0-9]' requirements.lock) packages"

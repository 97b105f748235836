#!/usr/bin/env bash
# Runs every check, also after one has failed, to show all complaints at once. `make lint` runs this.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PY:-.venv/bin/python}
python=$(command -v "$python") || { echo "lint: no $python; run make setup first." >&2; exit 2; }
# pip puts shellcheck beside the interpreter.
PATH=$(dirname "$python"):$PATH
failed=()

check() {
    local what=$1
    shift
    printf -- '-- %s\n' "$what"
    "$@" || failed+=("$what")
}

# Shell files have no common ending (for example .ci/run), so the first line decides.
check_shell() {
    local files file
    mapfile -t files < <(git ls-files --cached --others --exclude-standard -- ':!*.sbatch' | while IFS= read -r file; do
        [[ $file == *.sh ]] || head -n 1 -- "$file" 2>/dev/null | grep -qaE '^#!.*[/ ](ba|da)?sh( |$)|^# shellcheck shell=' && printf '%s\n' "$file"
    done)
    shellcheck -x "${files[@]}" && echo "All ${#files[@]} shell files are clean."
}

check "ruff check" "$python" -m ruff check .
check "ruff format" "$python" -m ruff format --check .
check "mypy" "$python" -m mypy
check "import-linter" lint-imports --no-cache
check "shellcheck" check_shell

if [ ${#failed[@]} -gt 0 ]; then
    printf 'lint: %s failed, see above.\n' "${failed[@]}" >&2
    exit 1
fi

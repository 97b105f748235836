#!/usr/bin/env bash
# Every check, also after one has failed: a person wants all complaints at once. `make lint` runs this.
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

# Shell files have no common ending (.ci/run, for one), so the first line decides.
shell_files() {
    local file first
    while IFS= read -r -d '' file; do
        case $file in
            *.sbatch) ;; # a template
            *.sh | *.bash) printf '%s\0' "$file" ;;
            *)
                IFS= read -r first <"$file" 2>/dev/null || true
                [[ $first =~ ^#!.*[/\ ](ba|da)?sh($|\ ) ]] && printf '%s\0' "$file"
                ;;
        esac
    done < <(find . \( -name .git -o -name .venv -o -path ./runs -o -path ./datasets -o -name '.*_cache' \
        -o -name __pycache__ \) -prune -o -type f -size -200k -print0)
    return 0
}

check_shell() {
    command -v shellcheck >/dev/null || { echo "shellcheck is missing: sudo apt-get install -y shellcheck"; return 1; }
    local files
    mapfile -d '' -t files < <(shell_files)
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

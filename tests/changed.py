"""Which tests a change needs: `make test CHANGED=REV`.

    python -m tests.changed [REV]

Prints the paths of the tests of each changed room and of all rooms above it, by the imports that import-linter reads.
What has changed: everything between the merge base with REV and the working tree, with uncommitted and new files. REV
is the upstream branch by default. A room below cannot know of one above, so its tests need not run again.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALL = ("tests/train", "tests/examples", "tests/docs", "tests/notebooks")
"""What `make test` runs."""
ELSEWHERE = {
    "docker/": "make test-image", "scripts/": "make test-image", "Dockerfile": "make test-image",
    "docker-compose": "make test-image", "entrypoint.sh": "make test-image", "tests/image/": "make test-image",
    "tests/cuda/": "make test-minutes IN=tests/cuda", "tests/gpu/": "make test-bench", "benchmarks/": "make test-bench",
    "tests/benchmarks/": "make test-bench", "tests/torture/": "make torture",
}  # fmt: skip
"""Maps how a path begins to the command that tests it; `make test` does not."""
_BY_PLACE = {"docs/": "tests/docs", "notebooks/": "tests/notebooks", "examples/": "tests/examples"}
_ROOMS_OF_TESTS = {"slurm": "cluster"}
"""Maps a folder of tests that has not the name of a room to its room."""


class Unknown(Exception):
    """What keeps us from knowing the change or the rooms, and what to type, in one line."""


def importers() -> dict[str, set[str]]:
    """Map each room of train/ to itself and all rooms that import it, also by way of others.

    Raises:
        Unknown: import-linter's reader of imports is not installed.
    """
    try:
        import grimp
    except ModuleNotFoundError:
        raise Unknown(
            "import-linter is not installed here, as in the station; use a checkout's own environment"
        ) from None
    graph = grimp.build_graph("train", cache_dir=None)
    direct: dict[str, set[str]] = defaultdict(set)
    rooms = {module.split(".")[1] for module in graph.modules if "." in module}
    for module in graph.modules - {"train"}:
        for imported in graph.find_modules_directly_imported_by(module) - {"train"}:
            direct[imported.split(".")[1]].add(module.split(".")[1])
    above = {}
    for room in rooms:
        found, left = {room}, [room]
        while left:
            more = direct[left.pop()] - found
            found |= more
            left.extend(more)
        above[room] = found
    return above


def room_of_test(path: Path) -> str | None:
    """The room that a test in tests/train belongs to: its folder, or what the file is named after."""
    first = path.relative_to("tests/train").parts[0]
    name = first.removeprefix("test_").removesuffix(".py")
    return _ROOMS_OF_TESTS.get(name, name) if (path.suffix == ".py" and path.name.startswith("test_")) else None


def needed(changes: Iterable[str], tests: Iterable[Path], above: dict[str, set[str]]) -> list[str]:
    """List the paths of tests that these changes need, sorted; `ALL` where a change may concern any test.

    Args:
        changes: changed files, relative to the checkout.
        tests: the test files below tests/train, likewise.
        above: of `importers`.
    """
    rooms: set[str] = set()
    paths: set[str] = set()
    for change in changes:
        place = next((place for begin, place in _BY_PLACE.items() if change.startswith(begin)), None)
        parts = Path(change).parts
        if change.startswith("train/") and not change.endswith(".md"):
            room = parts[1].removesuffix(".py")
            rooms |= above.get(room, {room})
        elif place or (change.startswith(tuple(_BY_PLACE.values())) and len(parts) > 2):
            paths.add(place or "/".join(parts[:2]))
        elif change.startswith("tests/train/") and room_of_test(Path(change)):
            paths.add(change)
        elif change.endswith(".md") or change.startswith("CITATION"):
            paths.add("tests/docs")
        elif not change.startswith(tuple(ELSEWHERE)):
            return list(ALL)  # the lock, the Makefile, what tests share
    if rooms:
        known = {room for group in above.values() for room in group}
        # tests that are named after no room look at all of them
        paths |= {str(test) for test in tests if (room := room_of_test(test)) in rooms or room not in known}
        paths.add("tests/docs")  # flags and messages that pages show
    return sorted(paths)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["git failed"])[0]
        raise Unknown(f"{said}; give a revision, such as CHANGED=HEAD~1")
    return done.stdout


def changed(revision: str) -> list[str]:
    """List what differs from the merge base with this revision: committed, uncommitted, deleted and new files.

    Raises:
        Unknown: git does not know the revision.
    """
    base = _git("merge-base", revision, "HEAD").strip()
    listed = _git("diff", "--name-only", "--no-renames", "-z", base)
    return [*filter(None, (listed + _git("ls-files", "--others", "--exclude-standard", "-z")).split("\0"))]


def main(arguments: list[str]) -> int:
    revision = arguments[0] if arguments else "@{upstream}"
    try:
        changes, above = changed(revision), importers()
    except Unknown as error:
        given = arguments[0] if arguments else ""
        print(f"make test: CHANGED={given}: {error}", file=sys.stderr)
        return 2
    tests = [path.relative_to(ROOT) for path in sorted((ROOT / "tests" / "train").rglob("test_*.py"))]
    paths = [path for path in needed(changes, tests, above) if (ROOT / path).exists()]
    places = sorted({str(Path(path).parent) if path.endswith(".py") else path for path in paths})
    said = f"{len(changes)} files changed since {revision}; tests: {', '.join(places) or 'none'}"
    print(f"make test: {said}", file=sys.stderr)
    also = {command for begin, command in ELSEWHERE.items() if any(change.startswith(begin) for change in changes)}
    for command in sorted(also):
        print(f"make test: this change also needs: {command}", file=sys.stderr)
    print(" ".join(paths))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs each failed test of `.ci/run` twice more, alone, and says whether the failures may be forgiven.

    python .ci/again.py RESULTS

RESULTS has two files for each section that failed: `NAME.command`, the section's command with a word a line, and
`NAME.failed`, which tests/conftest.py wrote. Prints `unstable: TEST` for each failure that it forgives, and all else on
stderr. Exits with 0 where every failure is forgiven, else with 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

FORGIVEN = 2
"""Maximum number of failed tests that one run forgives."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def passes(command: list[str], test: str) -> bool:
    """Run a section's command for this test alone."""
    words = [word for word in command if not word.startswith("IN=")]
    with tempfile.NamedTemporaryFile("w", prefix="again-", suffix=".txt") as file:
        file.write(f"{test}\n")
        file.flush()
        Path(file.name).chmod(0o644)
        environment = {key: value for key, value in os.environ.items() if key != "TEST_FAILURES"}
        say(f"\n==== again: {test}")
        return subprocess.run([*words, f"IN=@{file.name}"], env=environment, stdout=2, check=False).returncode == 0


def read(results: Path) -> list[tuple[str, str, str]]:
    """List what failed: section, test, and whether it may be forgiven.

    Raises:
        LookupError: a section failed, and not by a test.
    """
    failed = []
    for command in sorted(results.glob("*.command")):
        tests = command.with_suffix(".failed")
        lines = sorted(set(tests.read_text().splitlines())) if tests.exists() else []
        if not lines:
            raise LookupError(f"{command.stem} failed, and not by a test")
        for line in lines:
            forgiven, _, test = line.partition("\t")
            failed.append((command.stem, test, forgiven))
    return failed


def main(results: Path) -> int:
    try:
        failed = read(results)
    except LookupError as error:
        say(f"ci: {error}")
        return 1
    for section, test, forgiven in failed:
        say(f"failed: {section}: {test}{', which is never forgiven' if forgiven == 'never' else ''}")
    if any(forgiven == "never" for _, _, forgiven in failed):
        return 1
    if len(failed) > FORGIVEN:
        say(f"ci: {len(failed)} tests failed, and at most {FORGIVEN} are forgiven")
        return 1
    for section, test, _ in failed:
        command = (results / f"{section}.command").read_text().splitlines()
        if not all(passes(command, test) for _ in range(2)):
            say(f"ci: {test} failed again, alone")
            return 1
    for _, test, _ in failed:
        print(f"unstable: {test}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

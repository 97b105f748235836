"""The finding of a check, and how it is printed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable

from .. import screen

OK, WARNING, PROBLEM, NOT_APPLICABLE = "ok", "warning", "problem", "not applicable"
_COLOUR = {OK: "32", WARNING: "33", PROBLEM: "31", NOT_APPLICABLE: "2"}
_NARROWEST = 40
EXIT_WELL, EXIT_PROBLEM = 0, 1


@dataclasses.dataclass(frozen=True)
class Finding:
    """The verdict of one check."""

    check: str
    """The name of the check, as people would search for it."""
    verdict: str
    """OK, WARNING (works, but not well or not for long), PROBLEM (does not work) or NOT_APPLICABLE."""
    seen: str
    """What was seen, in one line."""
    remedy: str = ""
    """A command to paste, for a warning or a problem."""


def ok(check: str, seen: str) -> Finding:
    return Finding(check, OK, seen)


def warning(check: str, seen: str, remedy: str) -> Finding:
    return Finding(check, WARNING, seen, remedy)


def problem(check: str, seen: str, remedy: str) -> Finding:
    return Finding(check, PROBLEM, seen, remedy)


def not_applicable(check: str, why: str) -> Finding:
    return Finding(check, NOT_APPLICABLE, why)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 if there is a problem, else 0."""
    return EXIT_PROBLEM if any(finding.verdict == PROBLEM for finding in findings) else EXIT_WELL


def as_text(findings: list[Finding], width: int, colour: bool = False) -> str:
    """Return one line per check, with its remedy below, and the number of problems and warnings."""
    name = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        mark = f"{'-' if finding.verdict == NOT_APPLICABLE else finding.verdict:<8}"
        if colour:
            mark = f"\x1b[{_COLOUR[finding.verdict]}m{mark}\x1b[0m"
        # the invisible bytes of the colour do not count for the width
        indent = " " * (8 + name + 2)
        room = max(width, len(indent) + _NARROWEST)
        seen = textwrap.wrap(screen.printable(finding.seen), room - len(indent), break_on_hyphens=False) or [""]
        lines.append(f"{mark}{finding.check:<{name}}  {seen[0]}")
        lines += [indent + more for more in seen[1:]]
        if finding.remedy:
            lines.append(f"{indent}try: {screen.printable(finding.remedy)}")  # never wrapped, so that it can be pasted
    verdicts = [finding.verdict for finding in findings]
    counts = [(word, verdicts.count(word)) for word in (PROBLEM, WARNING)]
    total = ", ".join(f"{count} {word}{'s' if count > 1 else ''}" for word, count in counts if count) or "all is well"
    skipped = verdicts.count(NOT_APPLICABLE)
    done = f"{len(verdicts)} checks" + (f", {skipped} skipped (-)" if skipped else "")
    return "\n".join([*lines, "", f"{done}: {total}"])


def show(findings: list[Finding], json_: bool) -> None:
    """Print the findings; with `json_` as a list of objects with check, verdict, seen, remedy."""
    if json_:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
        return
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else 80
    colour = is_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM", "dumb") != "dumb"
    print(as_text(findings, width, colour))

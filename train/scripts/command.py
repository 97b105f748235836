"""The command line of a script: `{run}` in its arguments, and what `--on-restart` changes when it starts again.

Reads the file system for `{newest:GLOB}`, changes nothing, and imports no torch.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..code import changes
from ..errors import Refused
from ..run.record import Attempt
from ..run.run_folder import seconds_of
from ..run.spec import RUN, Spec

_OPENS = "{newest:"
_BRACES = re.compile(r"\{run\}|\{newest:(?P<glob>(?:\{run\}|[^{}])*)\}")
_PORT = re.compile(rb"""MASTER_PORT['"]?\s*(?:\]\s*=|:|=)\s*(?:str\()?['"]?(\d{2,5})\b""")
"""Where a source sets MASTER_PORT to a number. `setdefault` does not: the launcher has set one before."""
_NUMBER = re.compile(r"-\.?\d")
_Stamp = tuple[int, str]

BEGINS_ANEW = "begins at step 0, unless the script loads its own checkpoint"
"""What a restart does without --on-restart and without a session."""
SAY_HOW = "if it can continue: --on-restart 'ARGS' ('' if it does so by itself)"


def split(text: str) -> list[str]:
    """Return the words of --on-restart.

    Raises:
        Refused: a quote is not closed, or a {newest:GLOB} is empty or broken.
    """
    try:
        words = shlex.split(text)
    except ValueError:
        raise Refused(f"--on-restart {text}: a quote is not closed; write: --on-restart '--resume \"A B\"'") from None
    for word in words:
        if sum(bool(found["glob"]) for found in _BRACES.finditer(word)) != word.count(_OPENS):
            raise Refused(f"--on-restart {text}: write {{newest:GLOB}} with a closing brace; quote a GLOB with blanks")
    return words


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise Refused if the script's own arguments hold {newest:GLOB}, which only --on-restart replaces."""
    found = next((word for word in arguments if _OPENS in word), None)
    if found is not None:
        raise Refused(f"{found}: only --on-restart takes {{newest:GLOB}}; give: --on-restart 'ARGS' before --")


def ports_set(files: Iterable[Path]) -> list[tuple[Path, int]]:
    """Return which of these sources set MASTER_PORT to a number, each with the port."""
    found = [(file, int(match[1])) for file in files for match in _PORT.finditer(source(file))]
    return [(file, port) for file, port in found if 0 < port < 1 << 16]


def source(file: Path) -> bytes:
    """Return the text of a file; nothing if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


class Starts:
    """The command lines of one script, start after start.

    If a start has failed, {newest:GLOB} leaves out the files that it was given: a kill in the middle of writing leaves
    a torn one.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._given: set[_Stamp] = set()
        self._bad: set[_Stamp] = set()

    def arguments(self, run: Path, attempt: int, has_failed: bool = False) -> tuple[list[str], str]:
        """Return the arguments of an attempt, and a line about --on-restart; '': it does not matter now.

        Args:
            run: The run folder as it is named now.
            has_failed: Whether the attempt before has failed at its start.
        """
        words = [word.replace(RUN, str(run)) for word in self._spec.script_arguments]
        if attempt == 1 or not self._spec.on_restart:
            return words, ""
        self._bad |= self._given if has_failed else set()
        self._given = set()
        given = shlex.join(self._spec.on_restart)
        missing: list[str] = []
        left_out: list[str] = []
        more = [
            _BRACES.sub(lambda found: self._path(found["glob"], run, missing, left_out), word)
            for word in self._spec.on_restart
        ]
        if missing:
            return (
                words,
                f"attempt {attempt} starts without --on-restart ({given}), because nothing matches {missing[0]}",
            )
        why = f", because the start with {left_out[0]} has failed" if left_out else ""
        return merged(words, more), f"attempt {attempt} starts with {shlex.join(more)} (--on-restart){why}"

    def _path(self, pattern: str | None, run: Path, missing: list[str], left_out: list[str]) -> str:
        """Return what stands for {run} (None) or {newest:PATTERN}. The path is absolute, because a script may change
        its folder.

        Args:
            missing: Gets the pattern if nothing matches it.
            left_out: Gets the newest match if a start with it has failed, and there is another one.
        """
        if pattern is None:
            return str(run)
        full = os.path.abspath(os.path.expanduser(pattern.replace(RUN, glob.escape(str(run)))))  # noqa: PTH100, PTH111
        stamps = sorted(map(_modified, glob.glob(full, recursive=True)))  # noqa: PTH207
        if not stamps:
            missing.append(full.replace(glob.escape(str(run)), str(run)))
            return ""
        whole = [stamp for stamp in stamps if stamp not in self._bad] or stamps
        if whole[-1] != stamps[-1]:
            left_out.append(stamps[-1][1])
        self._given.add(whole[-1])
        return whole[-1][1]


def edited(spec: Spec, name: str) -> list[str]:
    """Return a warning if the script's files, which a start runs as they are now, have changed since the launch."""
    changed = changes.changed(spec.script_files)
    return [f"{changed} changed since {name} was launched; the new version runs"] if changed else []


def healthy_minutes(spec: Spec) -> float:
    """Return the minutes an attempt of a script must run to count as progress (watch.healthy_minutes)."""
    from .. import config

    return float(spec.watch.get("healthy_minutes") or config.Watch.healthy_minutes)


def has_failed(attempts: Sequence[Attempt], seconds: float) -> bool:
    """Whether the last of these attempts has failed by itself before it had run so many seconds.

    A signal says nothing about the files that a script was given.
    """
    if not attempts or attempts[-1].get("end") != "died" or "died of SIG" in attempts[-1].get("reason", ""):
        return False
    began, ended = seconds_of(attempts[-1]["started"]), seconds_of(attempts[-1].get("ended"))
    return began is None or ended is None or ended - began < seconds


def _modified(path: str) -> _Stamp:
    """Return when a path was last modified, and the path."""
    try:
        return os.stat(path).st_mtime_ns, path  # noqa: PTH116 # as glob gave it
    except OSError:  # removed meanwhile, or a link that leads nowhere
        return -1, path


def merged(arguments: Sequence[str], more: Sequence[str]) -> list[str]:
    """Return arguments in which those of the same name are replaced by `more`, and the others are added at the end.

    `--name X` and `--name=X` have the same name, and `name=X` has one too. Of `--name X Y` as many values are replaced
    as the new one has: the others may be positional arguments.
    """
    end = [*arguments, "--"].index("--")
    result, rest = list(arguments[:end]), list(arguments[end:])
    new: dict[str, list[list[str]]] = {}
    for name, words in _by_name(more):
        new.setdefault(name, []).append(words)
    for name, groups in new.items():
        count = max(len(words) - 1 + ("=" in words[0]) for words in groups)
        kept, at = _without(result, name, count) if name else (result, len(result))
        result = [*kept[:at], *(word for words in groups for word in words), *kept[at:]]
    return result + rest


def _by_name(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each argument with its name: `--name` with its values, `name=`, or '' for a positional one."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        name, equals, _ = word.partition("=")
        if _is_option(word):
            found.append((name, [word]))
        elif found and _is_option(found[-1][1][0]) and "=" not in found[-1][1][0]:
            found[-1][1].append(word)
        else:
            found.append((name + equals if equals else "", [word]))
    return found


def _without(arguments: list[str], name: str, count: int) -> tuple[list[str], int]:
    """Return arguments without those of this name and up to `count` values of each, and where the first one stood."""
    kept: list[str] = []
    at, left = -1, 0
    for word in arguments:
        is_same = word == name or word.startswith(name if name.endswith("=") else f"{name}=")
        if is_same:
            at, left = (len(kept) if at < 0 else at), (count if word == name else 0)
        elif left and not _is_option(word):
            left -= 1
        else:
            kept.append(word)
            left = 0
    return kept, len(kept) if at < 0 else at


def _is_option(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and not _NUMBER.match(word)

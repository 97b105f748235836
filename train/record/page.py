"""A run as one page of HTML that needs nothing else: no network, no script, no other file.

Everything that a user can have given (names, values, errors, metrics) is escaped by Jinja; of figures, whose texts
matplotlib escapes, alone it is not. A policy in the page forbids scripts altogether.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import train
from train import screen
from train.errors import Refused, one_line
from train.record import advice, best, figures, manifest, settings, table, times
from train.record.manifest import Unreadable
from train.record.store import Run, now
from train.record.target import check, published

SUFFIXES = (".html", ".htm")


def write(run: Run, target: Path) -> None:
    """Write the page of a run.

    Raises:
        Refused: it cannot be written, or run.json cannot be read.
    """
    check(target, SUFFIXES)
    text = html(run)
    with published(target) as partial:
        partial.write_text(text, encoding="utf-8")


def html(run: Run) -> str:
    """The page.

    Raises:
        Refused: run.json cannot be read.
    """
    from jinja2 import Environment

    record = run.shown()
    problems: list[str] = []

    def found(what: str, look: Callable[[], Any], otherwise: Any) -> Any:
        """What can be found; of a damaged run folder the page says what it lacks."""
        try:
            return look()
        except Exception as error:
            problems.append(
                f"{what} cannot be shown, for the run folder is damaged or of another release: {_say(error)}"
            )
            return otherwise

    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_printable)
    environment.filters |= {"long": long, "size": _size, "moment": _moment, "say": settings.shown}
    account = found("where time went", lambda: times.of(run, record), times.Account())
    content: dict[str, Any] = {
        "run": run.name,
        "record": record,
        "account": account,
        "parts": parts(account),
        "verdict": found("the verdict", lambda: advice.verdict(account, record), []),
        "figures": found("figures", lambda: figures.drawn(run), {}),
        "settings": found("the configuration", lambda: settings.listed(run), []),
        "attempts": found("attempts", lambda: _attempts(record), []),
        "checkpoints": found("checkpoints", lambda: _checkpoints(run), []),
        "facts": found("the facts", lambda: _facts(run, record), []),
        "environment": found("the environment", lambda: _environment(record), []),
        "problems": problems,
        "made": now(),
        "version": train.__version__,
    }
    return environment.from_string(template).render(content)


def _printable(value: Any) -> Any:
    """A value of the page without what would turn its direction or hide parts of it; markup stays as it is."""
    if hasattr(value, "__html__"):
        return value
    text = str(value).encode(errors="backslashreplace").decode()  # words may be no UTF-8
    return "\n".join(map(screen.printable, text.split("\n")))


def _say(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")[:300]


def parts(account: times.Account) -> list[dict[str, Any]]:
    """The parts that there are, in the order of PARTS: name, seconds, share of the whole, what is in it."""
    return [
        {"key": key, "name": name, "seconds": account.parts[key], "help": text,
         "share": account.parts[key] / account.whole if account.whole else 0.0}
        for key, (name, text) in times.PARTS.items()
        if account.parts[key] > 0
    ]  # fmt: skip


def _facts(run: Run, record: dict[str, Any]) -> list[tuple[str, Any]]:
    """What a reader asks first."""
    steps = f"{record['step']} of {record['total_steps']}" if record.get("total_steps") else None
    results = ", ".join(f"{name} {settings.shown(value)}" for name, value in dict(record.get("metrics") or {}).items())
    pairs = [
        ("task", record.get("script") or record.get("task_source") or record.get("task")),
        ("step", steps),
        ("epoch", record.get("epoch") if steps else None),
        ("result of the last evaluation", results),
        ("samples", record.get("samples")),
        ("ranks", record.get("world_size")),
        ("created", _moment(record.get("created"))),
        ("ended", _moment(record.get("ended"))),
        ("weights", record.get("weights_sha256")),
        ("waiting for data", record.get("data_wait")),
        ("folder", run.folder),
    ]
    return [(name, value) for name, value in pairs if value not in (None, "", {}, [])]


def _environment(record: dict[str, Any]) -> list[tuple[str, Any]]:
    hosts = [str(one["host"]) for one in record["attempts"] if isinstance(one, dict) and one.get("host")]
    hosts = list(dict.fromkeys([*hosts, *([str(record["host"])] if record.get("host") else [])]))
    pairs = [
        ("host" if len(hosts) == 1 else "hosts", ", ".join(hosts)),
        ("device", record.get("device")),
        ("git revision", record.get("git_revision")),
        ("started in", record.get("cwd")),
        *dict(record.get("versions") or {}).items(),
    ]
    return [(name, value) for name, value in pairs if value not in (None, "")]


def _attempts(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each attempt what `train show` tells, and how long it was."""
    found = []
    for attempt in record["attempts"]:
        end = table.end_of(attempt, record["state"])
        begin, to = attempt.get("from_step"), attempt.get("to_step")
        found.append(
            {"number": attempt.get("number"), "started": attempt.get("started"), "ended": attempt.get("ended"),
             "ranks": attempt.get("world_size"), "end": end, "reason": attempt.get("reason") or "",
             "steps": "" if begin is None else f"{begin} to {'…' if to is None else to}",
             "lines": [str(line) for line in attempt.get("last_lines") or []]}
        )  # fmt: skip
    return found


def _checkpoints(run: Run) -> list[dict[str, Any]]:
    """Those that are kept, oldest first."""
    top, found = best.best(run), []
    for step in sorted(run.steps_saved()):
        folder = run.checkpoint(step)
        said, size = "", None
        try:
            content = manifest.read_manifest(folder)
            size = sum(int(entry["size"]) for entry in content["files"].values())
        except (ValueError, Unreadable, Refused, KeyError, TypeError) as error:
            said = one_line(error)
        found.append(
            {"step": step, "size": size, "problem": said, "time": folder.stat().st_mtime,
             "best": f"best {top.metric}: {top.value:.4f}" if top and top.step == step else ""}
        )  # fmt: skip
    return found


def long(seconds: float) -> str:
    """A time in words: 95 ms, 12.3 s, 4 min 10 s, 3 h 20 min, 2 d 4 h."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, small, names in ((86400, 3600, ("d", "h")), (3600, 60, ("h", "min")), (60, 1, ("min", "s"))):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size} {names[0]}" + (f" {rest} {names[1]}" if rest else "")
    return f"{seconds:.1f} s"


def _size(count: float | None) -> str:
    if count is None:
        return "-"
    for power, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= power:
            return f"{count / power:.1f} {unit}"
    return f"{count} bytes"


def _moment(stamp: Any) -> str:
    """A time as people read it, in UTC."""
    try:
        if isinstance(stamp, float):
            at = datetime.datetime.fromtimestamp(stamp, datetime.UTC)
        else:
            at = datetime.datetime.fromisoformat(str(stamp)).astimezone(datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return str(stamp or "")
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"

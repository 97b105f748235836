#!/usr/bin/env python3
"""Writes docs/fields.md from train/config/schema.py: `make fields`. tests/docs checks that the page is fresh."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))

from train import config  # noqa: E402 # of this checkout

PAGE = CHECKOUT / "docs" / "fields.md"
LONGEST = 60
"""Characters. A longer list of values is not shown; the meaning lists them."""
INTRODUCTION = """# Configuration fields

This page is generated from `train/config/schema.py` by `make fields`. `train run --help` prints the same.

```bash
train run digits --epochs 1 --optim.lr 0.01 --schedule.decay linear
```

Each field is a flag of `train run`, `train launch`, `train submit` and `train fork`, and a key of a TOML file:
[how to configure a run](runs.md#configure-a-run-flags-and-toml). The fields of a task's `Settings` are flags
`--task.NAME`: [tasks.md](tasks.md#add-settings-and-defaults).

- N is a whole number, X a number, TEXT any text.
- An empty default means that nothing is set.
- *resume*: `train resume` may change the field. For other fields use
  [`train fork`](runs.md#try-something-else-from-a-checkpoint).
- A field that has no effect in a run is refused: [tasks.md](tasks.md#a-field-has-no-effect).
"""
GROUPS = {
    "": ("The run", "[runs.md](runs.md), [gpu.md](gpu.md)"),
    "optim": ("Optimizer", "[tasks.md](tasks.md#choose-the-optimizer-and-parameter-groups)"),
    "schedule": ("Learning rate schedule", "[tasks.md](tasks.md#set-the-learning-rate-schedule)"),
    "parallel": ("Several ranks", "[strategies.md](strategies.md)"),
    "data": ("Data", "[tasks.md](tasks.md#load-your-data)"),
    "checkpoint": ("Checkpoints", "[runs.md](runs.md#rename-and-delete-runs)"),
    "log": ("Logs", "[observe.md](observe.md)"),
    "eval": ("Evaluation", "[tasks.md](tasks.md#evaluate)"),
    "ema": ("Average of the weights", "[tasks.md](tasks.md#keep-an-average-of-the-weights-ema)"),
    "early_stopping": ("Early stopping", "[tasks.md](tasks.md#stop-early-and-look-into-steps)"),
    "watch": ("Hangs and restarts", "[reliability.md](reliability.md#5-a-hang-is-found)"),
}
"""Maps a group of fields to its heading and to the pages that explain it."""


def page() -> str:
    """Return the text of the page."""
    return "\n".join([INTRODUCTION, *_tables()]).rstrip() + "\n"


def _tables() -> Iterator[str]:
    for group, fields in itertools.groupby(config.fields().values(), lambda info: info.name.rpartition(".")[0]):
        heading, pages = GROUPS[group]
        yield f"## {heading}\n\nMore: {pages}\n"
        yield "| field | values | default | resume | meaning |\n|---|---|---|---|---|"
        for info in fields:
            kind = config.type_name(info.annotation)
            values = _code(kind if len(kind) <= LONGEST else "NAME")
            default = "" if info.default in (None, "") else _code(str(info.default).lower())
            changes = "yes" if info.may_change else ""
            yield f"| {_code(info.name)} | {values} | {default} | {changes} | {_plain(info.help)} |"
        yield ""


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _plain(text: str) -> str:
    """Return a docstring as one line of a table."""
    escaped = re.sub(r"([|*<])", r"\\\1", " ".join(text.split()))
    return re.sub(r"docs/([a-z-]+\.md)", r"[\1](\1)", escaped)


if __name__ == "__main__":
    PAGE.write_text(page())

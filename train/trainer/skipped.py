"""The list of samples that a run leaves out because they cannot be read, each once, over all ranks and attempts."""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Sequence

from train.data.fetch import Bad
from train.run.record import Record
from train.run.run_folder import Run

log = logging.getLogger("train")

FILE = "skipped.jsonl"
"""In the run folder: a line a sample, {"set": "training", "index": 7, "file": "…", "reason": "…"}."""
_LOGGED = 20
"""Samples that a rank names in its log; the list has all of them."""


class Skipped:
    """Called by the loader with samples that it leaves out. Ranks share one list, under the lock of run.json."""

    def __init__(self, run: Run) -> None:
        self._run, self._logged = run, 0
        self._listed: set[tuple[str, int]] = set()
        self._read_to = 0

    def __call__(self, bad: Sequence[Bad]) -> None:
        """Count and list those that are new."""
        new = [one for one in bad if (one.set, one.index) not in self._listed]
        if not new:
            return
        for one in new:
            self._log(one)
        self._run.note(lambda record: self._add(record, new))  # a disk that is full is tried again later

    def _log(self, bad: Bad) -> None:
        self._logged += 1
        if self._logged <= _LOGGED:
            log.warning("warning: left out: %s: %s", bad, bad.reason)
        elif self._logged == _LOGGED + 1:
            log.warning("warning: more samples are left out; all of them: %s in the run folder", FILE)

    def _add(self, record: Record, new: list[Bad]) -> None:
        with (self._run.folder / FILE).open("a+b") as file:
            file.seek(self._read_to)
            line = b"\n"
            for line in file:  # of other ranks, and of attempts before
                self._read_to += len(line)
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    entry = json.loads(line)
                    self._listed.add((entry["set"], entry["index"]))
            if not line.endswith(b"\n"):  # a kill cut it
                file.write(b"\n")
                self._read_to += 1
            for one in new:
                if (one.set, one.index) not in self._listed:
                    entry = {"set": one.set, "index": one.index, "file": one.file, "reason": one.reason}
                    line = json.dumps(entry).encode() + b"\n"
                    file.write(line)
                    file.flush()
                    self._listed.add((one.set, one.index))
                    self._read_to += len(line)
        counts = Counter(part for part, _ in self._listed)
        record["skipped"] = {part: counts[part] for part in ("training", "evaluation") if counts[part]}

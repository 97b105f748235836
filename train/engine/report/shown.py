"""How far the TensorBoard event files of a run go: a kill takes along what was not written yet, and cuts a record.

Events are written in the order of metrics.jsonl, so the last one of a line tells which lines are there.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train.record.metrics import Place

_LENGTH = struct.Struct("<Q")
_BEFORE, _AROUND = 12, 16
"""Bytes before the data of a record, and beside it: its length and a checksum before, a checksum behind."""
LOSS, EVALUATION = "train/loss", "eval/"
"""The tag that every training line has, and what those of evaluations begin with."""


def last_shown(folder: Path) -> Place:
    """The place of the last line that event files in a folder hold, and no later attempt has hidden; 0 without one.

    Raises:
        OSError, ValueError: a file cannot be read, or understood.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    hidden: list[int] = []
    for path in sorted(folder.glob("events.out.tfevents.*"), reverse=True):  # TensorBoard's order, backwards
        for record in _records_backwards(path):
            try:
                event = Event.FromString(record)
            except DecodeError as error:
                raise ValueError(str(error)) from None
            if event.session_log.status == SessionLog.START:
                hidden.append(event.step)
            place = _place_of(event)
            if place is not None:
                return min([place, *((step - 1, True) for step in hidden)])
    return 0, False


def _place_of(event: Any) -> Place | None:
    tags = [value.tag for value in event.summary.value if value.HasField("simple_value")]
    if LOSS in tags:
        return event.step, False
    return (event.step, True) if any(tag.startswith(EVALUATION) for tag in tags) else None


def _records_backwards(path: Path) -> Iterator[bytes]:
    """What an event file holds, but for a record that was cut. Only lengths are looked at up to there."""
    with path.open("rb") as file:
        size = path.stat().st_size
        if not size:
            return
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as text:
            whole, at = array("Q"), 0
            while at + _LENGTH.size <= size:
                end = at + _LENGTH.unpack_from(text, at)[0] + _AROUND
                if end <= size:
                    whole.append(at)
                at = end
            for at in reversed(whole):
                begin = at + _BEFORE
                yield text[begin : begin + _LENGTH.unpack_from(text, at)[0]]

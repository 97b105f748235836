"""What the bindings of libraries share: a library gives out the steps, and writes and loads its own checkpoints.

It writes them into a checkpoint of the session, which is committed as any other. So a library's checkpoint is whole or
does not exist, and `session.newest()` names the one to load.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import Refused
from ..run import heartbeat
from .state import Position


class Library:
    """A session in the hands of a library. Every rank calls its methods alike."""

    continue_by = ""
    """How a script loads the newest checkpoint, for messages."""

    def __init__(self, session: Any, name: str) -> None:
        """
        Args:
            name: the library's, for messages.
        """
        self.session = session
        self.total_steps: int | None = None
        """Updates of the whole training, if known."""
        self._is_adopted = False
        session._hand_to(name, self.write)

    def write(self, folder: Path) -> None:
        """Write the library's checkpoint into a folder. All ranks call it. An OSError on one of them fails the save."""
        raise NotImplementedError

    def check_loaded(self, updates: int) -> None:
        """Check that the library has loaded the checkpoint with which the session continues."""
        if updates != (at := self.session._at.updates):
            raise Refused(f"the run continues at step {at}, the library at step {updates}; write {self.continue_by}")

    def adopt(self, model: Any, optimizers: list[Any], scaler: Any = None) -> None:
        """Lay out the buckets of this model's DDP, take its digest at the end, and count the optimizers' updates."""
        if not self._is_adopted:
            self._is_adopted = True
            self.session._state.register(model=model)
            self.session._state.follow(optimizers, scaler)

    def batch_done(self, epoch: int, batch: int) -> None:
        """Note that so many batches of this epoch are done."""
        session = self.session
        session._state.border()
        session._at = Position(epoch, batch, session._state.updates)
        session._place.beat(heartbeat.TRAINING, session._state.updates)

    def evaluating(self) -> None:
        """Note that the library evaluates, which may take long."""
        self.session._place.beat(heartbeat.EVALUATING, self.session._state.updates)

    def add_line(self, figures: Mapping[str, Any], of: str = "") -> None:
        """Append a line with these figures to metrics.jsonl.

        Args:
            of: "eval" for figures of an evaluation.
        """
        session = self.session
        if not figures or not session._place.is_first:
            return
        numbers = {name: float(value) for name, value in figures.items()}
        line = {"step": session._state.updates, "epoch": session._at.epoch + 1}
        total = {"total_steps": self.total_steps} if self.total_steps and not of else {}
        session._place.log(line | total | ({of: numbers} if of else numbers))

    def trained(self) -> None:
        """Save at the end of the training. What the script does after it belongs to no checkpoint."""
        self.session._save(is_last=True)
        self.session._is_complete = True

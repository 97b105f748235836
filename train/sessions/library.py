"""What the bindings of libraries share: a library gives out the steps, and writes and loads its own checkpoints.

It writes them into a checkpoint of the session, which is committed as any other. So a library's checkpoint is whole or
does not exist, and `session.newest()` names the one to load.

A binding calls `hand_over` once, then `check_loaded`, `begin_training` and `adopt` where the training begins,
`batch_done` after each batch, `pause_if_due` where the library's checkpoint holds all that was done for that batch, and
`trained` at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ..errors import Refused
from .loader import Loader
from .state import Position


class Session(Protocol):
    """What a session gives to a binding. Every rank calls the methods alike; session.py describes them."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def position(self) -> Position: ...
    @property
    def updates(self) -> int: ...
    @property
    def is_clean(self) -> bool: ...
    @property
    def library_folder(self) -> Path | None: ...

    def loader(self, dataset: Any, batch_size: int, **options: Any) -> Loader: ...
    def owns(self, loader: Any) -> bool: ...
    def hand_over(
        self, library: str, *, write: Callable[[Path], None], before_fetch: Callable[[], None] = ...
    ) -> None: ...
    def adopt(self, model: Any, optimizers: list[Any], scaler: Any = None) -> None: ...
    def begin_training(self) -> None: ...
    def claim_signals(self) -> None: ...
    def before_batch(self, step: int) -> None: ...
    def batch_done(self, epoch: int, batch: int) -> None: ...
    def pause_if_due(self) -> None: ...
    def evaluating(self) -> None: ...
    def add_line(self, figures: Mapping[str, Any], *, of: str = "", total_steps: int | None = None) -> None: ...
    def trained(self) -> None: ...


class Library:
    """A session in the hands of a library. Every rank calls its methods alike."""

    continue_by = ""
    """How a script loads the newest checkpoint, for messages."""

    def __init__(self, session: Session, name: str) -> None:
        """
        Args:
            name: the library's, for messages.
        """
        self.session = session
        self.total_steps: int | None = None
        """Updates of the whole training, if known."""
        self.has_ended = False
        """Whether the training has reached its end, which the library's own checkpoint may not say."""
        self.is_adopted = False
        session.hand_over(name, write=self.write, before_fetch=self.before_fetch)

    def write(self, folder: Path) -> None:
        """Write the library's checkpoint into a folder. All ranks call it. An OSError on one of them fails the save."""
        raise NotImplementedError

    def before_fetch(self) -> None:
        """Do what comes between two batches of a pass, before the second one is fetched."""

    def check_loaded(self, updates: int) -> None:
        """Check that the library has loaded the checkpoint with which the session continues."""
        if updates != (at := self.session.position.updates):
            raise Refused(f"the run continues at step {at}, the library at step {updates}; write {self.continue_by}")

    def adopt(self, model: Any, optimizers: list[Any], scaler: Any = None) -> None:
        """Hand what the library has made to the session, once."""
        if not self.is_adopted:
            self.is_adopted = True
            self.session.adopt(model, optimizers, scaler)

    def add_line(self, figures: Mapping[str, Any], of: str = "") -> None:
        """Append a line with these metrics to metrics.jsonl; see Session."""
        self.session.add_line(figures, of=of, total_steps=self.total_steps)

    def trained(self) -> None:
        """Save at the end of the training, for good."""
        self.has_ended = True
        self.session.trained()

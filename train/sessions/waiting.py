"""Ends the wait for a batch once the run is asked to stop: a data worker may be stuck in a sample.

Python calls signal handlers in the main thread also while it waits there. So a thread watches how long the wait lasts,
and sends this process a signal, whose handler raises `Stuck` in place of the batch. Imports no torch.
"""

from __future__ import annotations

import _thread
import contextlib
import signal
import threading
import time
from collections.abc import Callable

PATIENCE = 10.0
"""Seconds to wait for a batch after a request to stop, where its steps since the last checkpoint would be lost."""
_WHERE_SAVED = 1.0
"""The same, where this process can save in place of the batch. Most batches come sooner."""
_LOOK_EVERY = 0.1
_AGAIN = 1.0
"""Seconds between two looks before a request, and until the next try: code of the user may catch what is raised."""


class Stuck(BaseException):
    """The run is asked to stop, and a batch does not come. No code of a data set catches this as an error."""


class Wait:
    """The wait of the main thread for a batch."""

    def __init__(self) -> None:
        self.since = 0.0
        """When it began, by time.monotonic(); 0: no batch is waited for."""
        self.can_save: Callable[[], bool] = lambda: False
        """Whether this process can save in place of the batch."""
        self._asked_at = 0.0
        self._hears: Callable[[], bool] = lambda: False
        self._tell: Callable[[], None] = lambda: None
        self._is_watched = self._is_over = False
        """Whether the signal that ends the wait is on its way."""

    def stop_soon(self) -> None:
        """Let no batch be waited for much longer. Any thread calls this, and a signal handler."""
        if not self._asked_at:
            self._asked_at = time.monotonic()
            self._begin()

    def listen(self, hears: Callable[[], bool], tell: Callable[[], None]) -> None:
        """Let this rank tell the others of a request, and hear of theirs: not every rank gets each signal."""
        self._hears, self._tell = hears, tell
        self._begin()

    def _begin(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            _thread.start_new_thread(self._watch, ())  # threading has locks, which a handler could wait for forever

    def is_ended_by(self, number: int) -> bool:
        """Whether a signal was only sent to end the wait, as its handler asks in the main thread.

        Raises:
            Stuck: the main thread still waits.
        """
        if number != signal.SIGTERM or not self._is_over:
            return False
        self._is_over = False
        if self.since:
            raise Stuck
        return True

    def _watch(self) -> None:
        main, has_told = threading.main_thread(), False
        while main.is_alive():
            time.sleep(_LOOK_EVERY if self._asked_at else _AGAIN)
            since, now = self.since, time.monotonic()
            if not self._asked_at and since and now - since > PATIENCE and self._hears():
                self._asked_at = since
            if not self._asked_at:
                continue
            if not has_told:
                with contextlib.suppress(RuntimeError):  # of a store that is gone
                    self._tell()
                has_told = True
            if since and now - max(since, self._asked_at) > (_WHERE_SAVED if self.can_save() else PATIENCE):
                self._is_over = True
                signal.pthread_kill(main.ident or 0, signal.SIGTERM)
                time.sleep(_AGAIN)

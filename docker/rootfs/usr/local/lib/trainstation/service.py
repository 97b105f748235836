"""Run `train COMMAND` as a service, as user dev. If it fails, for example by an error in train/, try again.

The reason is printed once and written to /run/dev/COMMAND.failed for the health check. After a fix nothing has to be
done: a new process replaces this one every few seconds until the command runs.
"""

import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

TRY_EVERY = 5.0
"""Seconds between two tries."""
REASON = "TRAIN_SERVICE_REASON"
"""Environment variable that tells the next process why the last one failed."""


class Lines:
    """Standard error without one line that was already printed. Remembers the last line."""

    def __init__(self, stream, without):
        self.stream, self.without = stream, without
        self.last = self.begun = ""

    def write(self, text):
        *lines, self.begun = (self.begun + text).split("\n")
        for line in lines:
            self.last = line.strip() or self.last
            if not line.strip() or line.strip() != self.without:
                self.stream.write(f"{line}\n")
        return len(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def carry_out(command, arguments):
    """Run the command and return why it failed."""
    lines = sys.stderr
    try:
        from train.cli import main

        main([command, *arguments])
    except SystemExit as end:
        if not end.code:
            raise
        return lines.last or f"exit code {end.code}"
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if reason != lines.without:
            traceback.print_exc(file=lines.stream)
        return reason
    return "it returned"


def serve(command, *arguments):
    """Run the command, and replace this process by a new one if it fails."""
    before = os.environ.pop(REASON, "")
    sys.stderr = Lines(sys.stderr, before)
    failed = Path(f"/run/dev/{command}.failed")
    if not before:
        failed.unlink(missing_ok=True)
    reason = carry_out(command, arguments)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(OSError):  # no space; the log has the reason
        failed.write_text(reason)
    if reason != before:
        print(f"trainstation: the {command} does not run: {reason}; trying again every few seconds", file=sys.stderr)
    time.sleep(TRY_EVERY)
    os.environ[REASON] = reason
    os.execv(sys.executable, sys.orig_argv)


if __name__ == "__main__":  # a child process may import this file again
    serve(*sys.argv[1:])

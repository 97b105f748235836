"""A trace of some steps by torch's profiler, for https://ui.perfetto.dev and chrome://tracing (`trace`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ..errors import Refused, one_line, whole
from ..run.run_folder import Run

_MOST = 100
"""Maximum number of steps of a trace: its events stay in memory until its end, thousands per step."""


def steps_of(text: str, done: int = 0, total: int | None = None) -> range:
    """Return the steps that the field trace names, counted from 1.

    Args:
        done: a resume continues after this step.
        total: the last step of the run, if it is known.

    Raises:
        Refused: this is not a range of steps, has too many steps, or steps that will not be made.
    """
    if not text:
        return range(0)
    found = re.fullmatch(r"(\d+):(\d+)", text, re.ASCII)
    first, last = (whole(found[1]), whole(found[2])) if found else (0, 0)
    if not 1 <= first <= last:
        raise Refused(f"--trace {text}: give the first and the last step, counted from 1, such as 20:25")
    if last - first >= _MOST:
        raise Refused(f"--trace {text}: a trace is held in memory; give at most {_MOST} steps")
    if last <= done or (total is not None and last > total):
        raise Refused(f"--trace {text}: the run makes steps {done + 1} to {total}; give some of them")
    return range(first, last + 1)


class Trace:
    """Traces the steps of an attempt that are in a range, which may be empty."""

    def __init__(self, run: Run, steps: range, has_gpu: bool, say: Callable[[str], None]) -> None:
        self._run, self._steps, self._has_gpu, self._say = run, steps, has_gpu, say
        self._profile: Any = None

    def before(self, step: int) -> None:
        """Call before a step, counted from 1."""
        if self._profile is not None or step not in self._steps:
            return
        from torch.profiler import ProfilerActivity, profile

        self._first = step
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + self._has_gpu])
        self._profile.start()

    def after(self, step: int, is_last: bool = False) -> None:
        """Call after a step; `is_last`: no step of this attempt follows."""
        if self._profile is None or not (is_last or step >= self._steps[-1]):
            return
        profile, self._profile = self._profile, None
        target = self._run.folder / "trace" / f"steps-{self._first}-{step}.json"
        partial = target.with_name(f".{target.name}")
        try:
            profile.stop()  # waits for a GPU
            target.parent.mkdir(exist_ok=True)
            profile.export_chrome_trace(str(partial))
            partial.replace(target)  # a kill leaves no half of it
        except (OSError, RuntimeError) as error:
            self._say(f"warning: the trace could not be written: {one_line(error)}")
        else:
            self._say(f"trace written: {target.parent.name}/{target.name}; open it in https://ui.perfetto.dev")

"""Explains a NameError after a resume: the script uses a variable that only batches before the resume have set."""

from __future__ import annotations

import dis
import re
from types import TracebackType

_NAME = re.compile(r"'(\w+)'")


def explain(error: BaseException, resumed_at: str) -> str:
    """Return what the error means and what to write; '' if it is another one.

    Args:
        resumed_at: where the script has resumed.
    """
    found = _NAME.search(str(error)) if isinstance(error, NameError) else None
    if found is None or not _is_set(found[1], error.__traceback__):  # a slip of the pen has nothing to do with a resume
        return ""
    return (
        f"`{found[1]}` has no value yet: the script resumed at {resumed_at}; give it a value before the loop, or keep "
        "it in session.values"
    )


def _is_set(name: str, trace: TracebackType | None) -> bool:
    """Whether a function on the way to the error sets this variable somewhere."""
    while trace is not None:
        code = dis.get_instructions(trace.tb_frame.f_code)
        if any(one.argval == name and one.opname.startswith("STORE_") for one in code):
            return True
        trace = trace.tb_next
    return False

"""Execute the copy of a script as if it lay where the original lies.

    python -P …/train/launcher/saved_script.py COPY ORIGINAL [ARGS…]

Nothing of this package is imported here: a script may have modules of its own by such names.

`__file__`, the folder for imports, tracebacks and sys.argv[0] are the original's, so that it finds what lies beside it;
the code is the copy's, also in processes that it starts by multiprocessing.
"""

from __future__ import annotations

import builtins
import linecache
import os
import sys
import types
from multiprocessing import spawn
from pathlib import Path
from typing import Any


def main() -> None:
    copy, original, *arguments = sys.argv[1:]
    source = Path(copy).read_bytes()
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=original, __builtins__=builtins)
    sys.modules["__main__"] = module
    sys.argv = [original, *arguments]
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, str(Path(original).resolve().parent))
    _show_source(original, source)
    _start_others_alike(copy)
    exec(compile(source, original, "exec", dont_inherit=True), module.__dict__)


def _show_source(name: str, source: bytes) -> None:
    """Tracebacks, and libraries that read source, see this text; without a time it is never read anew."""
    lines = [line + "\n" for line in source.decode(errors="replace").splitlines()]
    linecache.cache[name] = (len(source), None, lines, name)


def _start_others_alike(copy: str) -> None:
    """Processes that are not forked import the main file anew (multiprocessing.spawn): that is the copy."""
    prepare = spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        data = prepare(name)
        if "init_main_from_path" in data:
            data["init_main_from_path"] = copy
        return data

    spawn.get_preparation_data = prepared


if __name__ == "__main__":
    main()

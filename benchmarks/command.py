"""The command line of a benchmark."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run(bench: Callable[..., str], **defaults: Any) -> None:
    """Print the table of a benchmark, measured in a folder that is removed afterwards.

    Args:
        bench: takes the folder and the options.
        defaults: the options, each of the type of its default.
    """
    description = sys.modules[bench.__module__].__doc__ or ""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--folder", type=Path, default=tempfile.gettempdir(), help="on the disk to measure (%(default)s)"
    )
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, metavar="N", help=f"default: {default}")
    options = vars(parser.parse_args())
    for kind in (signal.SIGTERM, signal.SIGHUP):  # these end it as Ctrl-C does, so that nothing is left behind
        signal.signal(kind, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.pop("folder")) as folder:
        print(bench(Path(folder), **options))

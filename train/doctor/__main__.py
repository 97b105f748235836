"""`python3 -m train.doctor`: the checks with nothing but the standard library, for a host before `make up`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from train import screen
from train.doctor import finding
from train.doctor.examine import chosen, examine, names
from train.doctor.machine import Machine
from train.supervise import address

_EXIT_REFUSED = 2


def main() -> int:
    """Check this machine, print what was found. Returns the exit code."""
    parser = argparse.ArgumentParser("train.doctor", description="Check this machine; 1 if there is a problem.")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--only", metavar="CHECK", help="these alone, by their names with commas")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="check the way to where ranks are to meet, too")
    parser.add_argument("--runs", default=os.environ.get("TRAIN_RUNS") or "runs", help="where runs are kept")
    options = parser.parse_args()
    if sys.stdout is None:  # closed by the caller
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        place = address.parse(options.rendezvous) if options.rendezvous is not None else None
        only = names(options.only) if options.only is not None else []
        chosen([], only)
    except ValueError as error:
        screen.say(f"train: {error}")
        return _EXIT_REFUSED
    screen.tolerate_any_locale()
    try:
        findings = examine(Machine(), Path(options.runs), place)
        findings = chosen(findings, only) if only else findings
        finding.show(findings, options.json)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except OSError as error:  # a working folder that is gone, an output that is full
        screen.say(f"train: {error.strerror}{': ' + str(error.filename) if error.filename else ''}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _EXIT_REFUSED
    return finding.exit_code(findings)


if __name__ == "__main__":
    sys.exit(main())

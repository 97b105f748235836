"""`python3 -m train.doctor`: the checks with nothing but the standard library, for a host before `make up`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from train.doctor import finding, network
from train.doctor.examine import chosen, examine, names
from train.doctor.machine import Machine

_EXIT_REFUSED = 2


def main() -> int:
    """Check this machine, print what was found. Returns the exit code."""
    parser = argparse.ArgumentParser("train.doctor", description="Check this machine; 1 if there is a problem.")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--only", metavar="CHECK", help="these alone, by their names with commas")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="check the way to where ranks are to meet, too")
    parser.add_argument("--runs", default=os.environ.get("TRAIN_RUNS") or "runs", help="where runs are kept")
    options = parser.parse_args()
    try:
        place = network.parse(options.rendezvous) if options.rendezvous is not None else None
        only = names(options.only) if options.only is not None else []
        chosen([], only)
    except ValueError as error:
        print(f"train: {error}", file=sys.stderr)
        return _EXIT_REFUSED
    findings = examine(Machine(), Path(options.runs), place)
    findings = chosen(findings, only) if only else findings
    finding.show(findings, options.json)
    return finding.exit_code(findings)


if __name__ == "__main__":
    sys.exit(main())

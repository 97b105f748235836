# PYTHON_ARGCOMPLETE_OK: a shell with argcomplete's global completion looks for this.
"""The command line: finds the command, says in a line what is wrong, exits."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
from typing import NoReturn

import train
from train import caches, hash_seed, screen
from train.commands import COMMANDS
from train.errors import EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_REFUSED, Refused, nearest, of_encoding, of_system
from train.parallel.rank_env import is_under_torchrun

_COMPUTING = ("eval", "export")
"""Commands that execute the code of a task in this process; so does `run`, where torchrun has started it."""
_IN_THIS_PROCESS = (*_COMPUTING, "bench", "plot", "report")
"""Commands that import libraries with caches into this process."""
_DETACHED = ("launch", "resume")
"""Commands that start a run in tmux, by an agent (train/launcher/agent.py)."""
_STARTING = (*_COMPUTING, *_DETACHED, "run", "submit")
"""Commands of which processes begin in the current folder; libraries of torch's end those that have none."""
_LOOKING = ("ls", "show", "top", "exporter", "logs", "attach", "report", "plot", "doctor")
"""Commands that neither execute nor change anything of a run."""
_GONE = "the current folder is gone; go to one that is there: cd"


def main(argv: list[str] | None = None) -> NoReturn:
    """Run one command and exit as it says."""
    if "_ARGCOMPLETE" in os.environ:  # no command: a shell asks what could be typed next
        from train.commands import completion

        completion.answer()
    arguments = sys.argv[1:] if argv is None else argv
    screen.open_what_is_closed()
    screen.tolerate_any_locale()
    try:
        code = _main(arguments)
        sys.stdout.flush()
    except Refused as error:
        code = _refusal(str(error))
    except BrokenPipeError:  # the reader of our output has seen enough
        code = EXIT_FINISHED
    except OSError as error:  # what no command foresees: somebody else's run, a full or read-only disk
        code = _refusal(_GONE if error.errno == errno.ENOENT and _is_gone() else of_system(error))
    except UnicodeEncodeError as error:  # a name with letters that the locale has no bytes for
        code = _refusal(of_encoding(error))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _refusal("interrupted")
        code = EXIT_INTERRUPTED
    finally:
        screen.drop_what_cannot_be_written()
    sys.exit(code)


def _refusal(line: str) -> int:
    """Say why the command ends here, where standard error can be written at all. Return its exit code."""
    with contextlib.suppress(OSError):
        screen.remark(line)
    return EXIT_REFUSED


def _main(arguments: list[str]) -> int:
    given = arguments
    runs_first: list[str] = []
    while arguments and arguments[0].startswith("--runs"):  # before the command too
        taken = 1 if "=" in arguments[0] else 2
        runs_first, arguments = runs_first + arguments[:taken], arguments[taken:]
    if not arguments:
        raise Refused("which command? train --help lists them")
    command, rest = arguments[0], arguments[1:]
    if command in ("-h", "--help", "help"):
        print(overview())
        return EXIT_FINISHED
    if command == "--version":
        print(train.__version__)
        return EXIT_FINISHED
    if command not in COMMANDS:
        raise Refused(f"there is no command {command}{nearest(command, COMMANDS, '; train --help lists them')}")
    if {"-h", "--help"} & set(rest[: rest.index("--")] if "--" in rest else rest):
        from train.commands.parser import parser_of

        parser_of(command).print_help()
        return EXIT_FINISHED
    if command not in _DETACHED or "--script" in rest:
        return _carry_out(command, runs_first + rest, given)
    from train.supervise.zygote import starting_early

    with starting_early():  # what it is to do is read meanwhile
        return _carry_out(command, runs_first + rest, given)


def _carry_out(command: str, arguments: list[str], given: list[str]) -> int:
    from train.commands.parser import parse, parser_of, runs_folder

    options = parse(parser_of(command), arguments)
    if command in _STARTING and _is_gone():
        raise Refused(_GONE)
    if command in _COMPUTING or (command == "run" and is_under_torchrun()):
        hash_seed.restart_with_seed(given)
    if command in _IN_THIS_PROCESS:
        caches.provide()
    runs = runs_folder(options.runs)
    if command not in _LOOKING:
        from train.run import owner

        owner.check_runs(runs)
    module = importlib.import_module(f"train.commands.{command}")
    return int(module.run(options, runs))


def _is_gone() -> bool:
    """Whether the current folder was removed, or made anew, while a shell was in it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def overview() -> str:
    """The text of `train --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: train COMMAND … [--runs DIR]",
            "",
            "Exact, unkillable, observable training runs.",
            "",
            *lines,
            "",
            "train COMMAND --help says more. A first run: train launch digits --follow",
            "exit codes: 0 finished, 2 the request is wrong, 3 training failed, 75 stopped with a checkpoint",
        ]
    )


if __name__ == "__main__":
    main()

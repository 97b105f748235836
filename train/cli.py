# PYTHON_ARGCOMPLETE_OK: the global completion of argcomplete looks for this mark.
"""The command line: find the command, run it, report a wrong request in one line, exit."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
from argparse import Namespace
from typing import Any, NoReturn

from . import __version__, caches, hash_seed, screen
from .commands import COMMANDS, GROUPS
from .errors import EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_REFUSED, Refused, nearest, of_encoding, of_system
from .parallel.rank_env import is_under_torchrun

_COMPUTING = ("eval", "export")
"""Commands that execute the code of a task in this process. `run` does so too under torchrun."""
_IN_THIS_PROCESS = (*_COMPUTING, "bench", "plot", "report")
"""Commands that import libraries with caches into this process."""
_DETACHED = ("launch", "resume")
"""Commands that start an agent in tmux (train/launcher/agent.py)."""
_OF_SCRIPTS = ("--script", "--module")
"""Options of programs whose ranks import torch themselves."""
_STARTING = (*_COMPUTING, *_DETACHED, "prove", "run", "submit", "sweep")
"""Commands that start processes in the current folder. Libraries of torch crash if that folder is gone."""
_LOOKING = (
    "ls", "show", "top", "gpus", "queue", "exporter", "logs", "attach", "report", "plot", "doctor", "wait", "web",
)  # fmt: skip
"""Commands that neither execute nor change anything of a run."""
_EXAMPLES = {
    "train launch digits --name demo1 --follow": "Start a first run on data that comes with the package, and watch it.",
    "train ls": "List all runs, their state and results.",
    "train show demo1": "Tell one run's story, and what to type next.",
}
_GONE = "the current folder was removed; go to another one: cd"


def main(argv: list[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    if "_ARGCOMPLETE" in os.environ:  # no command: the shell asks for completions
        from .commands import completion

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
    except (OSError, UnicodeEncodeError) as error:
        code = _refusal(problem(error))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _refusal("interrupted")
        code = EXIT_INTERRUPTED
    finally:
        screen.drop_what_cannot_be_written()
    sys.exit(code)


def problem(error: OSError | UnicodeEncodeError) -> str:
    """Return what is wrong and what to do, for an error that no command expects."""
    if isinstance(error, UnicodeEncodeError):  # a name with letters that the locale cannot encode
        return of_encoding(error)
    # a run of another user, a full or read-only disk
    return _GONE if error.errno == errno.ENOENT and _is_gone() else of_system(error)


def _refusal(line: str) -> int:
    """Print why the command ends, if standard error can be written. Return its exit code."""
    with contextlib.suppress(OSError):
        screen.remark(line)
    return EXIT_REFUSED


def _main(arguments: list[str]) -> int:
    given = arguments
    runs_first: list[str] = []
    while arguments and arguments[0].startswith("--runs"):  # --runs may stand before the command
        taken = 1 if "=" in arguments[0] else 2
        runs_first, arguments = runs_first + arguments[:taken], arguments[taken:]
    if not arguments:
        raise Refused("no command given; see: train --help")
    command, rest = arguments[0], arguments[1:]
    if command in ("-h", "--help", "help"):
        print(overview())
        return EXIT_FINISHED
    if command == "--version":
        print(__version__)
        return EXIT_FINISHED
    if command not in COMMANDS:
        raise Refused(f"unknown command {command}{nearest(command, COMMANDS, otherwise='; see: train --help')}")
    if {"-h", "--help"} & set(rest[: rest.index("--")] if "--" in rest else rest):
        from .commands.parser import parser_of

        parser_of(command).print_help()
        return EXIT_FINISHED
    if command not in _DETACHED or any(word.startswith(_OF_SCRIPTS) for word in rest):
        return _carry_out(command, runs_first + rest, given)
    from .zygote.client import starting_early

    with starting_early():  # the command reads its request in the meantime
        return _carry_out(command, runs_first + rest, given)


def _carry_out(command: str, arguments: list[str], given: list[str]) -> int:
    from .commands.parser import parse, parser_of

    options = parse(parser_of(command), arguments)
    if command in _COMPUTING or (command == "run" and is_under_torchrun()):
        hash_seed.restart_with_seed(given)
    return int(carry_out(command, options))


def carry_out(command: str, options: Namespace, function: str = "run") -> Any:
    """Check what every command needs, and call a function of its module with the options and the folder of runs.

    Raises:
        Refused: the folder of runs is not usable, or the function refuses the request.
    """
    from .commands.parser import runs_folder

    if command in _STARTING and _is_gone():
        raise Refused(_GONE)
    if command in _IN_THIS_PROCESS:
        caches.provide()
    runs = runs_folder(options.runs)
    if command not in _LOOKING:
        from .run import owner

        owner.check_runs(runs)
    module = importlib.import_module(f".commands.{command}", __package__)
    from .run.folders import NoRun

    try:
        return getattr(module, function)(options, runs)
    except NoRun as error:
        from .launcher import tmux

        raise tmux.being_checked(error.name) if error.name in tmux.checking(error.runs) else error from None


def _is_gone() -> bool:
    """Whether the current folder was removed, or replaced by a new one, while a shell was in it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def overview() -> str:
    """Return the text of `train --help`."""
    from .commands.parser import example_text

    width = max(map(len, COMMANDS))
    lines = ["usage: train COMMAND [--runs DIR] ...", "", "Exact, unkillable, observable training runs.", ""]
    lines += [example_text(_EXAMPLES), ""]
    for title, commands in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:<{width}}  {text}" for name, text in commands.items()), ""]
    return "\n".join(
        [
            *lines,
            "train COMMAND --help shows the examples and flags of a command.",
            "--runs DIR is the folder of the runs (default: $TRAIN_RUNS, else ./runs).",
            "exit codes: 0 finished, 2 the request is wrong, 3 training failed,",
            "            75 stopped with a checkpoint, 130 ended at once by Ctrl-C",
        ]
    )


if __name__ == "__main__":
    main()

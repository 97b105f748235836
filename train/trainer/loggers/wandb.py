"""Weights & Biases: a separate process follows metrics.jsonl and sends its lines.

It lives until the rank closes the pipe to its standard input, and a little longer to send the rest. The rank neither
imports wandb nor waits for it: a network that is slow or gone costs curves there, never a step here. Imports no torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import select
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ... import helper, screen
from ...errors import Refused, one_line
from ...run import durable, metrics, wandb_run
from ...run.run_folder import Run
from ...run.spec import read_spec

FILE = "wandb.json"
"""Name of the file in the run folder with the id at W&B and the last steps that were sent."""
_EVERY = 2.0
"""Seconds between two looks at metrics.jsonl."""
_LEAVE = 120.0
"""Maximum seconds to send the rest at the end. What is not sent stays in the run folder, for `wandb sync`."""
_FORBIDDEN = re.compile(r"[\\#?%:\s\x00-\x1f]")


def check(project: str) -> None:
    """Check that curves can be sent to this project.

    Raises:
        Refused: the package is not installed, or the project's name cannot be one.
    """
    if not project:
        return
    if _FORBIDDEN.search(project) or project.count("/") > 1 or len(project) > 128 or not all(project.split("/")):
        raise Refused(f"--log.wandb {project}: must be the name of a project, or ENTITY/PROJECT, without \\ # ? % :")
    if project.lower() in ("true", "false", "none"):
        raise Refused(f"--log.wandb {project}: give the name of a project; --log.wandb '' sends nothing")
    if importlib.util.find_spec("wandb") is None:
        raise Refused("--log.wandb needs the package wandb: pip install 'trainstation[wandb]', or leave it out")


class WandbProcess:
    """The process that sends a run's lines, as the rank starts and leaves it."""

    def __init__(self, run: Run, project: str, log: Path) -> None:
        """`log` takes the output of wandb. Raises OSError where no process can be started."""
        # in the rank's folder, where wandb may have settings
        self.process = helper.start("train.trainer.loggers.wandb", str(run.path), project, log=log, folder=None)

    def close(self) -> None:
        """Let it send the rest and end, without waiting for it."""
        helper.leave(self.process)


class _Sent:
    """The last steps that were sent. A resume continues there; into another run of W&B all lines are sent."""

    def __init__(self, run: Run, there: str) -> None:
        self._path = run.folder / FILE
        self.id, self.training, self.evaluation = there, 0, -1
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(self._path.read_text(encoding="utf-8"))
            if found["id"] == there:
                self.training, self.evaluation = int(found["training"]), int(found["evaluation"])
        self.write()

    def write(self) -> None:
        text = json.dumps({"id": self.id, "training": self.training, "evaluation": self.evaluation}) + "\n"
        with contextlib.suppress(OSError):
            durable.write_atomically(self._path, text, durable=False)

    def new(self, lines: Iterable[metrics.Line]) -> list[tuple[int, dict[str, Any]]]:
        """Return the lines among these that have not been sent: the step, and figures by name."""
        found: list[tuple[int, dict[str, Any]]] = []
        for line in lines:
            if metrics.is_evaluation(line):
                if line["step"] > self.evaluation:
                    self.evaluation = line["step"]
                    found.append((line["step"], {f"eval/{name}": value for name, value in line["eval"].items()}))
            elif line["step"] > self.training:
                self.training = line["step"]
                figures = {f"train/{name}": value for name, value in line.items() if name not in ("step",)}
                found.append((line["step"], figures))
        return found


def main() -> None:
    """Send the lines of a run until it ends."""
    run, project = Run(Path(sys.argv[1])).held(), sys.argv[2]
    with contextlib.suppress(OSError):
        os.nice(10)  # training comes first
    try:
        _send(run, project)
    except Exception as error:
        problem = one_line(error)[:300]
        print(screen.printable(f"wandb: {problem}"), flush=True)
        run.note(lambda record: record.setdefault("wandb", {}).update(project=project, problem=problem))


def _send(run: Run, project: str) -> None:
    import wandb

    spec = read_spec(run)
    there, resume = wandb_run.of_feed(os.environ, spec.wandb_id)
    sent = _Sent(run, there)
    entity, _, name = project.rpartition("/")
    options = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True)
    feed = wandb.init(
        project=name, entity=entity or None, id=sent.id, name=run.name, resume=resume, dir=str(run.path),
        config=spec.used_config, settings=options,
    )  # fmt: skip
    run.note(wandb={"project": project, "id": sent.id, "url": "" if feed.offline else feed.url})
    feed.define_metric("*", step_metric="step")
    tail, lines = metrics.Tail(run), metrics.each(run)
    while True:
        # by a step of our own: wandb drops what comes for one of its own steps a second time
        for step, figures in sorted(sent.new(lines), key=lambda one: one[0]):
            feed.log({"step": step, **figures})
        sent.write()
        if select.select([sys.stdin], [], [], _EVERY)[0] and not os.read(0, 1):
            break
        lines = iter(tail.new())
    for step, figures in sent.new(tail.new()):
        feed.log({"step": step, **figures})
    sent.write()
    leaving = threading.Timer(_LEAVE, os._exit, [0])
    leaving.daemon = True
    leaving.start()
    feed.finish()
    leaving.cancel()


if __name__ == "__main__":
    main()

"""Slurm: a run as a batch job, one task on each node."""

from __future__ import annotations

from typing import Any

from train.cluster.submission import Submission
from train.errors import Refused


def options(parser: Any) -> None:
    """What sbatch alone knows."""
    add = parser.add_argument
    add("--partition", metavar="P", help="Slurm: the partition")
    add("--account", metavar="A", help="Slurm: the account that pays")


def check(submission: Submission) -> None:
    """Whether it can be handed to Slurm from here."""
    raise Refused("--on slurm is not there yet")


def render(submission: Submission) -> str:
    """The batch script."""
    raise NotImplementedError


def submit(submission: Submission) -> str:
    """Hand it to sbatch."""
    raise NotImplementedError

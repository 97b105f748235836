"""Kubernetes: a run as a TrainJob of Kubeflow Trainer."""

from __future__ import annotations

from typing import Any

from train.cluster.submission import Submission
from train.errors import Refused


def options(parser: Any) -> None:
    """What Kubernetes alone knows."""


def check(submission: Submission) -> None:
    """Whether it can be handed to a cluster from here."""
    raise Refused("--on kubernetes is not there yet")


def render(submission: Submission) -> str:
    """The manifests."""
    raise NotImplementedError


def submit(submission: Submission) -> str:
    """Hand it to the cluster."""
    raise NotImplementedError

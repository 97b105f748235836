"""A run together with what it runs, as functions that read a run take both."""

from train.run.run_folder import Run
from train.run.spec import Spec, read_spec


def with_spec(run: Run) -> tuple[Run, Spec]:
    return run, read_spec(run)

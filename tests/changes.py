"""What a resume writes into a run folder, for tests that start its ranks themselves."""

from __future__ import annotations

from typing import cast

from train import config as configuration
from train.config import Config
from train.run import ownership
from train.run.durable import write_atomically
from train.run.record import Record
from train.run.run_folder import Run


def apply(run: Run, config: Config) -> None:
    """Write the changes of a resume into the run folder."""
    write_atomically(run.folder / "config.toml", configuration.to_toml(config))
    run.update(lambda record: record.update(cast(Record, ownership.sign(run.folder, record))))

"""Lightning's Trainer in a session: `Trainer(callbacks=[session.lightning()])`.

Lightning saves and loads weights, optimizers, schedules and the state of its loops. Tried with Lightning 2.6.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from typing import Any

from ..errors import Refused
from .library import Library, Session

log = logging.getLogger("train")

FILE = "lightning.ckpt"
"""Lightning's file in a checkpoint."""
_UPDATES, _STOPS = "trainstation_updates", "trainstation_stops"
"""Keys in that file: the updates so far, and how long a Trainer trains that stops or has ended; '' if it goes on."""


def callback(session: Session) -> Any:
    """Return the callback of a session, for the package that the script has imported: `lightning` or
    `pytorch_lightning`."""
    is_alone = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    package = importlib.import_module("pytorch_lightning" if is_alone else "lightning.pytorch")
    return type("SessionCallback", (_Hooks, package.Callback), {})(session)


class _Hooks(Library):
    """The hooks of a Lightning callback.

    A border is where Lightning asks for the next batch: by then all callbacks and the module have done their work for
    the last one. But not where a validation or the end of an epoch stands in between: Lightning leaves that work out
    when it resumes from there.
    """

    continue_by = "trainer.fit(…, ckpt_path=session.newest())"

    def __init__(self, session: Session) -> None:
        super().__init__(session, "Lightning's Trainer")
        self._trainer: Any = None
        self._loaded = 0
        """Updates in the file that Lightning has loaded."""
        self._is_border = False
        """Whether a batch was trained, and no validation since."""

    def write(self, folder: Path) -> None:
        trainer = self._trainer
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        checkpoint[_UPDATES] = self.session.updates
        checkpoint[_STOPS] = _length(trainer) if self.has_ended or trainer.should_stop else ""
        # trainer.save_checkpoint() ends with a barrier, at which the others would wait for a rank that fails here
        trainer.strategy.save_checkpoint(checkpoint, folder / FILE)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._trainer = trainer

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._loaded = checkpoint.get(_UPDATES, 0)
        if checkpoint.get(_STOPS) == _length(trainer):  # Lightning does not save that it stops early
            trainer.should_stop = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        session = self.session
        if not session.owns(trainer.train_dataloader):
            raise Refused("the Trainer has another loader; write trainer.fit(model, session.loader(…), …)")
        self.check_loaded(self._loaded)
        _check(trainer)
        # Lightning's own handler of SIGTERM broadcasts wherever the rank is, and raises in the next batch
        session.claim_signals()
        session.begin_training()
        self.total_steps = steps if 0 < (steps := trainer.estimated_stepping_batches) < float("inf") else None
        self.adopt(trainer.strategy.model, trainer.optimizers, getattr(trainer.precision_plugin, "scaler", None))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.train_dataloader.set_epoch(trainer.current_epoch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.session.batch_done(trainer.current_epoch, batch_idx + 1)
        if self.session.is_clean and trainer.global_step % trainer.log_every_n_steps == 0:
            self._log_step(trainer, outputs)
        self._is_border = True

    def before_fetch(self) -> None:
        if self._is_border:
            self.session.pause_if_due()

    def _log_step(self, trainer: Any, outputs: Any) -> None:
        """Log the loss, the learning rate, and what the module logs at each step."""
        figures = dict(trainer._logger_connector.metrics["log"])
        if isinstance(outputs, dict) and "loss" in outputs:
            figures["loss"] = outputs["loss"] * trainer.accumulate_grad_batches
        if trainer.optimizers:
            figures["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
        self.add_line(figures)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._is_border = False
        self.session.evaluating()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.add_line(trainer._logger_connector.metrics["log"], of="eval")

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if not self.is_adopted:
            if self.session.rank == 0:
                log.warning("nothing is left to train after step %d: %s", self._loaded, _length(trainer))
            self.adopt(pl_module, [])
        self.trained()  # not in on_train_end, where callbacks and the module still change weights


def _length(trainer: Any) -> str:
    """Return how long a Trainer trains."""
    return f"max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps}"


def _check(trainer: Any) -> None:
    """Raise Refused for what a session cannot make exact, or what leaves no moment for a checkpoint."""
    if trainer.reload_dataloaders_every_n_epochs:
        raise Refused("a session has one loader; leave out Trainer(reload_dataloaders_every_n_epochs=…)")
    if type(trainer.fit_loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher":
        raise Refused("a training_step(dataloader_iter) fetches batches itself; write training_step(batch, batch_idx)")
    batches, each, between = trainer.num_training_batches, trainer.accumulate_grad_batches, trainer.val_check_batch
    updates = range(each, batches, each)  # the last batch of an epoch is no border
    if not updates:
        raise Refused(f"an epoch of {batches} batches has one update, so no moment for a checkpoint; make it longer")
    is_counted = trainer.enable_validation and between not in (None, float("inf"))
    if is_counted and not any(number % between for number in updates):
        raise Refused("a validation after every update leaves no moment for a checkpoint; validate less often")

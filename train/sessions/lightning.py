"""Lightning's Trainer in a session: `Trainer(callbacks=[session.lightning()])`.

Lightning saves and loads weights, optimizers, schedules and the state of its loops. Tried with Lightning 2.6.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from ..errors import Refused
from .library import Library

FILE = "lightning.ckpt"
"""Lightning's file in a checkpoint."""
_UPDATES = "trainstation_updates"
"""Key in that file: the updates so far."""


def callback(session: Any) -> Any:
    """Return the callback of a session, for the package that the script has imported: `lightning` or
    `pytorch_lightning`."""
    is_alone = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    package = importlib.import_module("pytorch_lightning" if is_alone else "lightning.pytorch")
    return type("SessionCallback", (_Hooks, package.Callback), {})(session)


class _Hooks(Library):
    """The hooks of a Lightning callback.

    A border is the end of a batch, but not of one that a validation or the end of its epoch follows: Lightning leaves
    that work out when it resumes from there.
    """

    continue_by = "trainer.fit(…, ckpt_path=session.newest())"

    def __init__(self, session: Any) -> None:
        super().__init__(session, "Lightning's Trainer")
        self._trainer: Any = None
        self._loaded = 0
        """Updates in the file that Lightning has loaded."""

    def write(self, folder: Path) -> None:
        trainer = self._trainer
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        checkpoint[_UPDATES] = self.session._state.updates
        # trainer.save_checkpoint() ends with a barrier, at which the others would wait for a rank that fails here
        trainer.strategy.save_checkpoint(checkpoint, folder / FILE)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._trainer = trainer

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._loaded = checkpoint.get(_UPDATES, 0)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        session = self.session
        if session._loader is None or trainer.train_dataloader is not session._loader:
            raise Refused("the Trainer has another loader; write trainer.fit(model, session.loader(…), …)")
        self.check_loaded(self._loaded)
        if trainer.reload_dataloaders_every_n_epochs:
            raise Refused("a session has one loader; leave out Trainer(reload_dataloaders_every_n_epochs=…)")
        if trainer.num_training_batches < 2 or trainer.val_check_batch == 1:
            raise Refused("a validation after every batch leaves no moment for a checkpoint; validate less often")
        # Lightning's own handler of SIGTERM broadcasts wherever the rank is, and raises in the next batch
        session._place.claim_signals()
        self.total_steps = steps if 0 < (steps := trainer.estimated_stepping_batches) < float("inf") else None
        self.adopt(trainer.strategy.model, trainer.optimizers, getattr(trainer.precision_plugin, "scaler", None))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        assert self.session._loader is not None
        self.session._loader.set_epoch(trainer.current_epoch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loop, session = trainer.fit_loop.epoch_loop, self.session
        self.batch_done(trainer.current_epoch, batch_idx + 1)
        if session._state.is_clean and trainer.global_step % trainer.log_every_n_steps == 0:
            self._log_step(trainer, outputs)
        if not loop._is_training_done and not loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
            session._pause()

    def _log_step(self, trainer: Any, outputs: Any) -> None:
        """Log the loss, the learning rate, and what the module logs at each step."""
        figures = dict(trainer._logger_connector.metrics["log"])
        if isinstance(outputs, dict) and "loss" in outputs:
            figures["loss"] = outputs["loss"] * trainer.accumulate_grad_batches
        if trainer.optimizers:
            figures["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
        self.add_line(figures)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.evaluating()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.add_line(trainer._logger_connector.metrics["log"], of="eval")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.trained()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.adopt(pl_module, [])  # where a resumed run had been trained to its end before
        self.session._is_complete = True

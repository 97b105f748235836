"""Hugging Face's Trainer in a session: `session.huggingface(trainer)`, before `trainer.train()`.

The Trainer saves and loads weights, optimizer, schedule and its counters. Tried with transformers 5.24.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers.trainer as of_transformers
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from ..errors import Refused, TrainingFailed
from .library import Library, Session
from .loader import Loader

log = logging.getLogger("train")

_OWN = "session.rank{}.json"
"""A rank's file in a checkpoint: the updates so far, the length of a training that has ended, and the sums of losses
that the Trainer does not save."""
_SUMS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")
_NAMES = {"learning_rate": "lr"}
_TIMES = ("runtime", "per_second", "train_loss", "total_flos", "epoch")
"""Ends of the names of figures that do not depend on the step alone, or that the line has already."""


def attach(session: Session, trainer: Any) -> None:
    """Give a Trainer the session's loader and callback.

    Raises:
        Refused: it is set to something that a session cannot make exact.
    """
    _check(trainer)
    seen = trainer.args.world_size if trainer.args.parallel_mode.value == "distributed" else 1
    if seen != (size := session.ranks):
        raise Refused(f"the Trainer sees {seen} of {size} ranks; on the CPU write TrainingArguments(…, use_cpu=True)")
    loader = _loader(session, trainer)
    trainer.get_train_dataloader = lambda: loader
    trainer.args.restore_callback_states_from_checkpoint = True  # the patience of early stopping, for example
    _let_skip()
    # first, so that on_step_begin() of the others follows the border
    trainer.callback_handler.callbacks.insert(0, _Hooks(session, trainer, loader))
    if session.library_folder is not None:
        trainer.args.eval_on_start = False  # a resume is no start, and the line is in metrics.jsonl


def _check(trainer: Any) -> None:
    args, kind = trainer.args, type(trainer)
    refused = {
        "its own get_train_dataloader()": kind.get_train_dataloader is not Trainer.get_train_dataloader,
        "its own _get_train_sampler()": kind._get_train_sampler is not Trainer._get_train_sampler,
        "an iterable data set": not hasattr(trainer.train_dataset, "__getitem__"),
        f"train_sampling_strategy={args.train_sampling_strategy!r}": args.train_sampling_strategy
        not in ("random", "sequential"),
        "FSDP or DeepSpeed": trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled,
        "auto_find_batch_size": args.auto_find_batch_size,
        "ignore_data_skip": args.ignore_data_skip,
        "data_seed": args.data_seed is not None,
        "enable_jit_checkpoint": args.enable_jit_checkpoint,
        "several GPUs in one process": args.n_gpu > 1,
        "split_batches or dispatch_batches": args.accelerator_config.split_batches
        or args.accelerator_config.dispatch_batches,
    }
    for what, is_so in refused.items():
        if is_so:
            raise Refused(f"a session cannot make a Trainer exact that has {what}; remove it, or the session")


def _loader(session: Session, trainer: Any) -> Loader:
    """Return the session's loader with the Trainer's settings."""
    args, own = trainer.args, trainer.get_train_dataloader()
    options = {"prefetch_factor": own.prefetch_factor} if own.num_workers else {}
    return session.loader(
        own.dataset, batch_size=args.train_batch_size * session.ranks, num_workers=own.num_workers,
        collate_fn=own.collate_fn, drop_last=args.dataloader_drop_last, persistent_workers=own.persistent_workers,
        pin_memory=own.pin_memory and torch.cuda.is_available(), shuffle=args.train_sampling_strategy == "random",
        **options,
    )  # fmt: skip


class _Rest:
    """The batches of an epoch after the first `count`."""

    def __init__(self, loader: Loader, count: int) -> None:
        self._loader, self._count = loader, count

    def set_epoch(self, epoch: int) -> None:
        self._loader.load_state_dict({"epoch": epoch, "batch": self._count})

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


def _let_skip() -> None:
    """Let the Trainer's way to skip batches take the session's loader. Accelerate's takes a DataLoader."""
    before = of_transformers.skip_first_batches
    of_transformers.skip_first_batches = lambda loader, num_batches=0: (
        _Rest(loader, num_batches) if isinstance(loader, Loader) else before(loader, num_batches)
    )


class _Hooks(Library, TrainerCallback):
    """A border is where the next update begins: by then the Trainer has logged, evaluated and saved."""

    continue_by = "trainer.train(resume_from_checkpoint=session.newest())"

    def __init__(self, session: Session, trainer: Any, loader: Loader) -> None:
        super().__init__(session, "Hugging Face's Trainer")
        self._trainer, self._loader = trainer, loader
        self._is_border = False
        """Whether an update was made since the last border."""

    def write(self, folder: Path) -> None:
        trainer, state = self._trainer, self._trainer.state
        trainer.store_flos()
        trainer.save_model(str(folder), _internal_call=True)
        trainer._save_optimizer_and_scheduler(str(folder))
        trainer._save_scaler(str(folder))
        sums = {name: float(getattr(trainer, name)) for name in _SUMS}
        own = {"updates": self.session.updates, "global_step": state.global_step, "sums": sums}
        own["ended"] = state.max_steps if self.has_ended else 0
        (folder / _OWN.format(self.session.rank)).write_text(json.dumps(own))
        if trainer.args.should_save:
            for one in (*trainer.callback_handler.callbacks, trainer.control):
                if isinstance(one, ExportableState):
                    state.stateful_callbacks[type(one).__name__] = one.state()
            state.save_to_json(str(folder / of_transformers.TRAINER_STATE_NAME))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, own = self._trainer, self._own()
        self.check_loaded(own["updates"] if own["global_step"] == state.global_step else -1)
        for name, value in own["sums"].items():
            setattr(trainer, name, torch.full_like(trainer._tr_loss, value) if name == "_tr_loss" else value)
        self.total_steps = state.max_steps
        if own.get("ended") == state.max_steps:  # the Trainer would make at least one more update
            if self.session.rank == 0:
                log.warning("nothing is left to train after step %d: max_steps=%d", own["updates"], state.max_steps)
            trainer._run_epoch = lambda **_: None
        self.session.begin_training()
        self.adopt(trainer.model_wrapped, [trainer.optimizer], trainer.accelerator.scaler)

    def _own(self) -> dict[str, Any]:
        """Return what this rank's file in the checkpoint holds. Rank 0 has one, however many ranks there were."""
        if (folder := self.session.library_folder) is None:
            return {"updates": 0, "global_step": 0, "sums": {}}
        path = folder / _OWN.format(self.session.rank)
        content: dict[str, Any] = json.loads((path if path.exists() else folder / _OWN.format(0)).read_text())
        return content

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_border:
            self.session.pause_if_due()
        self._is_border = False
        self.session.before_batch(state.global_step)  # again: the Trainer has fetched all batches of this update

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._is_border, each = True, args.gradient_accumulation_steps
        epoch, update = divmod(state.global_step - 1, -(-len(self._loader) // each))
        self.session.batch_done(epoch, min((update + 1) * each, len(self._loader)))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_epoch_stop:
            raise TrainingFailed(
                "a callback ended an epoch early, and the Trainer resumes by counting whole epochs; set "
                "control.should_training_stop instead of should_epoch_stop"
            )

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.session.evaluating()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        figures = {name: value for name, value in logs.items() if not name.endswith(_TIMES)}
        self.add_line({name[5:]: value for name, value in figures.items() if name.startswith("eval_")}, of="eval")
        self.add_line(
            {_NAMES.get(name, name): value for name, value in figures.items() if not name.startswith("eval_")}
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trained()

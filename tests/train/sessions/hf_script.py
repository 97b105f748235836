"""A script of Hugging Face's Trainer in which much happens around an update: hf_script.py FILE [MAX_STEPS]

A callback that was added before the session counts; a batch is read before the training; the evaluation after 60
updates stops it early, or MAX_STEPS in the middle of an epoch. Where FILE is missing, rank 0 makes it and kills itself
after the training.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

import trainstation as ts

SAMPLES, BATCH_SIZE = 132, 12


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.inputs = torch.randn(SAMPLES, 8)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(0.002)
        return {"inputs": self.inputs[index], "labels": (self.inputs[index].sum() > 0).long()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(inputs), labels)}


class Count(TrainerCallback, ExportableState):
    """Counts the begins and the ends of updates, and ends the training."""

    def __init__(self, begun: int = 0, ended: int = 0) -> None:
        self.begun, self.ended = begun, ended

    def state(self) -> dict[str, Any]:
        return {"args": {"begun": self.begun, "ended": self.ended}, "attributes": {}}

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begun += 1

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ended += 1

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step >= 60


def main() -> None:
    session = ts.session(seed=0, save_every=4, log_samples=True)
    file, max_steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1
    data = Rows()
    trainer = Trainer(
        Model(),
        TrainingArguments(
            str(file.parent / "out"), num_train_epochs=20, max_steps=max_steps, report_to="none", disable_tqdm=True,
            per_device_train_batch_size=BATCH_SIZE // int(os.environ["LOCAL_WORLD_SIZE"]),
            gradient_accumulation_steps=2, learning_rate=0.02, logging_steps=2, eval_strategy="steps", eval_steps=3,
            save_strategy="no", use_cpu=True,
        ),
        train_dataset=data, eval_dataset=data,
        callbacks=[Count()],
    )  # fmt: skip
    session.huggingface(trainer)
    next(iter(trainer.get_train_dataloader()))
    trainer.train(resume_from_checkpoint=session.newest())
    if session.rank == 0 and not file.exists():
        file.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    count = next(one for one in trainer.callback_handler.callbacks if isinstance(one, Count))
    session.log(begun=count.begun, ended=count.ended)
    session.finish()


if __name__ == "__main__":
    main()

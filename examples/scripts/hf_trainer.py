"""Hugging Face's Trainer: train launch --script examples/scripts/hf_trainer.py --nproc 2 --name hf --follow

Four lines make it exact: the session, `session.huggingface(trainer)`, `resume_from_checkpoint` and `session.finish()`.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import trainstation as ts


class Digits(Dataset):
    """Scans of digits as texts of 64 tokens, the pixels. Those for training are moved by up to one pixel."""

    def __init__(self, is_training):
        part = slice(0, 1500) if is_training else slice(1500, None)
        self.scans = torch.tensor(load_digits().images[part]).long()
        self.is_training = is_training

    def __len__(self):
        return len(self.scans)

    def __getitem__(self, index):
        scan = self.scans[index]
        if self.is_training:
            scan = torch.roll(scan, torch.randint(-1, 2, (2,)).tolist(), (0, 1))
        return {"input_ids": scan.flatten(), "labels": scan.flatten()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--output", default="out")
    args = parser.parse_args()
    session = ts.session(seed=0, save_every=5)

    config = LlamaConfig(
        vocab_size=17, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, attention_dropout=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    trainer = Trainer(
        model,
        TrainingArguments(
            args.output, num_train_epochs=args.epochs, per_device_train_batch_size=30, gradient_accumulation_steps=2,
            learning_rate=5e-3, eval_strategy="epoch", save_strategy="no", logging_steps=4, report_to="none",
            dataloader_drop_last=True, dataloader_num_workers=1, disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Digits(True),
        eval_dataset=Digits(False),
    )  # fmt: skip
    session.huggingface(trainer)
    trainer.train(resume_from_checkpoint=session.newest())
    session.finish()


if __name__ == "__main__":
    main()

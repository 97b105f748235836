"""A character GPT: train launch examples/char_gpt.py --data.root docs --nproc 2

Reads the .md files of a folder, here the pages of this project. Ends at bits_per_char 3.1 (guessing gives 7). Text that
it writes is in runs/NAME/images. Shows `data.root`, clipped gradients, `optim.no_decay`, a figure in `images`.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, random_split

DEFAULTS = {
    "epochs": 2.5, "batch_size": 32, "optim.lr": 8e-3, "optim.args.betas": [0.9, 0.95], "optim.weight_decay": 0.1,
    "optim.no_decay": True, "schedule.warmup_epochs": 0.5, "clip_grad_norm": 1.0,
}  # fmt: skip


@dataclass
class Settings:
    context: int = 32
    width: int = 48
    layers: int = 2
    heads: int = 4


class GPT(nn.Module):
    """Maps ASCII codes (batch, length) to logits of the next codes (batch, length, 128)."""

    def __init__(self, context, width, layers, heads):
        super().__init__()
        self.context = context
        self.codes, self.positions = nn.Embedding(128, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 128, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.1)

    def forward(self, codes):
        length = codes.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=codes.device)
        x = self.codes(codes) + self.positions(torch.arange(length, device=codes.device))
        return self.head(self.blocks(x, mask, is_causal=True))


def datasets(config):
    text = "\n".join(path.read_text() for path in sorted(Path(config.data.root).glob("*.md")))
    codes, length = torch.tensor([ord(one) for one in text if one.isascii()]), config.task.context
    assert len(codes) > length, "no text: give a folder of .md files by --data.root"
    windows = codes.unfold(0, length + 1, length)
    return random_split(TensorDataset(windows[:, :-1], windows[:, 1:]), [0.9, 0.1], torch.Generator().manual_seed(0))


def model(config):
    return GPT(**vars(config.task))


def loss(model, batch):
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def metrics(model, batch):
    nats = loss(model, batch)
    return {"loss": nats, "bits_per_char": nats / math.log(2)}


def images(model, batch):
    codes = batch[0][:1, :1]
    while codes.shape[1] < 400:
        chances = model(codes[:, -model.context :])[:, -1].div(0.8).softmax(1)
        codes = torch.cat([codes, torch.multinomial(chances, 1)], 1)
    text, page = "".join(map(chr, codes[0].tolist())), Figure((8, 3))
    page.text(0.02, 0.95, text, va="top", family="monospace", parse_math=False, wrap=True)
    return {"written": page}

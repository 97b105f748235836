"""ResNet-50 and a GPT of 124 million parameters, written out: a plain checkout has no torchvision to take them from."""

from __future__ import annotations

import torch
from torch import Tensor, nn

GPT_VOCABULARY = 50304
"""GPT-2's 50,257, rounded up to a multiple of 64, which matrix products like better."""


class Bottleneck(nn.Module):
    """He et al., "Deep Residual Learning" (2015), with the stride in the 3x3 convolution, as is usual now."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(blocks: tuple[int, ...], width: int, classes: int) -> nn.Module:
    """Pictures (N, 3, H, W) to logits (N, classes). ResNet-50 has blocks (3, 4, 6, 3) and width 64."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    inputs = width
    for place, count in enumerate(blocks):
        inner = width << place
        for block in range(count):
            layers.append(Bottleneck(inputs, inner, 2 if place and not block else 1))
            inputs = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Block(nn.Module):
    """A pre-norm transformer block (Radford et al., GPT-2, 2019)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_feed_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.query_key_value(self.before_attention(x)).split(width, dim=2)
        query, key, value = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(self.before_feed_forward(x))


class GPT(nn.Module):
    """Tokens (N, T) to logits (N, T, vocabulary). GPT-2 small: 12 layers, width 768, 12 heads, context 1024."""

    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        place = torch.empty(0).device
        with torch.device(
            "meta"
        ):  # else torch fills the tensors first, which takes twice as long as what is done below
            self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
            self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, vocabulary, bias=False)
        self.to_empty(device=place)
        self.head.weight = self.tokens.weight
        self._fill()

    def _fill(self) -> None:
        """The first weights, as GPT-2's."""
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

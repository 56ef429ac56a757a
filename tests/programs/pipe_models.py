"""Small models for the tests of pipelines, float64."""

from __future__ import annotations

import torch
from torch import nn

VOCABULARY, HIDDEN, LENGTH = 23, 8, 5


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, HIDDEN) * 0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.weight)


class Head(nn.Module):
    """Its weight is that of the embedding."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.attention = nn.ModuleList([nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)])
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attention[0](self.norms[0](x)).chunk(3, -1)
        x = x + self.attention[1](nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


def gpt(blocks: int) -> nn.Sequential:
    """A GPT with tied embeddings, the same on all ranks."""
    torch.manual_seed(0)
    embedding = Embedding()
    layers = nn.Sequential(*(Block() for _ in range(blocks)))
    return nn.Sequential(embedding, layers, nn.LayerNorm(HIDDEN), Head(embedding.weight))


def perceptrons(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(count)))


def next_token_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def tokens(generator: torch.Generator, count: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)

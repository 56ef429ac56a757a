"""A small Llama: RMSNorm, rotary positions, grouped heads, SwiGLU; and the plan that cuts its layers for several ranks.

The layers exchange a pair (hidden states, token ids), so that an nn.Sequential of them can be cut into the stages of a
pipeline, and each layer can see where documents end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from byteps_py.parallel import context, tensor

State = tuple[torch.Tensor, torch.Tensor]
Group = dist.ProcessGroup | None
#: The dimension of hidden states that sequence and context parallelism cut: (batch, sequence, width).
SEQUENCE = 1


@dataclass(frozen=True)
class LlamaOptions:
    """``eos_id``: the token that ends a document; None: attention reaches back to the beginning of the sequence."""

    vocabulary: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    feed_forward: int = 384
    eos_id: int | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            fits = -(-self.width // (2 * self.heads)) * 2 * self.heads
            raise ValueError(f"width {self.width} is no multiple of 2 * {self.heads} heads: take {fits}")


@dataclass(frozen=True)
class Groups:
    """The ranks that share this rank's layers and sequences."""

    tp: Group = None
    cp: Group = None

    def __deepcopy__(self, memo: dict[int, object]) -> Groups:
        """A copy of a model, such as an average of its weights, has the same ranks."""
        return Groups(self.tp, self.cp)


class TokenEmbedding(nn.Module):
    """Token ids (batch, sequence) -> hidden states of this rank's part of the sequence, and all token ids."""

    def __init__(self, options: LlamaOptions, groups: Groups) -> None:
        super().__init__()
        self.token = nn.Embedding(options.vocabulary, options.width)
        nn.init.normal_(self.token.weight, std=0.02)
        self.groups = groups

    def forward(self, ids: torch.Tensor) -> State:
        return self.token(context.shard_sequence(ids, self.groups.cp, SEQUENCE)), ids


class Attention(nn.Module):
    """Causal attention within documents, with grouped heads."""

    def __init__(self, options: LlamaOptions, groups: Groups) -> None:
        super().__init__()
        self.head_dim, self.groups, self.eos_id = options.width // options.heads, groups, options.eos_id
        self.wq = nn.Linear(options.width, options.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(options.width, options.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(options.width, options.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(options.heads * self.head_dim, options.width, bias=False)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[:2]
        # As many heads as this rank has.
        q, k, v = (layer(x).view(batch, length, -1, self.head_dim) for layer in (self.wq, self.wk, self.wv))
        positions = context.positions(ids.shape[1], self.groups.cp)
        q, k = (rotated(one, positions).transpose(1, 2) for one in (q, k))
        mask = context.DocumentMask.causal(ids.shape[1])
        if self.eos_id is not None:
            mask = context.DocumentMask.from_tokens(ids, self.eos_id)
        mixed = context.attention(q, k, v.transpose(1, 2), mask, self.groups.cp)
        return self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, options: LlamaOptions) -> None:
        super().__init__()
        self.w1 = nn.Linear(options.width, options.feed_forward, bias=False)
        self.w3 = nn.Linear(options.width, options.feed_forward, bias=False)
        self.w2 = nn.Linear(options.feed_forward, options.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Attention and feed-forward network, each behind a norm and beside a residual connection."""

    def __init__(self, options: LlamaOptions, groups: Groups) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(options.width, eps=1e-5)
        self.attention = Attention(options, groups)
        self.feed_forward_norm = nn.RMSNorm(options.width, eps=1e-5)
        self.feed_forward = FeedForward(options)

    def forward(self, state: State) -> State:
        x, ids = state
        x = x + self.attention(self.attention_norm(x), ids)
        return x + self.feed_forward(self.feed_forward_norm(x)), ids


class Head(nn.Module):
    """Hidden states -> logits of this rank's tokens of the vocabulary."""

    def __init__(self, options: LlamaOptions) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(options.width, eps=1e-5)
        self.output = nn.Linear(options.width, options.vocabulary, bias=False)

    def forward(self, state: State) -> torch.Tensor:
        return self.output(self.norm(state[0]))


def llama(options: LlamaOptions, groups: Groups, seed: int = 0) -> nn.Sequential:
    """The model, with the same parameters on all ranks."""
    torch.manual_seed(seed)
    blocks = [TransformerBlock(options, groups) for _ in range(options.layers)]
    model = nn.Sequential(TokenEmbedding(options, groups), *blocks, Head(options))
    if options.tied:
        model[-1].output.weight = model[0].token.weight
    return model


def plan(options: LlamaOptions) -> dict[str, tensor.Style]:
    """How tensor-parallel ranks cut each layer."""
    return {
        "0.token": tensor.Embedding(),
        "*.attention": tensor.SharedInput(),
        "*.attention.wq": tensor.Column(units=options.heads),
        "*.attention.w[kv]": tensor.Column(units=options.kv_heads),
        "*.attention.wo": tensor.Row(),
        "*.feed_forward": tensor.SharedInput(),
        "*.feed_forward.w[13]": tensor.Column(),
        "*.feed_forward.w2": tensor.Row(),
        "*norm": tensor.Sequence(),
        "*.output": tensor.Column(vocabulary=True),
    }


def token_loss(options: LlamaOptions, groups: Groups) -> Callable[[torch.Tensor, torch.Tensor], State]:
    """A loss function: the sum over this rank's tokens, and their number. ``targets``: of the whole sequence."""

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> State:
        own = context.shard_sequence(targets, groups.cp, SEQUENCE)
        losses = tensor.parallel_cross_entropy(logits, own, groups.tp, options.vocabulary, reduction="sum")
        return losses, (own != -100).sum()

    return loss


def rotated(x: torch.Tensor, positions: torch.Tensor, base: float = 10_000.0) -> torch.Tensor:
    """Rotary position embedding. ``x``: (batch, sequence, heads, head_dim)."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = (positions.double()[:, None] * frequencies).to(x.dtype)[None, :, None, :]
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()], -1)

"""Tensor-parallel layers on real processes beside the plain layers. Arguments: names of cases. Prints "NAME: right" on
each rank. All ranks are one tensor-parallel group."""

from __future__ import annotations

import contextlib
import copy
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import case, run
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

import byteps_py.torch  # noqa: F401  (the backend)
from byteps_py.errors import UsageError
from byteps_py.parallel import collectives, tensor

CLOSE = 1e-12
#: Not the same number of tokens on all ranks, and none on the last of four.
VOCABULARY = 300


def group() -> dist.ProcessGroup:
    found = dist.group.WORLD
    assert found is not None
    return found


def ranks() -> int:
    return dist.get_world_size()


def gradient(of: torch.Tensor) -> torch.Tensor:
    assert of.grad is not None
    return of.grad


def close(one: torch.Tensor, other: torch.Tensor, what: str) -> None:
    assert one.shape == other.shape, f"{what}: {tuple(one.shape)} and {tuple(other.shape)}"
    difference = (one - other).abs().max().item() if one.numel() else 0.0
    assert difference <= CLOSE * max(1.0, other.abs().max().item() if other.numel() else 0.0), (
        f"{what} differs by {difference}"
    )


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, kv_heads * self.head_dim) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, vocabulary: int = VOCABULARY, width: int = 16, heads: int = 8, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.attention = Attention(width, heads, heads // 2)
        self.up, self.down = nn.Linear(width, 24), nn.Linear(24, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + self.attention(self.norms[0](x))
        x = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x))


def plan(heads: int = 8) -> dict[str, tensor.Style]:
    return {
        "embedding": tensor.Embedding(),
        "norms.*": tensor.Sequence(),
        "attention": tensor.SharedInput(),
        "attention.q": tensor.Column(units=heads),
        "attention.[kv]": tensor.Column(units=heads // 2),
        "attention.o": tensor.Row(),
        "up": tensor.Column(),
        "down": tensor.Row(),
        "head": tensor.Column(vocabulary=True),
    }


def both(sequence_dim: int | None, tied: bool = False) -> tuple[nn.Module, nn.Module]:
    """The plain model, and the same on all ranks."""
    torch.manual_seed(3)
    plain = Model(tied=tied).double()
    for norm in plain.norms:
        nn.init.normal_(norm.weight)  # type: ignore[arg-type]
    parallel = tensor.parallelize(copy.deepcopy(plain), plan(), group(), sequence_dim=sequence_dim)
    return plain, parallel


def check_gradients(plain: nn.Module, parallel: nn.Module) -> None:
    expected = {name: one.grad for name, one in plain.named_parameters()}
    shards = tensor.sharded_parameters(parallel)
    found = dict(parallel.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        whole, own = expected[name], parameter.grad
        assert whole is not None, name
        assert own is not None, name
        shard = shards.get(name)
        if shard is not None:
            whole = shard.cut(whole)  # with zeros for padding
        close(own, whole, f"the gradient of {name}")


@case
def equal() -> None:
    for sequence_dim in (None, 1):
        for tied in (False, True):
            plain, parallel = both(sequence_dim, tied)
            ids, targets = torch.randint(
                VOCABULARY, (2, 3, 8), generator=torch.Generator(torch.get_default_device()).manual_seed(1)
            )
            targets[0, 1] = -100
            options = tensor.CrossEntropyOptions(label_smoothing=0.1)
            loss = functional.cross_entropy(plain(ids).flatten(0, 1), targets.flatten(), label_smoothing=0.1)
            own = tensor.parallel_cross_entropy(parallel(ids), targets, group(), VOCABULARY, options=options)
            close(own, loss, "the loss")
            loss.backward()
            own.backward()
            check_gradients(plain, parallel)
            if tied:
                assert parallel.head.weight is parallel.embedding.weight


@case
def exact() -> None:
    """Sums of small integers have no rounding: the same bits."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randint(-4, 5, parameter.shape))
    parallel = tensor.parallelize(copy.deepcopy(plain), {"0": tensor.Column(), "2": tensor.Row()}, group())
    x = torch.randint(-4, 5, (5, 8)).float().requires_grad_()
    y = x.detach().clone().requires_grad_()
    one, other = plain(x), parallel(y)
    assert torch.equal(one, other)
    one.sum().backward()
    other.sum().backward()
    assert torch.equal(gradient(x), gradient(y))


@case
def conjugates() -> None:
    """Each function against its definition, with gradients that differ among ranks."""
    n, rank = ranks(), dist.get_rank()
    wholes = [
        torch.randn(4 * n, 3, 2 * n, generator=torch.Generator(torch.get_default_device()).manual_seed(one)).double()
        for one in range(n)
    ]
    for dim in (0, 2, -1):
        parts = [one.chunk(n, dim)[rank] for one in wholes]
        total = torch.stack(wholes).sum(0)
        total_part = total.chunk(n, dim)[rank]
        joined = torch.cat([one.chunk(n, dim)[index] for index, one in enumerate(wholes)], dim)
        for function, given, gradient, output, expected in (
            (tensor.gather_along, wholes[rank].chunk(n, dim)[rank], wholes[rank], joined, total_part),
            (tensor.reduce_scatter_along, wholes[rank], wholes[rank].chunk(n, dim)[rank], total_part, joined),
            (tensor.split_along, wholes[0], wholes[rank].chunk(n, dim)[rank], wholes[0].chunk(n, dim)[rank], joined),
            (tensor.collect_along, wholes[rank].chunk(n, dim)[rank], wholes[rank], joined, parts[rank]),
        ):
            x = given.clone().requires_grad_()
            result = function(x, group(), dim)
            close(result, output, function.__name__)
            result.backward(gradient)
            assert x.grad is not None
            close(x.grad, expected, f"{function.__name__}, backward, {dim}")
    for function, output, expected in (
        (tensor.copy_to_ranks, wholes[rank], sum(wholes)),
        (tensor.reduce_from_ranks, sum(wholes), wholes[rank]),
    ):
        x = wholes[rank].clone().requires_grad_()
        result = function(x, group())
        close(result, output, function.__name__)
        result.backward(wholes[rank])
        assert x.grad is not None
        close(x.grad, expected, f"{function.__name__}, backward")


class Words(contextlib.AbstractContextManager["Words"]):
    """Counts what each rank sends, as ring algorithms do: all-reduces twice, the others once (t - 1) / t."""

    def __init__(self) -> None:
        self.sent = self.calls = 0
        self._originals: dict[str, Any] = {}

    def _replace(self, name: str, words_of: Callable[..., int]) -> None:
        original = self._originals[name] = getattr(dist, name)

        def call(*arguments: Any, **others: Any) -> Any:
            self.calls += 1
            self.sent += words_of(*arguments[:2]) * (ranks() - 1) // ranks()
            return original(*arguments, **others)

        setattr(dist, name, call)

    def __enter__(self) -> Words:
        self._replace("all_reduce", lambda one, *_: 2 * one.numel())
        self._replace(collectives.ALL_GATHER, lambda output, _: output.numel())
        self._replace(collectives.REDUCE_SCATTER, lambda _, given: given.numel())
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)


@case
def communicates() -> None:
    """8·b·s·h·(t−1)/t words a layer: four all-reduces of b·s·h, or four pairs of gather and reduce-scatter."""
    for sequence_dim in (None, 1):
        torch.manual_seed(0)
        layer = nn.ModuleDict({"attention": Attention(16, 8, 4), "norm": nn.LayerNorm(16)})
        layer["mlp"] = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16))
        chosen = {
            "norm": tensor.Sequence(),
            "attention": tensor.SharedInput(),
            "attention.[qkv]": tensor.Column(),
            "attention.o": tensor.Row(),
            "mlp.0": tensor.Column(),
            "mlp.1": tensor.Row(),
        }
        tensor.parallelize(layer, chosen, group(), sequence_dim=sequence_dim)
        words = Words()
        x = torch.randn(2, 8, 16)
        own = (x if sequence_dim is None else tensor.split_along(x, group(), 1)).requires_grad_()
        with words, CommDebugMode() as debug:
            hidden = own + layer["attention"](own)
            hidden = hidden + layer["mlp"](hidden)
            hidden.sum().backward()
        t = ranks()
        biases = 0 if sequence_dim is None else 2 * 2 * 16 * (t - 1) // t
        assert words.sent == 8 * 2 * 8 * 16 * (t - 1) // t + biases, (words.sent, sequence_dim)
        assert words.calls == (4 if sequence_dim is None else 8 + 2), words.calls
        if dist.get_backend() == "gloo":  # "byteps" takes calls before the dispatcher sees them
            assert debug.get_total_counts() == words.calls


@case
def cross_entropies() -> None:
    n, rank = ranks(), dist.get_rank()
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    own = logits.chunk(n, 1)[rank].clone().requires_grad_()
    loss = tensor.parallel_cross_entropy(own, torch.tensor([2]), group(), 4)
    loss.backward()
    assert abs(loss.item() - 1.44019) < 1e-5, loss
    assert own.grad is not None
    expected = torch.tensor([[0.0321, 0.0871, -0.7631, 0.6439]]).chunk(n, 1)[rank]
    assert (own.grad - expected).abs().max() < 1e-4, own.grad
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    for vocabulary, smoothing, z_loss, reduction in (
        (VOCABULARY, 0.0, 0.0, "mean"),
        (VOCABULARY, 0.2, 0.0, "sum"),
        (40, 1.0, 0.0, "none"),
        (VOCABULARY, 0.1, 1e-2, "mean"),
    ):
        local = tensor.padded_vocabulary(vocabulary, n) // n
        whole = torch.randn(6, 5, vocabulary, generator=generator).double() * 30
        targets = torch.randint(vocabulary, (6, 5), generator=generator)
        targets[1], targets[2, 3] = 7, -1
        padded = functional.pad(whole, (0, local * n - vocabulary), value=1e4)
        own = padded[..., rank * local : (rank + 1) * local].clone().requires_grad_()
        plain = whole.clone().requires_grad_()
        options = tensor.CrossEntropyOptions(-1, smoothing, z_loss)
        loss = tensor.parallel_cross_entropy(own, targets, group(), vocabulary, reduction=reduction, options=options)
        expected = functional.cross_entropy(
            plain.flatten(0, 1), targets.flatten(), ignore_index=-1, label_smoothing=smoothing, reduction="none"
        ).view(6, 5)
        expected = expected + z_loss * plain.logsumexp(-1).square() * (targets != -1)
        if reduction != "none":
            expected = expected.sum() / (1 if reduction == "sum" else (targets != -1).sum())
        close(loss, expected, f"{vocabulary} {smoothing} {z_loss} {reduction}")
        weights = torch.randn(loss.shape, generator=generator).double()
        (loss * weights).sum().backward()
        (expected * weights).sum().backward()
        share = functional.pad(gradient(plain), (0, local * n - vocabulary))[..., rank * local : (rank + 1) * local]
        close(gradient(own), share, "gradient")
    ignored = tensor.parallel_cross_entropy(own.detach(), torch.full((6, 5), -1), group(), VOCABULARY, options=options)
    assert ignored.isnan()
    # 16 bits: computed in float32.
    half = own.detach().bfloat16().requires_grad_()
    loss = tensor.parallel_cross_entropy(half, targets, group(), VOCABULARY, options=options)
    assert loss.dtype == torch.float32
    loss.backward()
    assert gradient(half).dtype == torch.bfloat16


@case
def gathered_output() -> None:
    torch.manual_seed(1)
    plain = nn.Linear(6, VOCABULARY).double()
    parallel = nn.Sequential(copy.deepcopy(plain))
    tensor.parallelize(parallel, {"0": tensor.Column(vocabulary=True, gather_output=True)}, group())
    x = torch.randn(4, 6).double()
    close(parallel(x), plain(x), "gathered output")
    plain(x).square().sum().backward()
    parallel(x).square().sum().backward()
    check_gradients(nn.Sequential(plain), parallel)


def refuses(words: str, function: Callable[..., Any], *arguments: Any, **others: Any) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        function(*arguments, **others)


@case
def refused() -> None:
    n = ranks()
    model = Model()
    refuses("the model has no such layer", tensor.parallelize, model, {"atention.q": tensor.Column()}, group())
    refuses("is for Linear", tensor.parallelize, model, {"embedding": tensor.Column()}, group())
    refuses("is for Embedding", tensor.parallelize, model, {"up": tensor.Embedding()}, group())
    refuses("use Column, Row", tensor.parallelize, model, {"up": "column"}, group())
    refuses(
        f"{n} tensor-parallel ranks do not divide 7",
        tensor.parallelize,
        nn.Sequential(nn.Linear(3, 7)),
        {"0": tensor.Column()},
        group(),
    )
    heads = {"attention.q": tensor.Column(units=1)}
    refuses("do not divide 1 heads", tensor.parallelize, model, heads, group())
    refuses("are no 5 equal units", tensor.parallelize, model, {"attention.q": tensor.Column(units=5)}, group())
    refuses(
        "is tied to a layer that is cut",
        tensor.parallelize,
        Model(tied=True),
        {"embedding": tensor.Embedding()},
        group(),
    )
    tied = {"embedding": tensor.Embedding(), "head": tensor.Row()}
    refuses("is tied to a parameter", tensor.parallelize, Model(tied=True), tied, group())
    _, parallel = both(None)
    refuses("must be integers", parallel, torch.tensor([[1.0]]))
    logits = torch.zeros(2, 256)
    refuses("need targets of shape", tensor.parallel_cross_entropy, logits, torch.zeros(3).long(), group(), VOCABULARY)
    refuses(
        "must be 'none'",
        tensor.parallel_cross_entropy,
        logits,
        torch.tensor([1, 4]),
        group(),
        VOCABULARY,
        reduction="avg",
    )
    refuses("less than the vocabulary", tensor.parallel_cross_entropy, logits, torch.tensor([1, 4]), group(), 5000)
    refuses("must be from 0 to 1", tensor.CrossEntropyOptions, label_smoothing=1.5)
    refuses("must not be negative", tensor.CrossEntropyOptions, z_loss=-1)
    refuses("pad its 3", tensor.split_along, torch.zeros(3, 3), group(), 0)
    if not logits.is_cuda:  # there the device fails, and with it the process, as in torch
        refuses("token id 300 is not in the vocabulary of 300", parallel, torch.tensor([[1, 300]]))
        refuses("token id -1", parallel, torch.tensor([[-1, 3]]))
        refuses("token id 400", tensor.parallel_cross_entropy, logits, torch.tensor([1, 400]), group(), VOCABULARY)


if __name__ == "__main__":
    run(sys.argv[1:])

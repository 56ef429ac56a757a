"""Context parallelism on real processes beside the same computation in one. Arguments: the names of cases. Prints
"NAME: right" on each rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from cases import case, run
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from byteps_py.errors import UsageError
from byteps_py.parallel.context.distributed_attention import attention, ring_attention
from byteps_py.parallel.context.document_mask import DocumentMask
from byteps_py.parallel.context.head_tail import gathered_bytes
from byteps_py.parallel.context.sequences import positions, shard_sequence, token_mean_loss, unshard_sequence

CLOSE = 1e-12
EOS, VOCABULARY, WIDTH, HEADS, KV_HEADS = 2, 11, 12, 6, 2
MASKED = -100


def generator() -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(1)


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def same(one: torch.Tensor, other: torch.Tensor, what: Any) -> None:
    difference = (one - other).abs().max().item()
    assert difference <= CLOSE, f"{what} differs by {difference}"


def refused(*words: str, call: Callable[[], Any]) -> None:
    said = ""
    try:
        call()
    except UsageError as error:
        said = str(error)
    assert said, f"no error with {words}"
    assert all(word in said for word in words), said


def visible(rows: torch.Tensor, is_causal: bool, window: int | None) -> torch.Tensor:
    """(batch, 1, S, S), from the definition."""
    ends = (rows == EOS).long()
    document = ends.cumsum(1) - ends
    places = torch.arange(rows.shape[1])
    ahead = places - places.unsqueeze(1)
    sees = (ahead <= 0) | (not is_causal)
    return (
        (document.unsqueeze(1) == document.unsqueeze(2)) & sees & (ahead.abs() < (window or len(places)))
    ).unsqueeze(1)


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) * q.shape[3] ** -0.5
    return scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v.repeat_interleave(groups, 1)


def token_rows(rng: torch.Generator, batch: int, length: int) -> torch.Tensor:
    """Token ids, with short and long documents, and in the last row one document only."""
    ids = torch.randint(EOS + 1, VOCABULARY, (batch, length), generator=rng)
    ids[torch.rand(batch, length, generator=rng) < 0.15] = EOS
    ids[-1] = EOS + 1
    return ids


def beside_full_attention(group: dist.ProcessGroup) -> None:
    rng = generator()
    length, batch = 2 * dist.get_world_size(group) * 5, 3
    for is_causal, window in ((True, None), (True, 7), (False, None), (False, 4)):
        ids = token_rows(rng, batch, length)
        mask = DocumentMask.from_tokens(ids, EOS, is_causal=is_causal, window=window)
        shapes = ((HEADS, 4), (KV_HEADS, 4), (KV_HEADS, 3), (HEADS, 3))
        *whole, gradient = (torch.randn(batch, n, length, d, generator=rng) for n, d in shapes)
        for one in whole:
            one.requires_grad_()
        q, k, v = whole
        expected = full_attention(q, k, v, visible(ids, is_causal, window))
        gradients = torch.autograd.grad(expected, whole, gradient)
        for function in (attention, ring_attention):
            own = [shard_sequence(one, group, 2).detach().requires_grad_() for one in whole]
            output = function(own[0], own[1], own[2], mask, group)
            found = torch.autograd.grad(output, own, shard_sequence(gradient, group, 2))
            for name, one, other in zip("oqkv", (output, *found), (expected, *gradients), strict=True):
                same(one, shard_sequence(other, group, 2), (function.__name__, is_causal, window, name))


@case
def equal() -> None:
    beside_full_attention(world())


@case
def groups_of_two() -> None:
    """Ranks of a group are not those of the job."""
    half = dist.get_world_size() // 2
    groups = [dist.new_group([rank, rank + half]) for rank in range(half)]
    beside_full_attention(groups[dist.get_rank() % half])
    if half > 1:
        other = groups[(dist.get_rank() + 1) % half]
        q, mask = torch.zeros(1, 1, 2, 4), DocumentMask.causal(4)
        for function in (attention, ring_attention):
            refused("is not in the context-parallel group", call=lambda: function(q, q, q, mask, other))  # noqa: B023


@case
def sequences() -> None:
    group, size, rank = world(), dist.get_world_size(), dist.get_rank()
    length = 2 * size * 3
    whole = torch.randn(2, length, 4, generator=generator())
    for dim, tensor in ((1, whole), (-2, whole), (0, whole.movedim(1, 0)), (1, torch.arange(2 * length).view(2, -1))):
        assert torch.equal(unshard_sequence(shard_sequence(tensor, group, dim), group, dim), tensor)
    chunks = torch.arange(length).chunk(2 * size)
    assert torch.equal(positions(length, group), torch.cat([chunks[rank], chunks[2 * size - 1 - rank]]))
    mask = DocumentMask.from_lengths([[2, length - 2], [length]])
    inside = torch.stack([torch.cat([torch.arange(2), torch.arange(length - 2)]), torch.arange(length)])
    assert torch.equal(positions(length, group, mask=mask), shard_sequence(inside, group, 1))
    for gradient, factor in (("sum", size * (size + 1) / 2), ("own", rank + 1)):
        own = shard_sequence(whole, group, 1).requires_grad_()
        gathered = unshard_sequence(own, group, 1, gradient=gradient)  # type: ignore[arg-type]
        ((rank + 1) * gathered * whole).sum().backward()
        assert own.grad is not None
        same(own.grad, shard_sequence(whole, group, 1) * factor, gradient)


class Model(nn.Module):
    """One layer of attention with rotary embeddings and grouped heads. ``attend``: (q, k, v) -> output."""

    def __init__(self) -> None:
        super().__init__()
        rng = generator()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, WIDTH * (HEADS + 2 * KV_HEADS) // HEADS)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.3)

    def forward(self, ids: torch.Tensor, places: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = self.embedding(ids)
        heads = self.qkv(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        output = attend(rotated(q, places), rotated(k, places), v)
        return self.head(x + output.transpose(1, 2).flatten(2))


def rotated(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    one, other = x.chunk(2, -1)
    cos, sin = places.double().cos().unsqueeze(-1), places.double().sin().unsqueeze(-1)
    return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)


def sum_and_count(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    flat = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=MASKED, reduction="sum")
    return flat, (targets != MASKED).sum()


@case
def half_precision() -> None:
    """On both ways; the parts of the ring are merged in float32, under autocast, too."""
    group, rng = world(), generator()
    length = 2 * dist.get_world_size() * 8
    mask = DocumentMask.from_lengths([5, length - 5])
    whole = [torch.randn(2, n, length, 8, generator=rng).bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS)]
    precise = [one.double().requires_grad_() for one in whole]
    expected = attention(precise[0], precise[1], precise[2], mask, None)
    wanted = torch.autograd.grad(expected.sum(), precise)
    for function in (attention, ring_attention):
        own = [shard_sequence(one, group, 2).requires_grad_() for one in whole]
        output = function(own[0], own[1], own[2], mask, group)
        found = torch.autograd.grad(output.sum(), own)
        for name, one, other in zip("oqkv", (output, *found), (expected, *wanted), strict=True):
            assert one.dtype == torch.bfloat16
            close = torch.allclose(one.double(), shard_sequence(other, group, 2), rtol=0.05, atol=0.05)
            assert close, (function.__name__, name)
    single = [shard_sequence(one, group, 2).float() for one in whole]
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        output = ring_attention(single[0], single[1], single[2], mask, group)
    assert output.dtype == torch.float32
    assert torch.allclose(output.double(), shard_sequence(expected, group, 2), rtol=0, atol=1e-5)


@case
def trains() -> None:
    """A model with several masks. Gradients are those of one process: summed by the caller, and averaged by
    DistributedDataParallel."""
    group, size = world(), dist.get_world_size()
    length = 2 * size * 4
    ids = token_rows(generator(), 2, length + 1)
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[:, : length // (2 * size)] = MASKED  # ranks count different numbers of tokens
    targets[:, -1] = MASKED
    windows = (None, 3)  # two masks in one model
    reference = Model()
    logits = reference(
        inputs,
        torch.arange(length),
        lambda q, k, v: sum(full_attention(q, k, v, visible(inputs, True, window)) for window in windows),
    )
    loss_sum, count = sum_and_count(logits, targets)
    (loss_sum / count).backward()
    own = [shard_sequence(one, group, 1) for one in (inputs, targets)]
    for function in (attention, ring_attention):
        for is_averaged in (False, True):
            model: nn.Module = DistributedDataParallel(Model()) if is_averaged else Model()
            masks = [DocumentMask.from_tokens(inputs, EOS, window=window) for window in windows]
            found = model(
                own[0],
                positions(length, group),
                lambda q, k, v: sum(function(q, k, v, mask, group) for mask in masks),  # noqa: B023
            )
            loss = token_mean_loss(*sum_and_count(found, own[1]), group, reduction="mean" if is_averaged else "sum")
            loss.backward()
            same(loss, loss_sum / count, "the loss")
            for parameter, wanted in zip(model.parameters(), reference.parameters(), strict=True):
                assert parameter.grad is not None
                assert wanted.grad is not None
                if not is_averaged:
                    dist.all_reduce(parameter.grad)
                same(parameter.grad, wanted.grad, (function.__name__, is_averaged))


@case
def losses() -> None:
    group, rank, size = world(), dist.get_rank(), dist.get_world_size()
    own = torch.tensor(float(rank + 1), requires_grad=True)
    loss = token_mean_loss(own, 0 if rank == 0 else rank * 3, group)  # the first rank has none that counts
    count = 3 * size * (size - 1) / 2
    loss.backward()
    same(loss, torch.tensor(size * (size + 1) / 2 / count), "loss")
    assert own.grad is not None
    same(own.grad, torch.tensor(1 / count), "gradient")
    nothing = torch.zeros((), requires_grad=True)
    loss = token_mean_loss(nothing, 0, group)
    loss.backward()
    assert nothing.grad is not None
    assert (loss.item(), nothing.grad.item()) == (0, 0)


@case
def images() -> None:
    """Cross-attention of sharded queries to keys that all ranks have: no communication."""
    group, rng = world(), generator()
    length = 2 * dist.get_world_size()
    q, k, v, gradient = (torch.randn(1, 2, n, 4, generator=rng) for n in (length, 7, 7, length))
    whole = [one.clone().requires_grad_() for one in (q, k, v)]
    expected = scaled_dot_product_attention(*whole)
    wanted = torch.autograd.grad(expected, whole, gradient)
    own = [one.requires_grad_() for one in (shard_sequence(q, group, 2), k, v)]
    output = scaled_dot_product_attention(*own)
    found = torch.autograd.grad(output, own, shard_sequence(gradient, group, 2))
    same(output, shard_sequence(expected, group, 2), "output")
    same(found[0], shard_sequence(wanted[0], group, 2), "q")
    for one, other in zip(found[1:], wanted[1:], strict=True):
        dist.all_reduce(one)
        same(one, other, "keys and values")


@case
def bad_input() -> None:
    """All ranks raise before they communicate, and go on."""
    group, size = world(), dist.get_world_size()
    odd = 2 * size * 3 - 1
    refused(f"{odd} tokens", f"= {2 * size} chunks", f"pad it to {odd + 1}", call=lambda: positions(odd, group))
    refused(
        f"{2 * size - 1} tokens",
        f"pad it to {2 * size} tokens",
        call=lambda: shard_sequence(torch.zeros(2 * size - 1), group, 0),
    )
    q, mask = torch.zeros(2, 4, 6, 4), DocumentMask.causal(6 * size)
    for function in (attention, ring_attention):
        for words, given in {
            (f"{6 * size + 1} tokens", f"{6 * size} on all"): (q, q, q, DocumentMask.causal(6 * size + 1)),
            ("3 rows", "has 2"): (q, q, q, DocumentMask.from_lengths([[6 * size]] * 3)),
            ("5 tokens", f"= {2 * size}"): (*[q[:, :, :5]] * 3, mask),
            ("4, 3, 3 heads",): (q, q[:, :3], q[:, :3], mask),
            ("float32", "float64"): (q, q, q.float(), mask),
            ("[2, 4, 5, 4]", "not sharded"): (q, q[:, :, :5], q[:, :, :5], mask),
        }.items():
            refused(*words, call=lambda: function(*given, group))  # noqa: B023
    sequences()


class Bytes(TorchDispatchMode):
    """The operations of torch.distributed, with the bytes that each of them takes in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            given = {"_allgather_base_": 0, "_reduce_scatter_base_": 1}.get(name, 0)
            tensor = args[given][0] if isinstance(args[given], list) else args[given]
            self.seen.append((name, tensor.numel() * tensor.element_size()))
        return func(*args, **(kwargs or {}))


@case
def traffic() -> None:
    """One collective each way, of the formula's size; on the ring, a hop less of keys, and gradients go home."""
    group, size = world(), dist.get_world_size()
    length, batch = 2 * size * 4, 3
    own = [torch.zeros(batch, n, length // size, 4, requires_grad=True) for n in (HEADS, KV_HEADS, KV_HEADS)]
    mask = DocumentMask.causal(length)
    expected = batch * gathered_bytes(length, size, KV_HEADS, 4, 8)
    with Bytes() as seen:
        output = attention(own[0], own[1], own[2], mask, group)
        there = list(seen.seen)
        output.sum().backward()
    whole = expected * size // (size - 1)  # with the own part, which does not travel
    assert there == [("_allgather_base_", whole)], there
    assert seen.seen[1:] == [("_reduce_scatter_base_", whole)], seen.seen
    with Bytes() as seen:
        output = ring_attention(own[0], own[1], own[2], mask, group)
        there = list(seen.seen)
        output.sum().backward()
    sent = [nbytes for name, nbytes in there if name == "send"]
    assert (len(sent), sum(sent)) == (size - 1, expected), there
    sent = [nbytes for name, nbytes in seen.seen[len(there) :] if name == "send"]
    assert (len(sent), sum(sent)) == (2 * size - 1, expected + whole), seen.seen


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    run(sys.argv[1:])

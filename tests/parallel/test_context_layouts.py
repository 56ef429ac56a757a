"""Context-parallel attention beside full attention with an explicit mask, in one process: random layouts of documents.

A rank's part of the computation is a function of its own queries and of the keys that it gets, so that all ranks of a
group are computed here, one after the other.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from byteps_py.parallel.context import distributed_attention, local_attention
from byteps_py.parallel.context.distributed_attention import (
    AttentionGradients,
    KeyBlock,
    PartialAttention,
    attention,
    merge,
    ring_attention,
)
from byteps_py.parallel.context.document_mask import DocumentMask, spans_of, squares_of
from byteps_py.parallel.context.local_attention import AttentionCall, attend_packed, varlen_kernel, with_repeated_heads
from byteps_py.parallel.context.sequences import by_rank, in_order

CLOSE = 1e-12
EOS = 2


class Layout(NamedTuple):
    """A random case."""

    mask: DocumentMask
    visible: torch.Tensor  # (rows, 1, S, S)
    cp: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gradient: torch.Tensor


def layout(seed: int) -> Layout:
    rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
    cp, batch = rng.choice([1, 2, 3, 4]), rng.choice([1, 1, 2, 3])
    length = 2 * cp * rng.randint(1, 6)
    rows = rng.choice([1, batch])
    tokens = [[EOS if rng.random() < rng.choice([0.0, 0.1, 0.5]) else 7 for _ in range(length)] for _ in range(rows)]
    is_causal = rng.random() < 0.8
    window = rng.choice([None, None, rng.randint(1, length + 2)])
    if rng.random() < 0.5:
        mask = DocumentMask.from_tokens(torch.tensor(tokens), EOS, is_causal=is_causal, window=window)
    else:
        lengths = [[len(part) for part in documents(row)] for row in tokens]
        mask = DocumentMask.from_lengths(lengths, is_causal=is_causal, window=window)
    visible = torch.tensor([pairs(row, is_causal, window) for row in tokens]).unsqueeze(1)
    kv_heads, head_dim, value_dim = rng.choice([1, 2]), rng.choice([1, 4]), rng.choice([3, 4])
    heads = kv_heads * rng.choice([1, 1, 2, 3])
    q, k, v, gradient = (
        torch.randn(batch, n, length, d, generator=torch_rng, dtype=torch.float64)
        for n, d in ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim), (heads, value_dim))
    )
    return Layout(mask, visible, cp, q, k, v, gradient)


def documents(row: list[int]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for token in row:
        found[-1].append(token)
        if token == EOS:
            found.append([])
    return [document for document in found if document]


def pairs(row: list[int], is_causal: bool, window: int | None) -> list[list[bool]]:
    """The tokens that each token sees, from the definition."""
    document = [sum(token == EOS for token in row[:place]) for place in range(len(row))]
    return [
        [
            document[i] == document[j] and (j <= i or not is_causal) and (window is None or abs(i - j) < window)
            for j in range(len(row))
        ]
        for i in range(len(row))
    ]


def expected(case: Layout) -> list[torch.Tensor]:
    """[output, gradients of q, k, v]."""
    q, k, v = (one.clone().requires_grad_() for one in (case.q, case.k, case.v))
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) * q.shape[3] ** -0.5
    output = scores.masked_fill(~case.visible, -torch.inf).softmax(-1) @ v.repeat_interleave(groups, 1)
    return [output, *torch.autograd.grad(output, (q, k, v), case.gradient)]


def calls(case: Layout) -> list[AttentionCall]:
    return [
        AttentionCall(case.mask, case.q.shape[3] ** -0.5, case.mask.length, rank, case.cp) for rank in range(case.cp)
    ]


def sharded(tensor: torch.Tensor, cp: int) -> list[torch.Tensor]:
    return by_rank(tensor, 2, cp) if cp > 1 else [tensor]


def unsharded(shards: list[torch.Tensor]) -> torch.Tensor:
    return in_order(shards, 2) if len(shards) > 1 else shards[0]


def gathered(case: Layout, attend: Callable[..., torch.Tensor] = local_attention.attend) -> list[torch.Tensor]:
    q, k, v = (one.clone().requires_grad_() for one in (case.q, case.k, case.v))
    outputs = [attend(own, k, v, call) for own, call in zip(sharded(q, case.cp), calls(case), strict=True)]
    output = unsharded(outputs)
    return [output, *torch.autograd.grad(output, (q, k, v), case.gradient)]


def in_a_ring(case: Layout) -> list[torch.Tensor]:
    q, k, v, gradient = (sharded(one, case.cp) for one in (case.q, case.k, case.v, case.gradient))
    outputs, q_gradients = [], []
    k_gradients, v_gradients = ([torch.zeros_like(one) for one in some] for some in (k, v))
    for rank, call in enumerate(calls(case)):
        met = [KeyBlock(k[other], v[other], other) for other in ((rank - step) % case.cp for step in range(case.cp))]
        parts = PartialAttention.of(q[rank], case.v.shape[3], call)
        for block in met:
            parts.add(block)
        outputs.append(parts.o)
        own = AttentionGradients.of(parts, gradient[rank])
        for block in met:
            of_k, of_v = own.of_block(block)
            k_gradients[block.rank] += of_k
            v_gradients[block.rank] += of_v
        q_gradients.append(own.q_gradient)
    return [unsharded(some) for some in (outputs, q_gradients, k_gradients, v_gradients)]


def check(found: list[torch.Tensor], wanted: list[torch.Tensor], what: Any) -> None:
    for name, one, other in zip(("output", "q", "k", "v"), found, wanted, strict=True):
        difference = (one - other).abs().max().item()
        assert difference <= CLOSE, f"{what}: {name} differs by {difference}"


@pytest.mark.parametrize(
    "seeds",
    [
        range(100),
        *(pytest.param(range(start, start + 300), marks=pytest.mark.long) for start in range(100, 1000, 300)),
    ],
    ids=str,
)
def test_random_layouts(seeds: range) -> None:
    for seed in seeds:
        case = layout(seed)
        wanted = expected(case)
        check(gathered(case), wanted, f"seed {seed}")
        check(in_a_ring(case), wanted, f"seed {seed}, ring")


def plain_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    *most: int,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What torch.nn.attention.varlen.varlen_attn says that it computes."""
    assert [int(each.diff().max()) for each in (cu_q, cu_k)] == list(most)
    assert (int(cu_q[-1]), int(cu_k[-1])) == (len(q), len(k))
    assert enable_gqa == (q.shape[1] != k.shape[1])
    outputs = []
    pieces = [tensor.split(cu.diff().tolist()) for tensor, cu in ((q, cu_q), (k, cu_k), (v, cu_k))]
    for one, keys, values in zip(*pieces, strict=True):
        groups = q.shape[1] // k.shape[1]
        keys, values = (each.repeat_interleave(groups, 1).transpose(0, 1) for each in (keys, values))
        ahead = torch.arange(keys.shape[1]) - torch.arange(len(one)).unsqueeze(1) - (keys.shape[1] - len(one))
        behind, before = (float("inf") if each == -1 else each for each in window_size)
        hidden = (ahead > before) | (ahead < -behind)
        weights = (one.transpose(0, 1) @ keys.transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append((weights @ values).transpose(0, 1))
    return torch.cat(outputs)


def test_packing_for_the_kernel_of_variable_lengths() -> None:
    for seed in range(60):
        case = layout(seed)
        if case.mask.is_causal or case.mask.window is None:
            found = gathered(case, lambda *given: attend_packed(*given, plain_varlen))
            check(found, expected(case), f"seed {seed}")


def test_packing_for_a_kernel_without_shared_heads() -> None:
    def kernel(q: torch.Tensor, k: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        assert q.shape[1] == k.shape[1]
        return plain_varlen(q, k, *others, **options, enable_gqa=False)

    case = next(case for case in map(layout, range(60)) if case.mask.is_causal and case.q.shape[1] > case.k.shape[1])
    repeated = functools.partial(with_repeated_heads, kernel)
    check(gathered(case, lambda *given: attend_packed(*given, repeated)), expected(case), "repeated heads")


def test_the_kernel_of_variable_lengths_is_for_cuda() -> None:
    q = torch.zeros(1, 1, 4, 8, dtype=torch.bfloat16)
    assert varlen_kernel(q, q, DocumentMask.causal(4)) is None


@pytest.mark.parametrize("function", [attention, ring_attention])
def test_more_queries_than_a_tile(function: Callable[..., torch.Tensor]) -> None:
    """Alone, without a group."""
    length = 2 * max(local_attention.TILE, distributed_attention.TILE) + 3
    torch_rng = torch.Generator().manual_seed(0)
    q, k, v, gradient = (torch.randn(1, 1, length, 4, generator=torch_rng, dtype=torch.float64) for _ in range(4))
    row = [EOS if place in (0, 700) else 7 for place in range(length)]
    for is_causal, window in ((True, None), (True, 300), (False, 40)):
        mask = DocumentMask.from_tokens(row, EOS, is_causal=is_causal, window=window)
        places = torch.arange(length)
        ahead = places - places.unsqueeze(1)
        document = (places > 0).long() + (places > 700)
        visible = (document == document.unsqueeze(1)) & ((ahead <= 0) | (not is_causal))
        visible &= ahead.abs() < (window or length)
        inputs = [one.clone().requires_grad_() for one in (q, k, v)]
        output = function(*inputs, mask, None)
        found = [output, *torch.autograd.grad(output, inputs, gradient)]
        check(found, expected(Layout(mask, visible, 1, q, k, v, gradient)), (is_causal, window))


@pytest.mark.parametrize(("is_causal", "window"), [(True, None), (True, 30), (False, 40), (False, None)])
def test_scores_of_a_square_are_small_and_no_pair_is_left_out(is_causal: bool, window: int | None) -> None:
    """The scores of a ring's block do not grow with its keys."""
    lengths = [1, 99, 150]
    mask = DocumentMask.from_lengths(lengths, is_causal=is_causal, window=window)
    pairs = torch.zeros(sum(lengths), sum(lengths), dtype=torch.long)
    for document in spans_of(mask, lengths, range(sum(lengths))):
        for square in squares_of(mask, document, 16):
            assert len(square.queries) <= 16 >= len(square.keys)
            sees = local_attention.visible(mask, square, pairs.device)
            shape = len(square.queries), len(square.keys)
            sees = torch.ones(shape, dtype=torch.bool) if sees is None else sees
            assert sees.any(1).all()
            pairs[square.queries.start : square.queries.stop, square.keys.start : square.keys.stop] += sees
    ahead = torch.arange(len(pairs)) - torch.arange(len(pairs)).unsqueeze(1)
    document_of = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    wanted = (document_of == document_of.unsqueeze(1)) & ((ahead <= 0) | (not is_causal))
    assert torch.equal(pairs, (wanted & (ahead.abs() < (window or len(pairs)))).long())


@pytest.mark.parametrize("function", [attention, ring_attention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    case = layout(5)
    wanted = expected(case)
    inputs = [one.to(dtype).requires_grad_() for one in (case.q, case.k, case.v)]
    output = function(*inputs, case.mask, None)
    gradients = torch.autograd.grad(output, inputs, case.gradient.to(dtype))
    for one, other in zip((output, *gradients), wanted, strict=True):
        assert one.dtype == dtype
        assert torch.allclose(one.double(), other, atol=0.1 if dtype == torch.bfloat16 else 1e-5)


def test_merging_parts() -> None:
    o, lse = merge(
        (torch.tensor([1.0], dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)),
        (torch.tensor([3.0], dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64).log()),
    )
    assert o.item() == pytest.approx(2.5, abs=1e-15)
    assert lse.item() == pytest.approx(torch.tensor(4.0, dtype=torch.float64).log().item(), abs=1e-15)


def test_the_scale() -> None:
    case = layout(3)
    for function in (attention, ring_attention):
        found = function(case.q, case.k, case.v, case.mask, None, scale=0.5)
        scaled = function(case.q * 0.5 * case.q.shape[3] ** 0.5, case.k, case.v, case.mask, None)
        assert torch.allclose(found, scaled, rtol=0, atol=CLOSE)


def test_torchs_kernel_takes_the_packing() -> None:
    """Shapes only: tensors without data."""
    from torch.nn.attention.varlen import varlen_attn

    def empty(heads: int, length: int) -> torch.Tensor:
        return torch.empty(2, heads, length, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)

    for options in ({"window": 3}, {}, {"is_causal": False}):
        mask = DocumentMask.from_lengths([[3, 3, 8, 2], [16]], **options)  # type: ignore[arg-type]
        q, k, v = empty(4, 8), empty(2, 16), empty(2, 16)
        output = attend_packed(q, k, v, AttentionCall(mask, 0.25, 16, 0, 2), varlen_attn)
        gradients = torch.autograd.grad(output, (q, k, v), torch.empty_like(output))
        assert [each.shape for each in (output, *gradients)] == [q.shape, q.shape, k.shape, v.shape]

"""Chunks, masks, spans and the balance of context parallelism: the numbers of Llama 3's example, and bad input."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from byteps_py.errors import UsageError
from byteps_py.parallel.context.distributed_attention import attention
from byteps_py.parallel.context.document_mask import DocumentMask, cumulative_lengths, spans_of
from byteps_py.parallel.context.head_tail import (
    ContextBalance,
    balance,
    contiguous_chunks,
    gathered_bytes,
    head_tail_chunks,
    padded_length,
)
from byteps_py.parallel.context.sequences import positions, shard_sequence, token_mean_loss, unshard_sequence

EXAMPLE = [3, 3, 8, 2]


def test_a_rank_holds_an_early_and_a_late_chunk() -> None:
    assert head_tail_chunks(16, 2, 0) == (range(4), range(12, 16))
    assert head_tail_chunks(16, 2, 1) == (range(4, 8), range(8, 12))
    assert head_tail_chunks(7, 1, 0) == (range(7),)
    for cp in range(1, 6):
        held = sorted(place for rank in range(cp) for chunk in head_tail_chunks(60 * cp, cp, rank) for place in chunk)
        assert held == list(range(60 * cp))


@pytest.mark.parametrize(("length", "cp", "padded"), [(17, 2, 20), (3, 2, 4), (1, 4, 8), (0, 3, 6), (8192, 3, 8196)])
def test_lengths_that_are_to_be_padded(length: int, cp: int, padded: int) -> None:
    assert padded_length(length, cp) == padded
    for chunks in (head_tail_chunks, contiguous_chunks):
        with pytest.raises(UsageError, match=rf"{length} tokens .* = {2 * cp} chunks .* pad it to {padded} tokens"):
            chunks(length, cp, 0)


def test_the_spans_of_the_example() -> None:
    mask = DocumentMask.from_lengths(EXAMPLE)
    early, late = (spans_of(mask, EXAMPLE, chunk) for chunk in head_tail_chunks(16, 2, 0))
    assert cumulative_lengths(early) == ([0, 3, 4], [0, 3, 4])
    assert range(early[0].keys.start, early[-1].keys.stop) == range(4)
    assert cumulative_lengths(late) == ([0, 2, 4], [0, 8, 10])
    assert range(late[0].keys.start, late[-1].keys.stop) == range(6, 16)


def test_the_balance_of_the_example() -> None:
    assert balance(DocumentMask.from_lengths(EXAMPLE), 2) == ContextBalance((25, 26), (15, 36))
    assert balance(DocumentMask.causal(16), 2) == ContextBalance((68, 68), (36, 100))
    assert balance(DocumentMask.from_lengths([EXAMPLE, [16]]), 2) == ContextBalance((93, 94), (51, 136))
    assert balance(DocumentMask.causal(16), 2).imbalance == 1
    assert balance(DocumentMask.from_lengths([4, 12]), 2).imbalance == 52 / 44


def test_the_balance_counts_each_pair() -> None:
    rng = random.Random(0)
    for _ in range(100):
        cp = rng.randint(1, 4)
        length = 2 * cp * rng.randint(1, 5)
        cuts = sorted({0, length, *(rng.randrange(length) for _ in range(rng.randint(0, 4)))})
        lengths = [end - start for start, end in itertools.pairwise(cuts)]
        is_causal, window = rng.random() < 0.5, rng.choice([None, rng.randint(1, length)])
        document = [number for number, each in enumerate(lengths) for _ in range(each)]
        keys = [
            sum(
                document[i] == document[j] and (j <= i or not is_causal) and (window is None or abs(i - j) < window)
                for j in range(length)
            )
            for i in range(length)
        ]
        found = balance(DocumentMask.from_lengths(lengths, is_causal=is_causal, window=window), cp)
        for chunks, pairs in ((head_tail_chunks, found.head_tail), (contiguous_chunks, found.contiguous)):
            assert pairs == tuple(
                sum(keys[place] for chunk in chunks(length, cp, rank) for place in chunk) for rank in range(cp)
            )


def test_gathered_bytes() -> None:
    assert gathered_bytes(8192, 4, 8, 128, 2) == 24 * 2**20
    assert gathered_bytes(8192, 1, 8, 128, 2) == 0


@pytest.mark.parametrize(
    ("tokens", "lengths"),
    [
        ([5, 6, 2, 2, 7, 8], ((3, 1, 2),)),
        ([[5, 6, 2], [2, 5, 6]], ((3,), (1, 2))),
        ([5], ((1,),)),
        ([2], ((1,),)),
        (torch.tensor([[5, 2, 5]], dtype=torch.int32), ((2, 1),)),
        (np.array([2, 5, 5], dtype=np.uint8), ((1, 2),)),
    ],
)
def test_documents_end_with_their_last_token(tokens: Any, lengths: tuple[tuple[int, ...], ...]) -> None:
    assert DocumentMask.from_tokens(tokens, eos_id=2).lengths == lengths


def test_lengths_may_come_as_tensors() -> None:
    mask = DocumentMask.from_lengths(torch.tensor([[3, 5], [4, 4]]), window=3)  # type: ignore[arg-type]
    assert mask == DocumentMask(((3, 5), (4, 4)), True, 3)
    assert hash(mask) == hash(DocumentMask.from_lengths([[3, 5], [4, 4]], window=3))
    assert DocumentMask.from_lengths(np.array([3, 5])) == DocumentMask(((3, 5),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("document 1 of row 0 has 0 tokens: leave it out", lambda: DocumentMask.from_lengths([3, 0, 5])),
        ("document 0 of row 1 has -1 tokens", lambda: DocumentMask.from_lengths([[3], [-1, 4]])),
        ("row 1 have 7 tokens, those of row 0 8: pad", lambda: DocumentMask.from_lengths([[8], [3, 4]])),
        ("without tokens", lambda: DocumentMask.from_lengths([])),
        ("without tokens", lambda: DocumentMask.from_tokens([], 2)),
        ("without tokens", lambda: DocumentMask.causal(0)),
        ("document is 2.5: give an integer", lambda: DocumentMask.from_lengths([2.5, 3])),  # type: ignore[list-item]
        ("give a list, or a list for each row", lambda: DocumentMask.from_lengths([2, [3]])),  # type: ignore[list-item]
        ("give a list", lambda: DocumentMask.from_lengths(16)),  # type: ignore[arg-type]
        ("window of 0 tokens leaves each query without a key", lambda: DocumentMask.causal(8, window=0)),
        ("window is 1.5", lambda: DocumentMask.full(8, window=1.5)),  # type: ignore[arg-type]
        ("dtype torch.float32: give integers", lambda: DocumentMask.from_tokens(torch.zeros(4), 2)),
        ("dtype bool", lambda: DocumentMask.from_tokens([True, False], 2)),
        ("integers in rows of one length", lambda: DocumentMask.from_tokens([[1, 2], [3]], 2)),
        (r"shape \(1, 1, 2\): give \(S,\)", lambda: DocumentMask.from_tokens([[[1, 2]]], 2)),
        ("eos_id is '2': give an integer", lambda: DocumentMask.from_tokens([1, 2], "2")),  # type: ignore[arg-type]
        ("0 ranks", lambda: balance(DocumentMask.causal(8), 0)),
        ("0 ranks", lambda: gathered_bytes(8192, 0, 8, 128, 2)),
        ("cannot be cut", lambda: balance(DocumentMask.causal(9), 2)),
    ],
)
def test_bad_masks(words: str, make: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match=words):
        make()


X = torch.zeros(2, 4, 6, 8)
MASK = DocumentMask.causal(6)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (r"q has the shape \[4, 6, 8\]: give \(batch, heads", (X[0], X, X, MASK)),
        ("k is torch.float64 on cpu, q is torch.float32", (X, X.double(), X, MASK)),
        (r"v has the shape \[2, 4, 5, 8\], q \[2, 4, 6, 8\]", (X, X, X[:, :, :5], MASK)),
        (r"k has the shape \[1, 4, 6, 8\], q \[2, 4, 6, 8\]", (X, X[:1], X, MASK)),
        ("q has head_dim 8, k has 7", (X, X[..., :7], X, MASK)),
        ("4, 3, 3 heads", (X, X[:, :3], X[:, :3], MASK)),
        ("4, 2, 1 heads", (X, X[:, :2], X[:, :1], MASK)),
        ("4, 0, 0 heads", (X, X[:, :0], X[:, :0], MASK)),
        ("int64: give floating-point", (X.long(), X.long(), X.long(), MASK)),
        ("5 tokens, the sequence has 6", (X, X, X, DocumentMask.causal(5))),
        ("mask has 3 rows, the batch has 2", (X, X, X, DocumentMask.from_lengths([[6]] * 3))),
        ("mask is a Tensor: give a DocumentMask", (X, X, X, torch.ones(6, 6))),
    ],
)
def test_bad_calls(words: str, given: Any) -> None:
    with pytest.raises(UsageError, match=words):
        attention(*given, None)


def test_bad_arguments_of_sequences_and_losses() -> None:
    x = torch.zeros(2, 3)
    for words, call in {
        "dim=2: the tensor has 2 dimensions": lambda: shard_sequence(x, None, 2),
        "gradient='mean': give 'sum' or 'own'": lambda: unshard_sequence(x, None, 1, gradient="mean"),  # type: ignore[arg-type]
        "mask have 4 tokens, the sequence has 5": lambda: positions(5, None, mask=DocumentMask.causal(4)),
        "group is a str: give a process group": lambda: positions(5, "cp"),  # type: ignore[arg-type]
        "loss_sum is torch.float32 of the shape": lambda: token_mean_loss(x, 3, None),
        "loss_sum is torch.int64": lambda: token_mean_loss(torch.tensor(1), 3, None),
        "token_count is -1": lambda: token_mean_loss(x.sum(), -1, None),
        "reduction='max'": lambda: token_mean_loss(x.sum(), 1, None, reduction="max"),  # type: ignore[arg-type]
    }.items():
        with pytest.raises(UsageError, match=words):
            call()


def test_without_a_group_a_shard_is_the_whole() -> None:
    x = torch.randn(2, 3)
    assert torch.equal(unshard_sequence(shard_sequence(x, None, 1), None, 1), x)
    assert positions(3, None).tolist() == [0, 1, 2]
    assert positions(3, None, mask=DocumentMask.from_lengths([1, 2])).tolist() == [[0, 0, 1]]
    assert token_mean_loss(torch.tensor(6.0), torch.tensor(4), None).item() == 1.5


def test_masks_and_plans_need_no_torch() -> None:
    modules = ("head_tail", "document_mask")
    lines = "; ".join(f"import byteps_py.parallel.context.{name}" for name in modules)
    program = f"import sys; {lines}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0

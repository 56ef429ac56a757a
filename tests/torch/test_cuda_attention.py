"""Attention of documents on a GPU, by torch's kernel for sequences of different lengths, beside its definition."""

from __future__ import annotations

import pytest
import torch

from byteps_py.parallel.context.distributed_attention import attention, ring_attention
from byteps_py.parallel.context.document_mask import DocumentMask
from byteps_py.parallel.context.local_attention import varlen_kernel

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LENGTHS = [[700, 1, 323], [1024]]
LENGTH = 1024


def visible(window: int | None, is_causal: bool) -> torch.Tensor:
    document = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS])
    ahead = torch.arange(LENGTH) - torch.arange(LENGTH).unsqueeze(1)
    sees = ((ahead <= 0) | (not is_causal)) & (ahead.abs() < (window or LENGTH))
    return ((document.unsqueeze(1) == document.unsqueeze(2)) & sees).unsqueeze(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize(("window", "is_causal"), [(None, True), (200, True), (None, False)])
@pytest.mark.parametrize("function", [attention, ring_attention])
def test_half_precision(function, window, is_causal, heads, dtype) -> None:
    mask = DocumentMask.from_lengths(LENGTHS, window=window, is_causal=is_causal)
    rng = torch.Generator().manual_seed(1)
    given = [torch.randn(2, count, LENGTH, 64, generator=rng).to(dtype) for count in (4, heads, heads, 4)]
    q, k, v, gradient = (one.double() for one in given)
    wide = [one.requires_grad_() for one in (q, k, v)]
    scores = q @ k.repeat_interleave(4 // heads, 1).transpose(-1, -2) / 8
    weights = scores.masked_fill(~visible(window, is_causal), -torch.inf).softmax(-1)
    wanted = weights @ v.repeat_interleave(4 // heads, 1)
    expected = [wanted, *torch.autograd.grad(wanted, wide, gradient)]

    own = [one.cuda().requires_grad_() for one in given[:3]]
    if function is attention:
        assert varlen_kernel(own[0], own[2], mask) is not None
    output = function(*own, mask, None)
    found = [output, *torch.autograd.grad(output, own, given[3].cuda())]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        error = (one.cpu().double() - other).norm() / other.norm()
        assert error < 1e-2, error

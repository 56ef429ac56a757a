"""What the features share: values that every rank knows of every rank, and references computed from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

from byteps_py.torch.collectives import context

FEATURES: dict[str, Callable[[], None]] = {}


def feature(function: Callable[[], None]) -> Callable[[], None]:
    """Have ``function`` run, in the order of definition."""
    FEATURES[f"{function.__module__.rpartition('.')[2]}.{function.__name__}"] = function
    return function


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers: sums of them are exact in any order, also in float16 and after a division by 4."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    numbers = torch.randint(0, 9, shape, generator=generator) * 4
    return (numbers + 1j * numbers.flip(0)).to(dtype) if dtype.is_complex else numbers.to(dtype)


def same(found: torch.Tensor | Sequence[torch.Tensor], expected: torch.Tensor | Sequence[torch.Tensor]) -> None:
    """Equal, bit for bit."""
    if isinstance(found, torch.Tensor):
        found, expected = [found], [expected]  # type: ignore[list-item]
    assert len(found) == len(expected), f"{len(found)} tensors, expected {len(expected)}"
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        one, other = one.detach(), other.detach()
        assert one.dtype == other.dtype, f"tensor {number}: {one.dtype}, expected {other.dtype}"
        as_is = one.dtype.itemsize > 1 or one.dtype in (torch.bool, torch.int8, torch.uint8)
        equal = torch.equal(one, other) if as_is else torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        assert equal, f"tensor {number}: {one}, expected {other}"


def raises(kind: type[BaseException], text: str, action: Callable[[], object]) -> None:
    with pytest.raises(kind) as raised:
        action()
    assert text in str(raised.value), f"{raised.value!r} does not say {text!r}"


def machines() -> list[int]:
    """Ranks of each machine."""
    session = context.current().session
    return [session.local_size] * session.num_machines

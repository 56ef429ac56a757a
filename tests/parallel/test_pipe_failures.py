"""A stage that raises leaves nothing behind: the next step is like any other."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.utils import checkpoint as torchs

import byteps_py as bps
from byteps_py.errors import PipelineError
from byteps_py.parallel.pipe.skips import MAIN
from byteps_py.parallel.pipe.stage_runner import StageRunner


def as_in_torch_2_11(function: Callable[..., Any], *arguments: Any, use_reentrant: bool) -> Any:
    """torch's checkpoint as it was up to torch 2.11: it does not notice that ``function`` raises."""
    assert not use_reentrant
    generator = torchs._checkpoint_without_reentrant_generator(
        function, True, torchs.noop_context_fn, torchs._DEFAULT_DETERMINISM_MODE, False, True, *arguments
    )
    next(generator)
    result = function(*arguments)
    assert next(generator, "ended") == "ended"
    return result


class Stage(nn.Module):
    """Multiplies by a weight, and counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.passes, self.fails = 0, False
        self.seen: weakref.ref[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        result = (x * self.weight).tanh()
        self.seen = weakref.ref(result)
        if self.fails:
            raise ValueError("a bad batch")
        return result


@pytest.mark.parametrize("checkpoint", [torchs.checkpoint, as_in_torch_2_11])
def test_a_stage_that_is_to_be_repeated_and_raises(
    checkpoint: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", checkpoint)
    stage = Stage()
    runs = StageRunner(stage, recompute=True)
    stage.fails = True
    with pytest.raises(ValueError, match="a bad batch") as raised:
        runs.forward(0, {MAIN: torch.ones(3, 2)})
    assert raised.value.__traceback__ is not None  # so its frames live on
    x = torch.full((2,), 3.0, requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, 6.0]
    assert stage.passes == 1

    stage.fails = False
    runs.forward(1, {MAIN: torch.ones(3, 2, requires_grad=True)})
    runs.backward(1, {MAIN: [torch.ones(3, 2)]})
    assert stage.weight.grad is not None
    torch.testing.assert_close(stage.weight.grad, 3 * (1 - torch.ones(2).tanh() ** 2))
    assert stage.passes == 3


@pytest.fixture(scope="module", params=[False, True], ids=["kept", "recomputed"])
def pipe(request: pytest.FixtureRequest) -> Iterator[bps.parallel.Pipeline]:
    """Of one stage, on one rank. gloo's sockets stay open after the group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield bps.parallel.Pipeline([Stage()], "gpipe", 1, recompute=request.param)
    dist.destroy_process_group()


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
def test_the_tensors_of_a_failed_step_are_free_when_its_error_is(pipe: bps.parallel.Pipeline) -> None:
    (stage,) = pipe.stages.values()
    assert isinstance(stage, Stage)
    stage.fails = True
    with pytest.raises(PipelineError, match="ValueError: a bad batch"):
        pipe.step(torch.ones(3, 2), torch.ones(3, 2), nn.functional.mse_loss)
    assert stage.seen is not None
    assert stage.seen() is None

    stage.fails = False
    loss = pipe.step(torch.ones(3, 2), torch.zeros(3, 2), nn.functional.mse_loss)
    assert loss.item() == pytest.approx(torch.ones(()).tanh().item() ** 2)

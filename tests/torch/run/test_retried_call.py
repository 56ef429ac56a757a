"""What RunState.retry keeps of a call, and what it refuses: retried_call.py, model_state.py, whole_steps.py."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from byteps_py.errors import CommunicationError, UsageError
from byteps_py.torch.gradients.hosted.stepper import StepTiming
from byteps_py.torch.gradients.hosted.timings import InBackwardTiming
from byteps_py.torch.gradients.hosted.whole_steps import make_steps_whole
from byteps_py.torch.run.retried_call import RetriedCall, RunParts


class Step:
    """A call of a function with ``batch``, for a model with a buffer. ``said``: what was put back of the run."""

    def __init__(self, batch: torch.Tensor, has_begun: bool = False) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.said: list[Any] = []
        params = list(self.model.parameters())
        stepper: Any = SimpleNamespace(
            wrapped=SimpleNamespace(params=params, passes=SimpleNamespace(has_begun=has_begun))
        )
        run = RunParts(self.model, lambda: {"scale": 2.0}, self.said.append)
        self.call = RetriedCall(run, stepper, functools.partial(self._compute, batch))

    def _compute(self, batch: torch.Tensor) -> torch.Tensor:
        for param in self.model.parameters():
            param.grad = None
        loss: torch.Tensor = self.model(batch).square().sum()
        loss.backward()
        return loss.detach()


def test_a_call_that_is_made_again_finds_what_it_found_at_first() -> None:
    one = Step(torch.randn(4, 2))
    before, mean = one.call.state(), one.model[1].running_mean.clone()
    first = one.call.make()
    one.model.eval()
    one.call.put_back(before)
    assert torch.equal(one.model[1].running_mean, mean)
    assert one.model.training
    assert all(param.grad is None for param in one.model.parameters())
    assert one.said == [{"scale": 2.0}]
    assert torch.equal(one.call.make(), first)


def test_a_gradient_that_was_there_before_is_the_functions_to_zero() -> None:
    one = Step(torch.randn(4, 2))
    one.call.make()
    before = one.call.state()
    one.call.make()  # others take their place
    one.call.put_back(before)
    assert all(param.grad is None for param in one.model.parameters())
    one.call.make()
    before = one.call.state()
    for param in one.model.parameters():
        assert param.grad is not None
        param.grad.zero_()
    with pytest.raises(CommunicationError, match="without set_to_none=False"):
        one.call.put_back(before)


def test_a_batch_that_has_changed_can_not_be_used_again() -> None:
    batch = torch.randn(4, 2)
    one = Step(batch)
    before = one.call.state()
    batch.add_(1)
    with pytest.raises(CommunicationError, match=r"of shape \[4, 2\], was changed in place"):
        one.call.put_back(before)


def test_gradients_without_a_step_are_refused() -> None:
    with pytest.raises(UsageError, match=r"call optimizer.step\(\), in one function"):
        Step(torch.randn(4, 2), has_begun=True).call.make()


def test_steps_in_the_backward_pass_are_refused() -> None:
    early = InBackwardTiming.__new__(InBackwardTiming)
    with pytest.raises(UsageError, match="does not go together with step_in_backward"):
        make_steps_whole(SimpleNamespace(timing=early))  # type: ignore[arg-type]
    usual: Any = SimpleNamespace(timing=StepTiming())
    timing = usual.timing
    make_steps_whole(usual)  # no ranks are started again
    assert usual.timing is timing

"""Gradients of 16-bit parameters in float32: accumulated over micro-batches, summed over ranks, and rounded once.

A sum in bfloat16 keeps 8 bits: of many micro-batches, the later ones are rounded away. Llama 3 (section 6.2)
accumulates the gradients of micro-batches in float32, and reduces them over data-parallel ranks in float32; passes stay
in bfloat16.

    Float32Gradients    for a training loop: hooks move gradients to buffers, with any torch
    StepGradients       for a pipeline's step: autograd itself adds in float32, from torch 2.10 on

Autograd's threads call the hooks; one thread calls all else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from byteps_py.errors import UsageError

#: Gradients are reduced together up to this size.
BUCKET_BYTES = 25 << 20
_LOW_PRECISION = (torch.bfloat16, torch.float16)


class GradientSum:
    """Gradients of ``parameters``, of ``dtype`` and one device, on their way to their sums over the ranks of ``group``:
    one message, which also counts, for each parameter, the ranks that have a gradient. All ranks construct it alike."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
    ) -> None:
        pieces = [
            torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
            if gradient is None
            else gradient.reshape(-1)
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
        there = torch.tensor([float(gradient is not None) for gradient in gradients], device="cpu")
        self._parameters, self._whole = parameters, torch.cat([*pieces, there.to(pieces[0])])
        work = dist.all_reduce(self._whole, group=group, async_op=True)
        if work is None:
            raise RuntimeError("this rank is not in its own group")
        self._work = work

    def wait(self) -> Iterator[tuple[nn.Parameter, torch.Tensor | None]]:
        """Each parameter with its sum, in memory of the message; None if no rank has a gradient of it."""
        self._work.wait()
        *sums, counts = self._whole.split([*(one.numel() for one in self._parameters), len(self._parameters)])
        for parameter, total, count in zip(self._parameters, sums, counts.tolist(), strict=True):
            yield parameter, total.view_as(parameter) if count else None


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The type in which autograd accumulates: that of the parameter, or StepGradients's choice."""
    chosen: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return parameter.dtype if chosen is None else chosen


class StepGradients:
    """The gradients of one step, apart from those that ``parameters`` have: ``.grad`` is None when it begins.

    ``in_float32``: those of 16-bit parameters are float32 until ``add`` or ``discard``, except for FSDP2's, and before
    torch 2.10, which can't.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], in_float32: bool = True) -> None:
        self._earlier = [(parameter, parameter.grad) for parameter in parameters]
        self._wide = [parameter for parameter, _ in self._earlier if in_float32 and _can_widen(parameter)]
        for parameter, _ in self._earlier:
            parameter.grad = None
        for parameter in self._wide:
            parameter.grad_dtype = torch.float32

    def multiply(self, factor: float) -> None:
        """Multiply the accumulated gradients."""
        for parameter, _ in self._earlier:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def add(self) -> None:
        """Round the accumulated gradients to the parameters' types, and add them to the earlier gradients."""
        for parameter in self._wide:
            gradient = parameter.grad
            _narrow(parameter)
            if gradient is not None:
                parameter.grad = gradient.to(parameter.dtype)
        for parameter, earlier in self._earlier:
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)

    def discard(self) -> None:
        """Forget the accumulated gradients: parameters have their earlier gradients."""
        for parameter in self._wide:
            _narrow(parameter)
        for parameter, earlier in self._earlier:
            parameter.grad = earlier


def _can_widen(parameter: nn.Parameter) -> bool:
    is_trained = parameter.dtype in _LOW_PRECISION and parameter.requires_grad
    return is_trained and hasattr(parameter, "grad_dtype") and not isinstance(parameter, DTensor)


def _narrow(parameter: nn.Parameter) -> None:
    parameter.grad = None
    parameter.grad_dtype = parameter.dtype


class Float32Gradients:
    """Accumulates a model's gradients in float32: the switch of numerics.

    After each backward pass, the gradient of a parameter is added to a float32 buffer, ``parameter.main_grad`` (the
    name of Megatron-LM), and ``parameter.grad`` is freed. Then, once a step: ``reduce`` adds the buffers of the ranks,
    and ``for_step`` gives them to the optimizer.

    Args:
        model: parameters of any dtype; those of bfloat16 and float16 get buffers, others accumulate as they are.
        enabled: False: nothing is changed, and ``reduce`` adds the gradients in their own dtype.
        masters: the optimizer works on float32 copies, ``master_parameters()``, which are rounded to the model's
            parameters after each step. Without them, it gets the gradients rounded once to the parameters' dtype.

    Frozen parameters get no buffer. Parameters without a gradient on any rank keep none.

    Raises UsageError for ``masters`` without ``enabled``.

    >>> layer = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    >>> gradients = Float32Gradients(layer)
    >>> for value in (256.0, 1.0, 1.0):  # in bfloat16, 256 + 1 is 256
    ...     layer(torch.full((1, 2), value, dtype=torch.bfloat16)).backward()
    >>> layer.weight.main_grad.tolist(), layer.weight.grad
    ([[258.0, 258.0]], None)
    """

    def __init__(self, model: nn.Module, enabled: bool = True, masters: bool = False) -> None:
        if masters and not enabled:
            raise UsageError("masters=True with enabled=False: float32 copies need float32 gradients; enable both")
        self.enabled = enabled
        self._parameters = dict(model.named_parameters())
        self._masters: dict[str, nn.Parameter] = {}
        if masters:
            self._masters = {
                name: nn.Parameter(parameter.detach().float().clone()) if self._has_buffer(parameter) else parameter
                for name, parameter in self._parameters.items()
                if parameter.requires_grad
            }
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(_accumulate)
            for parameter in self._parameters.values()
            if parameter.requires_grad and self._has_buffer(parameter)
        ]

    def __enter__(self) -> Float32Gradients:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients so far, by parameter name: the buffers, float32, or the gradients of other parameters."""
        found = {}
        for name, parameter in self._parameters.items():
            self._absorb(parameter)
            gradient = _buffer(parameter)
            gradient = parameter.grad if gradient is None else gradient
            if gradient is not None:
                found[name] = gradient
        return found

    def reduce(self, group: dist.ProcessGroup | None = None, average: bool = True) -> None:
        """Add the gradients of the ranks of ``group``, in float32 (with ``enabled``), in place.

        Args:
            group: the data-parallel ranks; all of them call it once a step. Default: all ranks.
            average: divide the sums by the number of ranks.

        A rank that has no gradient for a parameter gets the sum of the others'.
        """
        members = dist.get_world_size(group)
        trained = [parameter for parameter in self._parameters.values() if parameter.requires_grad]
        for bucket in self._buckets(trained):
            own = [self._gradient(parameter) for parameter in bucket]
            dtype = torch.float32 if self._has_buffer(bucket[0]) else bucket[0].dtype
            for parameter, total in GradientSum(bucket, own, dtype, group).wait():
                if total is not None:
                    self._set_gradient(parameter, total / members if average else total.clone())

    def master_parameters(self) -> list[nn.Parameter]:
        """The float32 copies of trained parameters, for the optimizer, in the model's order. Parameters that are not of
        low precision stand for themselves. Raises UsageError without ``masters``."""
        if not self._masters:
            raise UsageError("no float32 copies are kept: Float32Gradients(model, masters=True) keeps them")
        return list(self._masters.values())

    def write_back(self) -> None:
        """Give the optimizer the gradients: ``.grad`` of the float32 copies is the buffer; without copies,
        ``parameter.grad`` is the buffer rounded to the parameter's dtype, and the buffer is freed."""
        for name, parameter in self._parameters.items():
            self._absorb(parameter)
            buffer = _buffer(parameter)
            if name in self._masters and self._masters[name] is not parameter:
                self._masters[name].grad = buffer
            elif buffer is not None:
                parameter.grad = buffer.to(parameter.dtype)
                _set_buffer(parameter, None)

    def copy_masters(self) -> None:
        """Round the float32 copies to the model's parameters, after the optimizer's step."""
        with torch.no_grad():
            for name, master in self._masters.items():
                if master is not self._parameters[name]:
                    self._parameters[name].copy_(master)

    def zero(self) -> None:
        """Forget all gradients: buffers and ``.grad``."""
        for parameter in (*self._parameters.values(), *self._masters.values()):
            parameter.grad = None
            _set_buffer(parameter, None)

    @contextmanager
    def for_step(self) -> Iterator[None]:
        """``write_back`` before, ``copy_masters`` and ``zero`` after: clip and step inside.

        If the block raises, the gradients stay.
        """
        self.write_back()
        yield
        self.copy_masters()
        self.zero()

    def close(self) -> None:
        """Remove the hooks: gradients accumulate as in plain PyTorch again. May be called again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ---- one parameter -------------------------------------------------------------------------------------------

    def _has_buffer(self, parameter: torch.Tensor) -> bool:
        return self.enabled and parameter.dtype in _LOW_PRECISION

    def _absorb(self, parameter: nn.Parameter) -> None:
        """A gradient that no hook has seen: the parameter was frozen when this object was made."""
        if self._handles and self._has_buffer(parameter) and parameter.grad is not None:
            _accumulate(parameter)

    def _gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        self._absorb(parameter)
        if self._has_buffer(parameter):
            return _buffer(parameter)
        gradient = parameter.grad
        return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient

    def _set_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        if self._has_buffer(parameter):
            _set_buffer(parameter, gradient)
        else:
            parameter.grad = gradient

    def _buckets(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Neighbours whose gradients have one dtype, up to BUCKET_BYTES together."""
        bucket: list[nn.Parameter] = []
        nbytes, kind = 0, None
        for parameter in parameters:
            dtype = torch.float32 if self._has_buffer(parameter) else parameter.dtype
            size = parameter.numel() * dtype.itemsize
            if bucket and (nbytes + size > BUCKET_BYTES or kind != (dtype, parameter.device)):
                yield bucket
                bucket, nbytes = [], 0
            bucket.append(parameter)
            nbytes, kind = nbytes + size, (dtype, parameter.device)
        if bucket:
            yield bucket


def _accumulate(parameter: torch.Tensor) -> None:
    """Move ``parameter.grad`` to the buffer. The first gradient of a step is copied, not added to zeros."""
    gradient, buffer = parameter.grad, _buffer(parameter)
    if gradient is None:
        return
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    if buffer is None:
        _set_buffer(parameter, gradient.float())
    else:
        buffer.add_(gradient)
    parameter.grad = None


def _buffer(parameter: torch.Tensor) -> torch.Tensor | None:
    return getattr(parameter, "main_grad", None)


def _set_buffer(parameter: torch.Tensor, buffer: torch.Tensor | None) -> None:
    parameter.main_grad = buffer  # type: ignore[attr-defined]

"""SyncBatchNorm: batch normalisation with the statistics of all ranks' batches together.

Owns the arithmetic of both passes (Ioffe and Szegedy, arXiv 1502.03167, section 3). Each pass takes one small sum over
the ranks, in float64: of (count, Σx, Σx²) in the forward pass, of (Σdy, Σdy·(x - mean)) in the backward pass. On cpu
and cuda. The training thread runs the forward pass, autograd's threads the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from byteps_py.errors import UsageError
from byteps_py.tensors import TensorSpec
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import wire_dtype
from byteps_py.torch.collectives.slot_view import TensorRequest
from byteps_py.torch.operations.process_sets import ProcessSet, global_process_set, group_of, prefix_of

__all__ = ["SyncBatchNorm"]

_PRIORITY = 1  # before gradients: a layer waits for the sum


class SyncBatchNorm(_BatchNorm):
    """BatchNorm over inputs of shape (N, C, ...), with the mean and variance of the batches of all ranks.

    Arguments and state are those of torch.nn.BatchNorm1d. Ranks' batches may differ in size, or be empty; all ranks
    must run the layer equally often. process_set: the ranks that share statistics; only these may train the layer.
    Inputs are on cpu or cuda, of any floating dtype; float16 and bfloat16 are computed in float32. Gradients of weight
    and bias are the rank's own: DistributedOptimizer averages them. In eval() mode ranks exchange nothing, unless
    track_running_stats=False.
    The forward pass raises UsageError (a ValueError) for an input of less than two dimensions, for a wrong number of
    channels, or if all ranks together have a single value per channel.

    >>> import torch, byteps_py as bps
    >>> bps.init()
    >>> layer = bps.SyncBatchNorm(2)
    >>> layer(torch.tensor([[1.0, 2.0], [3.0, 6.0]])).round(decimals=3)
    tensor([[-1., -1.],
            [ 1.,  1.]], grad_fn=<RoundBackward1>)
    >>> bps.shutdown()
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        # The global set is recognized by identity, which a deep copy of the layer would lose.
        self._process_set = None if process_set is global_process_set else process_set
        # All ranks construct layers in the same order, as they do optimizers.
        self._name = contexts.current().claim(prefix_of(process_set, "SyncBatchNorm"))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose batches it normalizes together."""
        group = group_of(self._process_set or global_process_set)
        return tuple(group) or tuple(range(contexts.current().session.size))

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise UsageError(f"SyncBatchNorm: expected at least 2D input (got {input.dim()}D input)")
        if input.size(1) != self.num_features:
            raise UsageError(
                f"SyncBatchNorm: the layer has {self.num_features} channels, the input {input.size(1)} "
                f"(of shape {list(input.shape)})"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` of shape (N, C, ...), normalized; the same shape and dtype. Waits for the other ranks."""
        self._check_input_dim(input)
        running_mean, running_var = self.running_mean, self.running_var
        if not self.training and running_mean is not None:
            return functional.batch_norm(input, running_mean, running_var, self.weight, self.bias, False, 0.0, self.eps)
        factor = 0.0 if self.momentum is None else self.momentum
        tracked = self.training and self.track_running_stats
        if tracked and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        context = contexts.current()
        group = group_of(self._process_set or global_process_set)
        if (len(group) or context.session.size) == 1:
            return functional.batch_norm(
                input,
                running_mean if tracked else None,
                running_var if tracked else None,
                self.weight,
                self.bias,
                True,
                factor,
                self.eps,
            )
        total = _Total(context, self._name, group)
        output, mean, var, count = _Normalize.apply(input, self.weight, self.bias, self.eps, total)  # type: ignore[no-untyped-call]
        if tracked and running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean.dtype), factor)
                running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), factor)
        result: torch.Tensor = output
        return result

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """``module`` with a SyncBatchNorm in place of each BatchNorm in it. They share parameters and buffers."""
        converted = module
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
            converted = cls(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
            converted._parameters.update(module._parameters)
            converted._buffers.update(module._buffers)
            converted.training = module.training
        for name, child in module.named_children():
            setattr(converted, name, cls.convert_sync_batchnorm(child, process_set))
        return converted


class _Total:
    """Sums of small vectors over the ranks, for one layer."""

    def __init__(self, context: Context, name: str, group: tuple[int, ...]) -> None:
        self._context = context
        self._name = name
        self._group = group

    def of(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """The sum of all ranks' flat ``values``. ``what``: part of the name."""
        shape = tuple(values.shape)
        wire = wire_dtype(values.dtype, self._name)
        spec = TensorSpec(f"{self._name}.{what}", wire, shape, priority=_PRIORITY, group=self._group)
        (slot_view,) = self._context.slot_views([TensorRequest(spec, values.dtype, (shape,), values.device)])
        slot_view.contribute([values])
        slot_view.wait()
        result = torch.empty_like(values)
        slot_view.fetch([result])
        return result


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        total: _Total,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        x = _wide(input)
        channels = x.size(1)
        count = x.numel() // channels if channels else 0
        dims = [0, *range(2, x.dim())]
        own_sum = x.sum(dims, dtype=torch.float64)
        # Squares about this rank's mean, then moved to zero in float64: a sum of x² in x's own precision would lose a
        # variance that is small beside the mean.
        own_mean = own_sum / max(count, 1)
        squares = x.var(dims, correction=0).double() * count if count else torch.zeros_like(own_sum)
        squares = squares + own_mean.square() * count
        sums = total.of(torch.cat([own_sum.new_tensor([float(count)]), own_sum, squares]), "forward")
        everywhere = float(sums[0])
        if everywhere <= 1:
            raise UsageError(
                "SyncBatchNorm: expected more than 1 value per channel when training, got "
                f"{everywhere:.0f} on all ranks together (input of shape {list(input.shape)} on this one)"
            )
        mean = sums[1 : channels + 1] / everywhere
        var = (sums[channels + 1 :] / everywhere - mean.square()).clamp_(min=0)
        invstd = (var + eps).rsqrt()
        ctx.save_for_backward(input, weight, mean, invstd)
        ctx.total, ctx.count, ctx.dims = total, everywhere, dims
        ctx.mark_non_differentiable(mean, var)
        scale, shift = (None if p is None else p.to(x.dtype) for p in (weight, bias))
        output = functional.batch_norm(x, mean.to(x.dtype), var.to(x.dtype), scale, shift, False, 0.0, eps)
        return output.to(input.dtype), mean, var, everywhere

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, invstd = ctx.saved_tensors
        x, dy = _wide(input), _wide(grads[0])
        shape = [1, -1, *[1] * (x.dim() - 2)]
        centred = x - mean.to(x.dtype).view(shape)
        own_dy = dy.sum(ctx.dims, dtype=torch.float64)
        own_dy_x = (dy * centred).sum(ctx.dims, dtype=torch.float64)
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            sums = ctx.total.of(torch.cat([own_dy, own_dy_x]), "backward") / ctx.count
            mean_dy, mean_dy_x = sums.chunk(2)
            scale = invstd if weight is None else invstd * weight.double()
            slope = (mean_dy_x * invstd.square()).to(x.dtype).view(shape)
            grad = (dy - mean_dy.to(x.dtype).view(shape) - centred * slope) * scale.to(x.dtype).view(shape)
            grad_input = grad.to(input.dtype)
        if weight is not None:
            grad_weight = (own_dy_x * invstd).to(weight.dtype)
            grad_bias = own_dy.to(weight.dtype)
        return grad_input, grad_weight, grad_bias, None, None


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in the dtype of the computation."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

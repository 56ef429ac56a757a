"""An image encoder outside the pipeline: it encodes all images of a step before the pipeline's passes, and has its
backward pass after them.

On the first worker (PREPROCESSING), or on all workers, each with its part of the images (REPLICATED). Image tokens
travel in the encoder's dtype, and their gradients are summed in float32 or float64. One thread.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from byteps_py.errors import UsageError
from byteps_py.parallel.collectives import all_gathered, rank_in, reduce_scattered
from byteps_py.parallel.multimodal.model import EncodedImages, EncoderPlacement, checked_tokens, count_images
from byteps_py.parallel.pipe.buffers import PipelineBuffers, normalizes_batches
from byteps_py.parallel.pipe.groups import PipelineLayout, ReplicatedParameters, new_groups, raise_failures
from byteps_py.parallel.pipe.step_data import cut
from byteps_py.parallel.pipe.trees import flatten, unflatten

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MOST_DIMENSIONS = 8


class EncoderOutput(NamedTuple):
    """The output of a rank's encoder without its content. ``shape``: () if the rank encodes nothing."""

    requires_grad: bool
    dtype: torch.dtype
    shape: tuple[int, ...]


class PlacedEncoder:
    """``module``: the same on all ranks. ``workers``: the ranks of this copy of the pipeline. ``everyone``: those of
    all copies. All ranks construct it, and call its methods in turn: ``encode``, then ``backward`` or ``drop``.

    ``module`` is None afterwards on ranks that do not encode.
    """

    def __init__(
        self,
        module: nn.Module,
        placement: EncoderPlacement,
        layout: PipelineLayout,
        workers: dist.ProcessGroup,
        everyone: dist.ProcessGroup,
        images: EncodedImages,
        buffers: PipelineBuffers,
    ) -> None:
        self._placement, self._layout = placement, layout
        self._workers, self._everyone, self._images = workers, everyone, images
        self._is_replicated = placement is EncoderPlacement.REPLICATED
        encodes = self._is_replicated or layout.worker == 0
        self.module = module if encodes else None
        self._device = layout.device_of(module)
        #: Made by ``encode``: the root of the encoder's graph.
        self._output: torch.Tensor | None = None
        self._is_encoded = False
        (group,) = new_groups([layout.rows_of(range(layout.workers) if self._is_replicated else (0,))])
        self._replicas: ReplicatedParameters | None = None
        if group is not None and encodes:
            named = dict(module.named_parameters())
            self._replicas = ReplicatedParameters(list(named), list(named.values()), group)
            self._replicas.broadcast(layout.rank_of_first((0,)))
            buffers.share(module, layout.rank_of_first((0,)), group)
        if encodes:
            buffers.add(module)

    def encode(self, inputs: Any, parts: int) -> None:
        """Encode the images of a step, for ``parts`` parts of it; all ranks then hold the tokens of all images of their
        copy.

        Args:
            inputs: (images, text) of this copy; ranks that encode nothing ignore it. The images are one or more tensors
                of shape (images, ...). A rank of REPLICATED reads those of its part only: the r-th of p.
            parts: into which the images are cut.

        Raises PipelineError on all ranks if an encoder raises, or if the number of images is wrong, and UsageError if
        workers got images of different shapes.
        """
        self.drop()
        output, error = None, None
        try:
            if self.module is not None:
                output = self._computed(self.module, images_of(inputs), parts)
        except Exception as caught:
            error = caught
        try:
            own = self._agreed(output, error)
        finally:
            error = None  # its traceback refers to this frame, which would keep the tensors of a failed step
        if self._is_replicated and output is not None:
            tokens = all_gathered(output, self._workers, 0)
        else:
            tokens = torch.empty(own.shape, dtype=own.dtype, device=self._device) if output is None else output.detach()
            tokens = tokens.contiguous()
            dist.broadcast(tokens, self._layout.rank_of(0), group=self._workers)
        self._images.hold(tokens, parts, own.requires_grad)
        self._output = output if own.requires_grad else None
        self._is_encoded = True

    def backward(self) -> None:
        """The encoder's backward pass, with the gradients of the tokens from all workers. Gradients are added to those
        of this rank's parameters, and summed over all ranks with the same ones. Raises UsageError without ``encode``,
        and PipelineError on all ranks if an encoder raises."""
        if not self._is_encoded:
            raise UsageError("the image encoder has no backward pass without encode() before, in the same step")
        if self._images.requires_grad:
            gradients = self._images.gradients
            if self._is_replicated:
                gradients = reduce_scattered(gradients, self._workers, 0)
            else:
                dist.reduce(gradients, self._layout.rank_of(0), group=self._workers)
            error = None
            if self._output is not None:
                try:
                    torch.autograd.backward([self._output], [gradients.to(self._output.dtype)])
                except Exception as caught:
                    error = caught
            try:
                self._sum(error)
            finally:
                error = None  # see ``encode``
        self.drop()

    def drop(self) -> None:
        """Free the tokens and the encoder's graph: the step has ended, or failed."""
        self._images.drop()
        self._output, self._is_encoded = None, False

    def _sum(self, error: Exception | None) -> None:
        """Sum the gradients of the encoder's copies. Raises PipelineError on all ranks if one of them has an error."""
        has_failed = torch.tensor([float(error is not None)], device=self._device)
        work = dist.all_reduce(has_failed, group=self._everyone, async_op=True)
        if work is None:
            raise RuntimeError("this rank is not in its own group")
        if self._replicas is not None:
            self._replicas.launch()  # at the same time: a failed step takes back its additions
            self._replicas.finish()
        work.wait()
        if has_failed.item():
            raise_failures(error, self._everyone)

    def _computed(self, module: nn.Module, images: Any, parts: int) -> torch.Tensor:
        """The tokens of this rank's part of the images. Raises UsageError, and the errors of the encoder."""
        count, workers = count_images(images), self._layout.workers
        if count % parts:
            raise UsageError(
                f"{count} images can't be cut for {parts} micro-batches (or parts of them): give a multiple"
            )
        if self._is_replicated:
            if count % workers:
                raise UsageError(
                    f"{count} images can't be cut for {workers} workers, which encode equally many: give a multiple, "
                    "or choose the placement 'preprocessing'"
                )
            tensors, structure = flatten(images)
            images = unflatten([one.chunk(workers)[rank_in(self._workers)] for one in tensors], structure)
            if normalizes_batches(module) and parts % workers:
                raise UsageError(
                    f"the image encoder has a BatchNorm, so it encodes the images of one micro-batch at a time, and "
                    f"{parts} micro-batches can't be dealt out to {workers} workers: give a multiple, choose another "
                    "placement, or set the encoder to eval()"
                )
        if normalizes_batches(module):
            own = parts // workers if self._is_replicated else parts
            pieces = cut(images, own, "images")
            tokens = torch.cat([checked_tokens(module(piece), piece) for piece in pieces])
        else:
            tokens = checked_tokens(module(images), images)
        if tokens.dim() > _MOST_DIMENSIONS or tokens.dtype not in _DTYPES:
            raise UsageError(
                f"the image encoder returned {tokens.dtype} with {tokens.dim()} dimensions: image tokens have up to "
                f"{_MOST_DIMENSIONS} of them, and one of the dtypes {', '.join(map(str, _DTYPES))}"
            )
        return tokens

    def _agreed(self, output: torch.Tensor | None, error: Exception | None) -> EncoderOutput:
        """The output of an encoder of this copy. Raises PipelineError on all ranks if one of them has an error, and
        UsageError on all if outputs of a copy differ."""
        shape = () if output is None else tuple(output.shape)
        requires_grad = output is not None and output.requires_grad
        kind = 0 if output is None else _DTYPES.index(output.dtype)
        numbers = [int(error is not None), int(requires_grad), kind, len(shape), *shape]
        mine = torch.tensor([*numbers, *[0] * (4 + _MOST_DIMENSIONS - len(numbers))], device=self._device)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._everyone))]
        dist.all_gather(gathered, mine, group=self._everyone)
        told = dict(zip(dist.get_process_group_ranks(self._everyone), (one.tolist() for one in gathered), strict=True))
        if any(failed for failed, *_ in told.values()):
            raise_failures(error, self._everyone)
        outputs = {
            rank: EncoderOutput(bool(requires), _DTYPES[kind], tuple(rest[:dims]))
            for rank, (_, requires, kind, dims, *rest) in told.items()
        }
        rows = self._layout.ranks[self._layout.own[0]].tolist()
        for first, *others in rows if self._is_replicated else ():
            for other in others:
                if outputs[other] != outputs[first]:
                    raise UsageError(
                        f"image tokens differ between workers: {_text(outputs[first])} on rank {first}, "
                        f"{_text(outputs[other])} on rank {other}; give all workers of a pipeline the same images"
                    )
        return outputs[self._layout.rank_of(0)]


def images_of(inputs: Any) -> Any:
    """The images of (images, text). Raises UsageError."""
    if not isinstance(inputs, tuple) or len(inputs) != 2:
        found = f"a tuple of {len(inputs)}" if isinstance(inputs, tuple) else type(inputs).__name__
        raise UsageError(f"the inputs of a multimodal model are a tuple of two: (images, text); given: {found}")
    return inputs[0]


def _text(output: EncoderOutput) -> str:
    return f"{output.dtype} {output.shape}{'' if output.requires_grad else ' without gradients'}"

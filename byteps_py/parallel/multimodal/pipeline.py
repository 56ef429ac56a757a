"""Trains a multimodal model whose text layers are on different ranks: ``MultimodalPipeline``.

An image encoder outside the pipeline (``PlacedEncoder``) encodes all images of a step before the pipeline's passes, and
has its backward pass after them. It is on the first worker (PREPROCESSING), or on all workers, each with its part of
the images (REPLICATED). Image tokens travel in the encoder's dtype, and their gradients are summed in float32 or
float64. One thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from byteps_py.errors import UnsupportedError, UsageError
from byteps_py.parallel.collectives import all_gathered, rank_in, reduce_scattered
from byteps_py.parallel.mesh import Mesh
from byteps_py.parallel.multimodal.model import (
    EncodedImages,
    EncoderPlacement,
    MultimodalModel,
    checked_tokens,
    count_images,
)
from byteps_py.parallel.pipe.buffers import PipelineBuffers, normalizes_batches
from byteps_py.parallel.pipe.groups import PipelineLayout, ReplicatedParameters, new_groups, raise_failures
from byteps_py.parallel.pipe.pipeline import Pipeline
from byteps_py.parallel.pipe.pipeline_plan import check_modules
from byteps_py.parallel.pipe.program import Program
from byteps_py.parallel.pipe.simulator import SyncMode
from byteps_py.parallel.pipe.split import SplitModel
from byteps_py.parallel.pipe.step_data import Losses, LossFunction, Outcome, cut, parts_of
from byteps_py.parallel.pipe.trees import flatten, unflatten
from byteps_py.parallel.tensor.parallel_plan import sharded_parameters
from byteps_py.parallel.tensor.shard import Shard

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
        self._layout = layout
        self._workers, self._everyone, self._images = workers, everyone, images
        self._is_replicated = placement is EncoderPlacement.REPLICATED
        encodes = self._is_replicated or layout.worker == 0
        self.module = module if encodes else None
        self._device = layout.device_of(module)
        #: Made by ``encode``: the root of the encoder's graph.
        self._output: torch.Tensor | None = None
        self._is_encoded = False
        ranks = layout.rows_of(range(layout.workers) if self._is_replicated else (0,))
        (group,) = new_groups([("encoder", ranks)])
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


_ENCODER = "encoder."  # of the names of the encoder's parameters, as in MultimodalModel


class MultimodalPipeline(Pipeline):
    """A Pipeline of a MultimodalModel. Losses and gradients are those of one process, wherever the encoder runs.

        pipe = MultimodalPipeline(model, "dapple", micro_batches=8, placement="replicated")
        optimizer = torch.optim.AdamW(p for p in pipe.parameters() if p.requires_grad)
        for images, text, targets in batches:
            optimizer.zero_grad()
            loss = pipe.step((images, text), targets, loss_function)
            optimizer.step()

    The inputs of ``step``, ``evaluate`` and ``outputs`` are (images, text) of this data-parallel copy. Both are
    tensors, or tuples, lists and dicts of tensors; the text may also be MicroBatches. The images are cut
    into as many equal parts as there are micro-batches. "first-stage" and "preprocessing" read them on the first worker
    only, "replicated" reads the r-th of p parts on worker r.

    Gradients of the image tokens are summed in float32 (float64 for an encoder in float64) over all layers that attend
    to them. Frozen layers (``requires_grad_(False)``) compute gradients of their inputs only, and none before the first
    layer that is trained.

    Args:
        model: the same on all ranks.
        schedule, micro_batches, mesh, recompute, sync, options: as for Pipeline. The schedule is not one of torch's,
            and not one that changes weights within a step.
        placement: of the image encoder, an EncoderPlacement or its name. The parameters of the encoder are on the
            workers of the first stage, on the first worker, or on all workers.

    Raises UsageError on all ranks if arguments do not go together. A step raises PipelineError on all ranks if a stage
    or an encoder raises on one of them, or if the numbers of images do not fit.
    """

    def __init__(
        self,
        model: MultimodalModel,
        schedule: str | Program = "dapple",
        micro_batches: int = 1,
        mesh: DeviceMesh | Mesh | None = None,
        *,
        placement: str | EncoderPlacement = EncoderPlacement.REPLICATED,
        recompute: bool = False,
        sync: str | SyncMode = SyncMode.EAGER_OPT,
        **options: Any,
    ) -> None:
        self._placed: PlacedEncoder | None = None
        images = EncodedImages()
        _agree_on(placement)

        def stages(count: int) -> SplitModel:
            if not isinstance(model, MultimodalModel):
                raise UsageError(
                    f"{type(model).__name__} is no MultimodalModel: make one of the encoder and the text model"
                )
            return model.stages(count, EncoderPlacement.of(placement), images)

        super().__init__(stages, schedule, micro_batches, mesh, recompute=recompute, sync=sync, **options)
        if self._torch is not None or self._stale is not None:
            whose = "is one of torch's" if self._torch is not None else "changes weights within a step"
            raise UnsupportedError(
                f"the schedule {self.program.name} {whose}: it has no image encoder; choose dapple, interleaved, "
                "chimera, gpipe or gems"
            )
        #: The place of the encoder.
        self.placement = EncoderPlacement.of(placement)
        if self.placement is not EncoderPlacement.FIRST_STAGE:
            check_modules(self._layout, {"the image encoder": model.encoder})
            if self.program.parts_of_micro_batch > 1 and normalizes_batches(model.encoder):
                raise UsageError(
                    "the image encoder has a BatchNorm, and more='halving' computes halves of micro-batches, whose "
                    "statistics are others: choose more='direct' or 'doubling'"
                )
            self._placed = PlacedEncoder(
                model.encoder, self.placement, self._layout, self._workers, self._all, images, self._buffers
            )
            self._skip_together()
            self._first_holder |= {_ENCODER + name: 0 for name, _ in model.encoder.named_parameters()}

    # ---- training ------------------------------------------------------------------------------------------

    def evaluate(self, inputs: Any, targets: Any, loss_fn: LossFunction) -> torch.Tensor:
        """Like Pipeline.evaluate; ``inputs``: (images, text)."""
        with torch.no_grad(), self._buffers.kept_if_it_fails(), self._encoded(inputs):
            return super().evaluate(inputs, targets, loss_fn)

    def outputs(self, inputs: Any) -> dict[int, Any]:
        """Like Pipeline.outputs; ``inputs``: (images, text)."""
        with torch.no_grad(), self._buffers.kept_if_it_fails(), self._encoded(inputs):
            return super().outputs(inputs)

    # ---- the module ----------------------------------------------------------------------------------------

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank by their names in the MultimodalModel: "encoder.…" and "text_model.…"."""
        yield from super().named_parameters(remove_duplicate)
        if (encoder := self._encoder) is not None:
            yield from encoder.named_parameters(_ENCODER[:-1], remove_duplicate=remove_duplicate)

    def named_stages(self) -> Iterator[tuple[str, nn.Module]]:
        """Like Pipeline.named_stages, and the image encoder if this rank has it outside of a stage."""
        yield from super().named_stages()
        if (encoder := self._encoder) is not None:
            yield _ENCODER, encoder

    def sharded_parameters(self) -> dict[str, Shard]:
        """Like Pipeline.sharded_parameters."""
        own = {} if self._encoder is None else sharded_parameters(self._encoder)
        return {**super().sharded_parameters(), **{_ENCODER + name: shard for name, shard in own.items()}}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers of this rank, by their names in the MultimodalModel."""
        own = {} if self._encoder is None else self._encoder.state_dict(prefix=_ENCODER)
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Like Pipeline.load_state_dict."""
        super().load_state_dict(state)
        if (encoder := self._encoder) is not None:
            encoder.load_state_dict({name: state[_ENCODER + name] for name in encoder.state_dict()})

    def train(self, mode: bool = True) -> MultimodalPipeline:
        """Like nn.Module.train()."""
        super().train(mode)
        if self._encoder is not None:
            self._encoder.train(mode)
        return self

    # ---- carrying out --------------------------------------------------------------------------------------

    @property
    def _encoder(self) -> nn.Module | None:
        """The image encoder of this rank, outside the stages."""
        return None if self._placed is None else self._placed.module

    @contextlib.contextmanager
    def _encoded(self, inputs: Any) -> Iterator[None]:
        """The stages can read image tokens."""
        if self._placed is None:
            yield
            return
        self._placed.encode(inputs, self.program.parts)
        try:
            yield
        finally:
            self._placed.drop()

    def _pass_all(self, inputs: Any, targets: Any, losses: Losses) -> Outcome:
        # Pipeline.step multiplies the gradients of all parameters afterwards if losses count their terms.
        with self._encoded(inputs):
            outcome = super()._pass_all(inputs, targets, losses)
            if self._placed is not None:
                self._placed.backward()
            return outcome

    def _input_parts(self, inputs: Any) -> list[Any]:
        images, text = images_of(inputs), inputs[1]
        parts = super()._input_parts(text)
        if self._placed is None:
            each = self.program.parts_of_micro_batch
            pieces = parts_of(images, self.program.micro_batches, each, "images")
        else:
            pieces = [torch.tensor(part, device=self._device) for part in range(self.program.parts)]
        return list(zip(parts, pieces, strict=True))


def _agree_on(placement: str | EncoderPlacement) -> None:
    """Raises UsageError on all ranks if they have different placements, which would wait for each other."""
    if not dist.is_initialized():
        return  # Pipeline says so
    own = placement.value if isinstance(placement, EncoderPlacement) else str(placement)
    told = [own] * dist.get_world_size()
    dist.all_gather_object(told, own)
    for rank, other in enumerate(told):
        if other != told[0]:
            raise UsageError(
                f"rank 0 has the placement {told[0]!r} of the image encoder, rank {rank} has {other!r}: give all ranks "
                "the same one"
            )

"""Trains a multimodal model whose text layers are on different ranks: ``MultimodalPipeline``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from byteps_py.errors import UnsupportedError, UsageError
from byteps_py.parallel.mesh import Mesh
from byteps_py.parallel.multimodal.model import EncodedImages, EncoderPlacement, MultimodalModel
from byteps_py.parallel.multimodal.placed_encoder import PlacedEncoder, images_of
from byteps_py.parallel.pipe.buffers import normalizes_batches
from byteps_py.parallel.pipe.pipeline import Pipeline
from byteps_py.parallel.pipe.pipeline_plan import check_modules
from byteps_py.parallel.pipe.program import Program
from byteps_py.parallel.pipe.simulator import SyncMode
from byteps_py.parallel.pipe.split import SplitModel
from byteps_py.parallel.pipe.step_data import Losses, LossFunction, Outcome, parts_of
from byteps_py.parallel.tensor.parallel_plan import sharded_parameters
from byteps_py.parallel.tensor.shard import Shard

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

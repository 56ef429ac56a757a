"""A multimodal model: an image encoder, and a text model some of whose layers attend to the images; the image tokens of
a step's parts on one rank, and their gradients.

A layer of the text model that attends to images has the attribute ``attends_to_images = True`` and is called with
(text, image tokens); the other layers are called with the text. Neither knows where the encoder runs: the three
placements are those of Llama 3 (Chu et al., 2025, section 3.2.1, figure 6). One thread.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.program import Action, Program
from byteps_py.parallel.pipe.simulator import Durations, simulate
from byteps_py.parallel.pipe.split import SplitModel, layers, split
from byteps_py.parallel.pipe.trees import flatten


class EncoderPlacement(enum.Enum):
    """FIRST_STAGE: a part of stage 0; image tokens travel from stage to stage beside the text. Nothing else is needed,
    but stage 0 is the slowest one, and the text model must give it fewer layers.

    PREPROCESSING: the first worker encodes the whole batch before the pipeline begins, and all workers get the image
    tokens. The others wait.

    REPLICATED: each worker has a copy of the encoder, and encodes its part of the images. Takes the least time, and the
    memory of a copy on each worker.
    """

    FIRST_STAGE = "first-stage"
    PREPROCESSING = "preprocessing"
    REPLICATED = "replicated"

    @classmethod
    def of(cls, name: str | EncoderPlacement) -> EncoderPlacement:
        """The placement of this name. Raises UsageError.

        >>> EncoderPlacement.of("replicated")
        <EncoderPlacement.REPLICATED: 'replicated'>
        """
        try:
            return cls(name)
        except ValueError:
            names = ", ".join(repr(each.value) for each in cls)
            raise UsageError(f"there is no placement {name!r} of an image encoder; choose one of {names}") from None


@dataclass(frozen=True)
class _WithEncoder(Durations):
    """``encoder``: added to the first stage."""

    encoder: Durations = dataclasses.field(default_factory=Durations)

    def of(self, action: Action, parts_of_micro_batch: int) -> float:
        text = Durations.of(self, action, parts_of_micro_batch)
        return text if action.stage else text + self.encoder.of(action, parts_of_micro_batch)


def step_time(
    program: Program,
    text: Durations,
    encoder: Durations | None = None,
    placement: EncoderPlacement = EncoderPlacement.FIRST_STAGE,
) -> float:
    """The time of a step, in the unit of the durations, without the exchange of image tokens.

    T is the makespan of the text model's pipeline. FIRST_STAGE: the makespan with the encoder in stage 0. With m
    micro-batches, p workers and e = forward + backward pass of the encoder for one micro-batch, PREPROCESSING takes
    T + m·e, and REPLICATED T + m·e / p.

    Args:
        program: of the text model.
        text: of a micro-batch at one stage of the text model.
        encoder: of the images of one micro-batch; None: there is no encoder.
        placement: of the encoder.

    >>> from byteps_py.parallel.pipe.schedules import make
    >>> program = make("dapple", 4, 8)
    >>> step_time(program, Durations())
    33.0
    >>> [step_time(program, Durations(), Durations(1, 1), each) for each in EncoderPlacement]
    [43.0, 49.0, 37.0]
    """
    alone = simulate(program, text).makespan
    if encoder is None:
        return alone
    if placement is EncoderPlacement.FIRST_STAGE:
        fields = {field.name: getattr(text, field.name) for field in dataclasses.fields(text)}
        return simulate(program, _WithEncoder(**fields, encoder=encoder)).makespan
    whole = program.micro_batches * (encoder.forward + encoder.backward)
    return alone + (whole if placement is EncoderPlacement.PREPROCESSING else whole / len(program.workers))


def encoder_share(program: Program, text: Durations, encoder: Durations, placement: EncoderPlacement) -> float:
    """The encoder's share of a step, (step - step without the encoder) / step, from 0 to 1. See ``step_time``.

    >>> from byteps_py.parallel.pipe.schedules import make
    >>> round(encoder_share(make("dapple", 4, 8), Durations(), Durations(1, 1), EncoderPlacement.REPLICATED), 3)
    0.108
    """
    return 1.0 - step_time(program, text) / step_time(program, text, encoder, placement)


class MultimodalModel(nn.Module):
    """One process trains it as it is: ``model((images, text))``. MultimodalPipeline cuts it into stages.

        class CrossAttention(nn.Module):
            attends_to_images = True

            def forward(self, text, image_tokens): ...

        text_model = nn.Sequential(embedding, block, block, CrossAttention(), block, block, CrossAttention(), head)
        for layer in text_model:
            layer.requires_grad_(isinstance(layer, CrossAttention))
        model = MultimodalModel(VisionTransformer(), text_model)

    Args:
        encoder: images -> image tokens, a floating-point tensor whose first dimension is that of the images.
        text_model: an nn.Sequential, perhaps with others inside, between whose modules the model can be cut.
        costs, cuts: of the text model's layers, by their names in it, for the cut into stages: see ``split``. Frozen
            layers compute no gradients of weights, so they cost 2/3 of the usual time; layers that attend to images
            cost the more, the longer these are.

    Raises UsageError if no layer attends to images.
    """

    def __init__(
        self,
        encoder: nn.Module,
        text_model: nn.Sequential,
        costs: Sequence[float] | Mapping[str, float] | None = None,
        cuts: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if not any(map(attends_to_images, layers(text_model).values())):
            raise UsageError(
                f"no layer of the text model attends to images; its layers: {', '.join(layers(text_model))}. Give one "
                "the attribute attends_to_images = True"
            )
        self.encoder, self.text_model = encoder, text_model
        self._costs, self._cuts = costs, cuts

    def forward(self, inputs: tuple[Any, Any]) -> Any:
        """``inputs``: (images, text). Returns the text model's output."""
        images, text = inputs
        tokens = widened(checked_tokens(self.encoder(images), images))
        return apply_layers(layers(self.text_model).values(), text, lambda: tokens)

    def stages(self, count: int, placement: EncoderPlacement, encoded: EncodedImages) -> SplitModel:
        """The stages of a pipeline, whose parameters are those of this model and have the same names. ``encoded``: the
        image tokens, unless these travel. Raises UsageError."""
        pieces = split(self.text_model, count, self._costs, self._cuts)
        travel = placement is EncoderPlacement.FIRST_STAGE
        attending = [any(map(attends_to_images, layers(piece).values())) for piece in pieces]
        last = max(stage for stage, attends in enumerate(attending) if attends)
        return SplitModel(
            MultimodalStage(
                piece,
                self.encoder if travel and not stage else None,
                None if travel else encoded,
                gives_images=stage < last,
                is_last=stage == count - 1,
            )
            for stage, piece in enumerate(pieces)
        )


class MultimodalStage(nn.Module):
    """Some layers of the text model, called with (text, images), or with the text alone after the last layer that
    attends to images.

    ``images`` are: raw ones for an ``encoder``, in the first stage; their tokens, if ``encoded`` is None; else the
    number of the part whose tokens are in ``encoded``, a scalar. A stage returns the arguments of the next one; the
    last one the output. ``gives_images``: a later layer attends to images.
    """

    def __init__(
        self,
        text_model: nn.Module,
        encoder: nn.Module | None,
        encoded: EncodedImages | None,
        *,
        gives_images: bool,
        is_last: bool,
    ) -> None:
        super().__init__()
        self.encoder, self.text_model = encoder, text_model
        self._encoded = encoded
        self._gives_images, self._is_last = gives_images, is_last

    def forward(self, value: tuple[Any, ...]) -> Any:
        """See the class."""
        text, *rest = value
        images: Any = rest[0] if rest else None
        if self.encoder is not None:
            images = widened(checked_tokens(self.encoder(images), images))

        def tokens() -> torch.Tensor:
            return images if self._encoded is None else self._encoded.tokens(int(images))

        text = apply_layers(layers(self.text_model).values(), text, tokens)
        if self._is_last:
            return text
        return (text, images) if self._gives_images else (text,)


def attends_to_images(layer: nn.Module) -> bool:
    """True if ``layer`` is called with the image tokens, too."""
    return bool(getattr(layer, "attends_to_images", False))


def apply_layers(modules: Iterable[nn.Module], text: Any, tokens: Callable[[], torch.Tensor]) -> Any:
    """``text`` after these layers. Each one that attends to images gets tokens in the dtype of the text, which it alone
    uses: so the gradients of several layers are summed in the dtype of ``tokens()``, also under autocast."""
    for module in modules:
        text = module(text, _in_dtype_of(text, tokens())) if attends_to_images(module) else module(text)
    return text


def _in_dtype_of(text: Any, images: torch.Tensor) -> torch.Tensor:
    dtype = next((one.dtype for one in flatten(text)[0] if one.is_floating_point()), images.dtype)
    # Autocast would keep the cast of a leaf for later layers, and sum their gradients in the lower precision.
    return images.view_as(images) if dtype == images.dtype else images.to(dtype)


def count_images(images: Any) -> int:
    """The first dimension of all tensors in ``images``. Raises UsageError if these differ, or if there is none."""
    counts = [one.shape[0] if one.dim() else 0 for one in flatten(images)[0]]
    if not counts or len(set(counts)) > 1 or not counts[0]:
        raise UsageError(
            f"the first dimensions of the images are {counts}: give one or more tensors whose first dimension is the "
            "number of images"
        )
    return counts[0]


def checked_tokens(tokens: Any, images: Any) -> torch.Tensor:
    """``tokens`` of an encoder. Raises UsageError if they are not those of as many images."""
    count = count_images(images)
    if not isinstance(tokens, torch.Tensor) or not tokens.is_floating_point():
        found = tokens.dtype if isinstance(tokens, torch.Tensor) else type(tokens).__name__
        raise UsageError(f"the image encoder returned {found}: it returns one floating-point tensor, the image tokens")
    if not tokens.dim() or tokens.shape[0] != count:
        raise UsageError(
            f"the image encoder returned a tensor of shape {tuple(tokens.shape)} for {count} images: its first "
            "dimension is to be that of the images"
        )
    return tokens


# ---- image tokens --------------------------------------------------------------------------------------------------


def widened(tokens: torch.Tensor) -> torch.Tensor:
    """``tokens`` in float32, or in float64 if they are: the dtype in which the gradients of all layers that attend to
    them are summed (Chu et al., 2025, section 6.2)."""
    return tokens.to(torch.promote_types(tokens.dtype, torch.float32))


class EncodedImages:
    """``hold`` keeps the tokens of all images; layers read those of one part, which are leaves.

    The gradients of all parts are one tensor, float32 or float64.
    """

    def __init__(self) -> None:
        self._leaves: list[torch.Tensor] = []
        self._gradients: torch.Tensor | None = None

    def hold(self, tokens: torch.Tensor, parts: int, requires_grad: bool) -> None:
        """Keep ``tokens``, of shape (images, ...), for ``parts`` parts of equally many images. Raises UsageError."""
        if tokens.shape[0] % parts:
            raise UsageError(
                f"image tokens of {tokens.shape[0]} images can't be cut into {parts} equal parts: give a multiple"
            )
        wide = widened(tokens.detach())
        self._leaves = [piece.detach().requires_grad_(requires_grad) for piece in wide.chunk(parts)]
        self._gradients = torch.zeros_like(wide) if requires_grad else None
        if self._gradients is not None:
            # Backward passes add to them in place.
            for leaf, gradient in zip(self._leaves, self._gradients.chunk(parts), strict=True):
                leaf.grad = gradient

    def tokens(self, part: int) -> torch.Tensor:
        """The tokens of the images of ``part``: (images of a part, ...), float32 or float64. Raises UsageError if there
        are none."""
        if not 0 <= part < len(self._leaves):
            held = f"those of {len(self._leaves)} parts are there" if self._leaves else "no images are encoded"
            raise UsageError(
                f"the image tokens of part {part} are asked for, but {held}: encode the images of the step before its "
                "forward passes (MultimodalPipeline.step does)"
            )
        return self._leaves[part]

    @property
    def requires_grad(self) -> bool:
        """True if the tokens require gradients."""
        return self._gradients is not None

    @property
    def gradients(self) -> torch.Tensor:
        """The gradients of this rank's layers: (images, ...). Raises UsageError without images that require any."""
        if self._gradients is None:
            raise UsageError(
                "the gradients of image tokens are asked for, but no images are held that require them: encode the "
                "images, and make the step's passes, before the encoder's backward pass"
            )
        return self._gradients

    def drop(self) -> None:
        """Free all of it."""
        self._leaves, self._gradients = [], None

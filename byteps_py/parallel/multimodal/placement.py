"""The placements of the image encoder of a multimodal model, and its share of a step. Pure; any thread.

The three placements are those of Llama 3 (Chu et al., 2025, section 3.2.1, figure 6).
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.program import Action, Program
from byteps_py.parallel.pipe.simulator import Durations, simulate


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

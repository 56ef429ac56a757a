"""Multimodal training (Llama 3): a text model in a pipeline, some of whose layers attend to the tokens of images.

model            the image encoder and the text model; their stages; image tokens on a rank, and their gradients;
                 where the encoder runs, and which share of a step it takes
pipeline         the training; the encoder before and after the pipeline's passes
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from byteps_py.lazy_imports import import_lazily

if TYPE_CHECKING:
    from byteps_py.parallel.multimodal.model import (
        EncoderPlacement as EncoderPlacement,
        MultimodalModel as MultimodalModel,
        encoder_share as encoder_share,
        step_time as step_time,
    )
    from byteps_py.parallel.multimodal.pipeline import MultimodalPipeline as MultimodalPipeline

import_lazily(__name__)

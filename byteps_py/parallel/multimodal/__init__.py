"""Multimodal training (Llama 3): a text model in a pipeline, some of whose layers attend to the tokens of images.

model            the image encoder and the text model; their stages
placement        where the encoder runs, and which share of a step it takes
placed_encoder   the encoder before and after the pipeline's passes
encoded_images   the image tokens on a rank, and their gradients
pipeline         the training
"""

from byteps_py.parallel.multimodal.model import MultimodalModel
from byteps_py.parallel.multimodal.pipeline import MultimodalPipeline
from byteps_py.parallel.multimodal.placement import EncoderPlacement, encoder_share, step_time

__all__ = ["EncoderPlacement", "MultimodalModel", "MultimodalPipeline", "encoder_share", "step_time"]

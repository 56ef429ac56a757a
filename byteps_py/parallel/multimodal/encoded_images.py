"""The image tokens of a step's parts on one rank, and their gradients. One thread."""

from __future__ import annotations

import torch

from byteps_py.errors import UsageError


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
        """Of the images of ``part``: (images of a part, ...), float32 or float64. Raises UsageError if there are
        none."""
        if not 0 <= part < len(self._leaves):
            held = f"those of {len(self._leaves)} parts are there" if self._leaves else "no images are encoded"
            raise UsageError(
                f"the image tokens of part {part} are asked for, but {held}: encode the images of the step before its "
                "forward passes (MultimodalPipeline.step does)"
            )
        return self._leaves[part]

    @property
    def requires_grad(self) -> bool:
        """Whether the tokens require gradients."""
        return self._gradients is not None

    @property
    def gradients(self) -> torch.Tensor:
        """Those of this rank's layers: (images, ...). Raises UsageError without images that require any."""
        if self._gradients is None:
            raise UsageError(
                "the gradients of image tokens are asked for, but no images are held that require them: encode the "
                "images, and make the step's passes, before the encoder's backward pass"
            )
        return self._gradients

    def drop(self) -> None:
        """Free all of it."""
        self._leaves, self._gradients = [], None

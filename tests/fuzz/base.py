"""What a target of the fuzzer is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


class Target(ABC):
    """``seeds``: well-formed inputs."""

    seeds: ClassVar[tuple[bytes, ...]]
    cost: ClassVar[int] = 1  # of one input; those that cost more get fewer

    @abstractmethod
    def feed(self, data: bytes) -> None:
        """Raises only what no input may cause."""

    def end(self) -> None:  # noqa: B027  most have nothing to say
        """What must hold after all."""

    def close(self) -> None:  # noqa: B027
        """Give back what is held."""

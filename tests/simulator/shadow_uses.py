"""Steps whose states other machines keep in step: which steps there are, and what all states are after each."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import ClassVar

from .codecs import INT8
from .hosted_uses import HostedProgram, HostedUse
from .program import Name


@dataclass(slots=True)
class ShadowProgram(HostedProgram):
    """``number_of``: by use, the number of its step; of all models that step together it is the same. ``history``: by
    model and step, all states."""

    is_steady: ClassVar[bool] = True
    number_of: dict[int, int] = field(default_factory=dict)
    history: dict[str, dict[int, list[bytes]]] = field(default_factory=dict)

    def add_steps(self, rng: random.Random, names: list[Name]) -> None:
        """More steps than others, and little beside them."""
        for _ in range(rng.choice((1, 2, 3, 5))):
            super(ShadowProgram, self).add_steps(rng, names[:1])  # slots make another class of this one

    def train(self, local_sizes: list[int]) -> None:
        super(ShadowProgram, self).train(local_sizes)
        number = 0
        for step in self.steps:
            uses = [use for use in step if isinstance(use, HostedUse) and not use.skips]
            number += bool(uses)
            for use in uses:
                self.number_of[use.id] = number
                self.history.setdefault(use.model.name, {})[number] = use.states

    def last(self, name: str, step: int) -> int:
        """The last step of a model, of those up to ``step``; 0: none."""
        return max((number for number in self.history.get(name, ()) if number <= step), default=0)


class CodedShadowProgram(ShadowProgram):
    """Servers decode the sums with which they step."""

    codec = INT8

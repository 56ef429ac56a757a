"""A rank whose optimizer's states are kept in step by other machines. Does what ShadowedSteps does."""

from __future__ import annotations

import json

import numpy as np

from byteps_py.session.base import ShadowedStep
from byteps_py.tensors import DType, Op, TensorSpec

from .hosted_rank import HostedRank
from .parts import PACED_BYTES
from .shadow_uses import ShadowProgram
from .turn import Life
from .uses import Use
from .world import InvariantError

RUN = 0xB5
MOST_ATTACHED_BYTES = 140  # two pieces and a bit
_PATIENCE_S = 30.0  # longer than any silence that it survives


def attachment(rank: int, step: int) -> bytes:
    """What a rank attaches to a step: nothing, or bytes that no other piece has, in one piece or several."""
    if (rank + step) % 4 == 3:
        return b""
    rng = np.random.default_rng((rank, step))
    return rng.bytes(1 + (37 * step + 61 * rank) % MOST_ATTACHED_BYTES)


class ShadowRank(HostedRank):
    """``begun``, ``durable``: steps. ``agreement``: what ranks make of the steps that are held for each of them.
    ``may_hang``: there may be no server that could hold anything."""

    agreement = Op.MIN
    begun = durable = 0
    is_whole = False
    may_hang = False

    def _go(self, step: list[Use]) -> Life:
        program, self.shadowed = self._shadow_program, None
        numbers = {program.number_of[use.id] for use in step if use.id in program.number_of}
        if self.session.has_shadow_servers:
            self.run = RUN
            if numbers:
                yield from self._agree(max(numbers))
                self.shadowed = ShadowedStep(self.run, max(numbers), self.durable, self.is_whole)
                self.begun = max(numbers)
        yield from super()._go(step)

    def _join_job(self) -> Life:
        yield from super()._join_job()
        self.session.state_host.paced_bytes = PACED_BYTES

    @property
    def _may_record(self) -> bool:
        """A server has taken the large record before."""
        return bool(self.session.state_host.held) and not self.session.state_host._recording

    @property
    def _shadow_program(self) -> ShadowProgram:
        if not isinstance(self._program, ShadowProgram):
            raise AssertionError("it has another program")
        return self._program

    def _agree(self, number: int) -> Life:
        """On what is held for all ranks."""
        spec = TensorSpec("held", DType.FLOAT64, (3,), self.agreement)
        (slot,) = yield from self._declare([spec])
        step, is_whole = self.session.state_host.held
        np.frombuffer(slot.input, np.float64)[:] = step, float(is_whole), -self.session.state_host.refused_step
        self.session.hand_over(slot)
        self.doing = f"waiting for what is held before step {number}"
        yield lambda: self.session.is_done(slot)
        self.session.wait(slot, 1.0)
        held = np.frombuffer(slot.result, np.float64)
        known = self.results.setdefault(-1000 - number, held.tobytes())
        if known != held.tobytes():
            raise InvariantError(f"{self.name} hears other steps that are held before step {number} than others")
        if held[0] > -held[2]:
            self.durable = max(self.durable, int(held[0]))
        self.is_whole = self.is_whole or bool(held[1])

    def has_begun_all(self) -> Life:
        if self.shadowed is None:
            return
        attached = attachment(self.number, self.shadowed.step)
        if len(attached) >= PACED_BYTES:
            self.doing = f"waiting with its record of step {self.shadowed.step}"
            yield lambda: self._has_failed or self._may_record
        common, program, step = b"", self._shadow_program, self.shadowed.step
        group = next(
            (model.gradients.group for model in program.models if self.number in model.gradients.group), ()
        )  # models of a group are one optimizer's
        if self.number == (group[0] if group else 0):
            parts = [
                [model.name, model.gradients.count, program.last(model.name, step)]
                for model in program.models
                if model.gradients.group == group and program.last(model.name, step)
            ]
            common = json.dumps({"parts": parts, "params": {}, "kinds": {}, "steps": {}, "ranks": group}).encode()
        self.session.state_host.record_step(self.shadowed, common, attached)
        self.say(f"has begun step {self.shadowed.step}, durable {self.shadowed.durable}")

    def _settle(self) -> Life:
        """It waits until all steps are held: nothing that it sent is lost for good."""
        due_s = self.world.now_s + _PATIENCE_S
        if self.begun:
            self.doing = f"waiting until step {self.begun} is held"
            self.world.after(_PATIENCE_S, self, None, self._on_arrival)
            self.world.expect_quiet(_PATIENCE_S + 1.0)
            yield lambda: self._has_failed or self.session.state_host.held[0] >= self.begun or self.world.now_s >= due_s
            held = self.session.state_host.held[0]
            if held < self.begun and not (self._has_failed or self.may_hang or self.world.faults):
                raise InvariantError(f"{self.name}: step {self.begun} is not held after {_PATIENCE_S} s, but {held}")
            self.say(f"leaves with step {held} held")
        yield from super()._settle()

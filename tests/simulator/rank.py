"""A simulated training process: the real session, and a program.

The session never blocks here: where it would, the rank first waits in the world until the answer has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, cast

import numpy as np

from byteps_py.errors import BytePSError, MismatchError, UsageError
from byteps_py.machine import local_socket
from byteps_py.session import Slot, protocol
from byteps_py.session.protocol import Kind
from byteps_py.session.remote import RemoteSession
from byteps_py.settings import Settings
from byteps_py.tensors import TensorSpec

from .local import Channel, Local
from .memory import Bytes, Memory, address_of
from .program import Program, Use
from .world import InvariantError, Process, World

#: What it yields: a time to spend, or what to wait for.
Life = Generator[float | Callable[[], bool], None, None]


class Rank(Process):
    """``error``: what ended it before its program did."""

    def __init__(
        self,
        world: World,
        memory: Memory,
        local: Local,
        settings: Settings,
        rank: int,
        program: Program,
        results: dict[int, bytes],
    ) -> None:
        super().__init__(world, f"rank {rank}")
        self.has_connected = self.has_joined = False
        self.machine = settings.worker_id
        self.doing = "to start"
        self.error: BytePSError | None = None
        self._memory = memory
        self._local = local
        self._settings = settings
        self._rank = rank
        self._program = program
        self._results = results
        self._random = world.random
        self._life = self._live()
        self._waiting: Callable[[], bool] | None = None
        self._back_at = 0  # the step with which it goes on after a join
        self._session: RemoteSession
        world.after(world.delay(), self, "starts", self._resume)

    # ---- in time -----------------------------------------------------------------------------------------

    def _resume(self) -> None:
        self._waiting = None
        try:
            for wish in self._life:
                if callable(wish):
                    if not wish():
                        self._waiting = wish
                        return
                else:
                    self.world.after(wish, self, "", self._resume)
                    return
        except BytePSError as error:
            self._fail(error)
            return
        self.world.note(self.name, "is done")
        self._leave()

    def _on_arrival(self) -> None:
        if self._waiting is not None and self._waiting():
            self._resume()

    def _fail(self, error: BytePSError) -> None:
        if not self.world.faults:
            raise InvariantError(f"{self.name}, {self.doing}: {error!r}")
        self.world.note(self.name, f"fails with {type(error).__name__}")
        self.error = error
        self._leave()

    def leave_early(self) -> None:
        """Now, without finishing."""
        self._leave()

    def _leave(self) -> None:
        if self.has_joined:
            self._session.close()
        elif self.has_connected:
            self._channel.close()
        self.exit_code = 0
        self.die()

    # ---- the program -------------------------------------------------------------------------------------

    def _live(self) -> Life:
        channel = self._channel = self._local.connect(local_socket(self._settings, "cs"), self)
        channel.on_arrival = self._on_arrival
        self.has_connected = True
        local_rank, local_size = self._settings.local_rank, self._settings.local_size
        hello = {"version": protocol.VERSION, "local_rank": local_rank, "local_size": local_size, "pid": self.pid}
        yield from self._ask(protocol.pack(Kind.HELLO, **hello), Kind.WELCOME)
        self._session = RemoteSession(cast(Any, channel), local_rank, local_size, 10.0, 60.0)
        self.has_joined = True
        if self._session.rank != self._rank:
            raise InvariantError(f"rank {self._rank} is told that it is {self._session.rank}")
        joins = [(counts[self._rank], max(counts)) for counts in self._program.joins]
        for number, step in enumerate([*self._program.steps, []]):
            while joins and joins[0][0] == number and not self._is_away(number):
                yield from self._join(len(joins))
                self._back_at = joins.pop(0)[1]
            if self._is_away(number):
                continue
            yield from self._go([use for use in step if use.specs[self._rank] is not None])
            if number in self._program.barriers:
                yield from self._barrier()

    def _is_away(self, number: int) -> bool:
        """It had joined when the others went through this step."""
        return number < self._back_at

    def _ask(self, message: bytes, answer: Kind) -> Life:
        """Send what the session is about to send, and wait for what it is about to wait for."""
        channel: Channel = self._channel
        self.doing = f"waiting for {answer.name}"
        channel.send(message)
        channel.is_muted = True
        yield lambda: any(m[0][0] in (answer, Kind.FATAL) for m in channel.take()) or channel.is_over

    def _go(self, step: list[Use]) -> Life:
        rng = self._random
        order = rng.sample(step, len(step))
        slots: dict[int, Slot] = {}
        if rng.random() < 0.4:
            early = [use for use in order if use.first is None]
            if early:
                declared = yield from self._declare([self._spec(use) for use in early])
                slots = dict(zip([use.id for use in early], declared, strict=True))
        for use in order:
            yield self._pause()
            if use.id not in slots:
                if use.first is not None:
                    yield from self._declare([use.first])
                    yield self._pause()
                (slots[use.id],) = yield from self._declare([self._spec(use)])
            yield from self._hand_over(use, slots[use.id])
        for use in rng.sample(step, len(step)):
            yield from self._wait(use, slots[use.id])
            yield self._pause()

    def _pause(self) -> float:
        return self.world.delay() if self._random.random() < 0.5 else 0.0

    def _spec(self, use: Use) -> TensorSpec:
        return replace(use.spec(self._rank), priority=self._random.randint(-3, 3))

    def _declare(self, specs: list[TensorSpec]) -> Generator[float | Callable[[], bool], None, list[Slot]]:
        session = self._session
        new = [
            spec
            for spec in specs
            if (slot := session._slots.named(spec.name)) is None or session._needs_declaration(slot, spec)
        ]
        if new:
            fields = [protocol.spec_to_json(spec) for spec in new]
            message = protocol.pack(Kind.DECLARE, request=session._requests + 1, specs=fields)
            yield from self._ask(message, Kind.DECLARED)
        return session.declare(specs)

    def _hand_over(self, use: Use, slot: Slot) -> Life:
        data = use.contribution(self._rank)
        self.doing = f"handing over {use.name} (use {use.id})"
        target = np.frombuffer(slot.input, np.uint8)
        self._check_ours(target)
        start = 0
        for cut in sorted(self._random.sample(range(len(data)), min(len(data), self._random.choice((0, 0, 1, 3))))):
            target[start:cut] = data[start:cut]
            self._session.hand_over(slot, cut)
            start = cut
            yield self._pause()
            if slot.error is not None:
                break
        if slot.error is None:
            self._check_ours(target)
            target[start:] = data[start:]
        self._session.hand_over(slot)
        self.world.note(self.name, f"has handed over {use.name} (use {use.id})")

    def _check_ours(self, target: Bytes) -> None:
        if len(target):
            self._memory.at(address_of(target), len(target))

    def _wait(self, use: Use, slot: Slot) -> Life:
        session = self._session
        self.doing = f"waiting for {use.name} (use {use.id})"
        yield lambda: session.is_done(slot)
        try:
            session.wait(slot, 1.0)
        except UsageError as error:
            if not use.is_unsupported or use.name not in str(error) or "joined" not in str(error):
                raise
            return
        except MismatchError as error:
            if not use.is_mismatch:
                raise
            self._compare(use, str(error).encode())
            if use.name not in str(error):
                raise InvariantError(f"an error does not name its tensor: {error}") from None
            return
        if use.is_unsupported:
            raise InvariantError(f"{self.name} got {use.name} (use {use.id}) though ranks have joined")
        if use.is_mismatch:
            raise InvariantError(f"{self.name} got a result of {use.name} (use {use.id}), about which ranks disagree")
        result = np.frombuffer(slot.result, np.uint8)
        self._compare(use, result.tobytes())
        result[:] = 0x5A  # the user may: it is theirs

    def _compare(self, use: Use, got: bytes) -> None:
        """All ranks see the same; results are what the contract says."""
        expected = self._results.setdefault(use.id, got)
        if got != expected:
            raise InvariantError(f"{self.name} got another result of {use.name} (use {use.id}) than it should")
        self.world.note(self.name, f"has got {use.name} (use {use.id})")

    def _join(self, number: int) -> Life:
        self.world.note(self.name, "joins")
        yield from self._ask(protocol.pack(Kind.JOIN), Kind.JOINED)
        last = self._session.join(1.0)
        if self._results.setdefault(-number, b"%d" % last) != b"%d" % last:
            raise InvariantError(f"{self.name} hears that rank {last} joined last, others hear otherwise")
        if self._goes_on_without(last, self._program.joins[-number]):
            raise InvariantError(f"{self.name} hears that rank {last} joined last, which it went on without")

    def _goes_on_without(self, other: int, counts: list[int]) -> bool:
        """It got results that there can only be because ``other`` had joined before."""
        uses = [use for step in self._program.steps[counts[other] : counts[self._rank]] for use in step]
        specs = [use.specs[self._rank] for use in uses if not use.is_unsupported]
        return any(spec is not None and spec.nbytes and other in spec.members(len(counts)) for spec in specs)

    def _barrier(self) -> Life:
        session = self._session
        message = protocol.pack(Kind.BARRIER, sequence=session._barriers + 1)
        yield from self._ask(message, Kind.RELEASED)
        session.barrier(1.0)

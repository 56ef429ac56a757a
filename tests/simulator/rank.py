"""A simulated training process: the real session, and a program.

The session never blocks here: where it would, the rank first waits in the world until the answer has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, cast

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError, StallError
from byteps_py.session import Slot
from byteps_py.session.service.remote import RemoteSession
from byteps_py.system.machine import local_socket
from byteps_py.tensors import TensorSpec
from byteps_py.wire import rank_link as protocol

from .local import Channel, Local
from .memory import Memory
from .program import Program
from .turn import Life, Turn
from .uses import Use
from .world import InvariantError, Process, World

PATIENCE_S = 30.0
_NOTICE_S = 2.0  # until a deadline that has passed is noticed, and told


class Rank(Process):
    """``error``: what ended it before its program did."""

    chunk_bytes: int

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
        self.host = f"machine {self.machine}"
        self.doing = "to start"
        self.error: BytePSError | None = None
        self.memory = memory
        self._local = local
        self._settings = settings
        self.number = rank
        self._program = program
        self.results = results
        self.random = world.random
        self._life = self._live()
        self._waiting: Callable[[], bool] | None = None
        self._back_at = 0  # the step with which it goes on after a join
        self.session: RemoteSession
        self.in_chunks: set[int] = set()
        self.synced_in = 0  # the group whose state it has
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
        """Now, without finishing, and whoever needs what it gave."""
        if self.has_joined:
            self.session._has_given = False
        self._leave()

    def _leave(self) -> None:
        if self.has_joined:
            self.session.close()
        elif self.has_connected:
            self._channel.close()
        self.exit_code = 0
        self.die()

    # ---- the program -------------------------------------------------------------------------------------

    def _connect(self) -> Channel:
        return self._local.connect(local_socket(self._settings, "cs"), self)

    def _new_session(self) -> type[RemoteSession]:
        no_stack = staticmethod(lambda: None)  # no process has one of its own
        parts = {"map_segment": self.memory.map_segment, "open_stack_dump": no_stack, "chunk_bytes": self.chunk_bytes}
        return type("SimulatedSession", (RemoteSession,), parts)

    def _join_job(self) -> Life:
        settings = self._settings
        channel = self._channel = self._connect()
        channel.on_arrival = self._on_arrival
        self.has_connected = True
        local_rank, local_size = settings.local_rank, settings.local_size
        hello = protocol.Hello.of(local_rank, local_size, self.pid, self.synced_in)
        patience_s = max(settings.start_timeout_s, settings.elastic_timeout_s if settings.elastic else 0) + PATIENCE_S
        if not (yield from self._ask_patiently(hello, protocol.Welcome, patience_s)):
            raise StallError("the communication service of this machine did not answer")
        self.session = self._new_session()(cast(Any, channel), local_rank, local_size, 10.0, 60.0, 10.0, self.synced_in)
        self.has_joined = True

    def _live(self) -> Life:
        yield from self._join_job()
        if self.session.rank != self.number:
            raise InvariantError(f"rank {self.number} is told that it is {self.session.rank}")
        joins = [(counts[self.number], max(counts)) for counts in self._program.joins]
        for number, step in enumerate([*self._program.steps, []]):
            while joins and joins[0][0] == number and not self._is_away(number):
                yield from self._join(len(joins))
                self._back_at = joins.pop(0)[1]
            if self._is_away(number):
                continue
            yield from self._go([use for use in step if use.specs[self.number] is not None])
            if number in self._program.barriers:
                yield from self._barrier()
        yield from self._settle()

    def _settle(self) -> Life:
        """Before it leaves, which it does at the latest when the session's patience has ended."""
        if self.session._has_given:
            patience_s = self._settings.stall_limit_s + PATIENCE_S
            self.session._has_given = yield from self._ask_patiently(protocol.Drain(), protocol.Drained, patience_s)

    def _is_away(self, number: int) -> bool:
        """It had joined when the others went through this step."""
        return number < self._back_at

    def _ask_patiently(
        self, message: object, answer: type, patience_s: float
    ) -> Generator[float | Callable[[], bool], None, bool]:
        """``_ask``, but not for longer. False: that was too long."""
        due_s = self.world.now_s + patience_s
        self.world.after(patience_s, self, None, self._on_arrival)
        yield from self._ask(message, answer, lambda: self.world.now_s >= due_s)
        return self.world.now_s < due_s

    def _ask(self, message: object, answer: type, is_late: Callable[[], bool] = lambda: False) -> Life:
        """Send what the session is about to send, and wait for what it is about to wait for."""
        channel: Channel = self._channel
        self.doing = f"waiting for {answer.__name__}"
        channel.send(protocol.encode(message))
        channel.is_muted = True
        yield (
            lambda: (
                any(type(protocol.decode(m[0])) in (answer, protocol.Fatal) for m in channel.take())
                or channel.is_over
                or self._has_failed
                or is_late()
            )
        )

    @property
    def _has_failed(self) -> bool:
        """The session has heard that nothing works any more."""
        return self.has_joined and self.session._fatal is not None

    def _go(self, step: list[Use]) -> Life:
        rng = self.random
        order = rng.sample(step, len(step))
        slots: dict[int, Slot] = {}
        if rng.random() < 0.4:
            early = [use for use in order if use.first is None]
            if early:
                declared = yield from self._declare([self._spec(use) for use in early])
                slots = dict(zip([use.id for use in early], declared, strict=True))
        for use in order:
            yield self.pause()
            if use.id not in slots:
                if use.first is not None:
                    yield from self._declare([use.first])
                    yield self.pause()
                (slots[use.id],) = yield from self._declare([self._spec(use)])
            yield from Turn(self, use, slots[use.id]).hand_over()
        for use in rng.sample(step, len(step)):
            yield from Turn(self, use, slots[use.id]).wait()
            yield self.pause()

    def check_waited(self, since_s: float) -> None:
        """For a handle, which has its result, or an error, by now."""
        if self.world.now_s > since_s + self._settings.stall_limit_s + _NOTICE_S + self.paused_s:
            raise InvariantError(f"{self.name}, {self.doing}, since {since_s:.2f} s: it resolves after its deadline")

    @property
    def now_s(self) -> float:
        return self.world.now_s

    def pause(self) -> float:
        return self.world.delay() if self.random.random() < 0.5 else 0.0

    def say(self, what: str) -> None:
        self.world.note(self.name, what)

    def _spec(self, use: Use) -> TensorSpec:
        return replace(use.spec(self.number), priority=self.random.randint(-3, 3))

    def _declare(self, specs: list[TensorSpec]) -> Generator[float | Callable[[], bool], None, list[Slot]]:
        session = self.session
        new = [
            spec
            for spec in specs
            if (slot := session._slots.named(spec.name)) is None or session._needs_declaration(slot, spec)
        ]
        if new:
            yield from self._ask(protocol.Declare.of(session._requests + 1, new), protocol.Declared)
        return session.declare(specs)

    def _join(self, number: int) -> Life:
        self.world.note(self.name, "joins")
        yield from self._ask(protocol.Join(), protocol.AllJoined)
        last = self.session.join(0.0)
        if self.results.setdefault(-number, b"%d" % last) != b"%d" % last:
            raise InvariantError(f"{self.name} hears that rank {last} joined last, others hear otherwise")
        if self._goes_on_without(last, self._program.joins[-number]):
            raise InvariantError(f"{self.name} hears that rank {last} joined last, which it went on without")

    def _goes_on_without(self, other: int, counts: list[int]) -> bool:
        """It got results that there can only be because ``other`` had joined before."""
        uses = [use for step in self._program.steps[counts[other] : counts[self.number]] for use in step]
        specs = [use.specs[self.number] for use in uses if not use.is_unsupported]
        return any(spec is not None and spec.nbytes and other in spec.members(len(counts)) for spec in specs)

    def _barrier(self) -> Life:
        session = self.session
        yield from self._ask(protocol.EnterBarrier(session._barriers + 1), protocol.BarrierReleased)
        session.barrier(0.0)

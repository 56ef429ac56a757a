"""Decides what the launcher does when a process ends, a signal arrives or time passes.

A pure state machine: events and the time go in, actions come out. It starts nothing and sends nothing. Only the
supervisor's thread calls it.

    RUNNING ──────────────────a signal came──────────────► STOPPING ──grace over──► KILLING
       │ └─a rank failed, a service died─► LOSING ──time over──┘                       │
       │                                     │ all ranks ended                         │ all ranks ended
       └─all ranks ended, 0──────────────────┴──► DRAINING ──drain over──► ENDING ◄────┘
                                                                             └──grace over──► KILLING ──► OVER

RUNNING: nothing has failed, or only processes that could be started again. LOSING: a rank or a service has failed; the
other ranks notice it by themselves and report the missing rank. LEAVING (elastic jobs, SIGTERM): the communication
service knows that the ranks are to leave at their next commit. DRAINING: services that stay for the ranks' sake get
SIGTERM. The others exit by themselves, once the ranks of other machines have ended, too, which may take longer. After
LEAVING all get SIGTERM. ENDING: all get SIGTERM, in any state. OVER: processes that survived SIGKILL are left.
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from byteps_py.launch.process_plan import ProcessKind, ProcessSpec
from byteps_py.wire.launch_protocol import UNUSABLE_STATUS

#: Signals that end the job; passed on to the ranks.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Signals that only the ranks can have a meaning for; passed on, nothing else happens.
USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
#: Between two attempts to start a scheduler whose address is still in use.
PAUSE_S = 1.0
_RESULTS_ARE_THERE = "This changes nothing of the results; it is usual on a busy machine"
#: A wrapper that forwards Ctrl-C makes it arrive twice at once. A second one within this time is not the user's.
REPEAT_IGNORED_S = 0.2


@dataclass(frozen=True, slots=True)
class Send:
    """Send a signal to these processes."""

    names: tuple[str, ...]
    signum: int


@dataclass(frozen=True, slots=True)
class Say:
    """Write this to stderr."""

    text: str


@dataclass(frozen=True, slots=True)
class Start:
    """Start this process, which has ended, once more."""

    name: str


Action = Send | Say | Start


class Phase(enum.Enum):
    """See the diagram of this module."""

    RUNNING = enum.auto()
    LEAVING = enum.auto()
    LOSING = enum.auto()
    STOPPING = enum.auto()
    DRAINING = enum.auto()
    ENDING = enum.auto()
    KILLING = enum.auto()
    OVER = enum.auto()


def describe(status: int) -> str:
    """An exit status of ``subprocess`` (negative: a signal) in words."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name} (signal {-status})"
    except ValueError:
        return f"was killed by signal {-status}"


def _ending(spec: ProcessSpec, status: int) -> str:
    """How a process has ended, in words."""
    if spec.lost_status is not None and status == spec.lost_status:
        return f"the connection to {spec.name} has failed: ssh ended with status {status}"
    return f"{spec.name} {describe(status)}"


def exit_code(status: int) -> int:
    """The shell's convention: 128 + signal number for a process that a signal killed."""
    return status if status >= 0 else 128 - status


class SupervisionPolicy:
    """Decides for one job. Times are in seconds of any steady clock.

    ``code``: the launcher's exit code so far. ``retry``: start the whole job over. ``never_began``: it could
    not start, so what its ranks report follows from that. ``mains_over``: all ranks have ended.

    ``elastic``: the other ranks go on without one that failed, and the job succeeds if one rank does. ``is_part``:
    other launchers run the rest of the job; if it is elastic, it goes on without the ranks of this one, and SIGTERM
    asks these ranks to leave.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        grace_s: float,
        own_error_s: float,
        drain_s: float = 30.0,
        elastic: bool = False,
        is_part: bool = False,
    ) -> None:
        self.code = 0
        self._phase_ends: float | None = None
        self._starts_again: dict[str, float] = {}  # processes to start again after a pause: the time
        self.retry = False
        self.never_began = False
        self.phase = Phase.RUNNING
        self._grace_s, self._own_error_s, self._drain_s = grace_s, own_error_s, drain_s
        self._elastic, self._is_part = elastic, is_part
        self._one_ended_well = False
        self._ended_hosts: set[str] = set()
        self._left_places = 0  # of hosts that are lost, and that no spare host has taken yet
        self._is_leaving = False  # SIGTERM asked these ranks to leave; others go on without them
        self._alive = {spec.name: spec for spec in specs}
        self.mains_over = False
        self._no_main_ended = True
        self._signalled_at: float | None = None
        self._stop_signals: set[int] = set()
        self._restarted: dict[str, int] = {}  # how often, by name
        self._last: dict[str, int] = {}  # the last status of processes that were started again, by name
        self._is_headless = False  # the scheduler has ended: it does not tell the services that the job is over
        self._reason_code = 0  # the exit code for ranks that end by a signal of this launcher

    @property
    def deadline(self) -> float | None:
        """When to call ``ticked``."""
        return min((due for due in (self._phase_ends, *self._starts_again.values()) if due is not None), default=None)

    @property
    def finished(self) -> bool:
        """True when all processes have ended, or those that are left can not be killed."""
        return not self._alive or self.phase is Phase.OVER

    def exited(self, name: str, status: int, now: float) -> list[Action]:
        """A process has ended; ``status`` as ``subprocess`` gives it."""
        if self._is_restarted(self._alive[name], status):
            again = self._restarted[name] = self._restarted.get(name, 0) + 1
            count = f"{again} of at most {self._alive[name].restarts} times"
            if status == UNUSABLE_STATUS:
                self._starts_again[name] = now + PAUSE_S
                text = f"{name} {describe(status)}; starting it again every {PAUSE_S:g} s ({count})"
                said = [] if self._last.get(name) == status else [Say(text)]
                self._last[name] = status
                return [*said]
            self._last[name] = status
            return [Say(f"{name} {describe(status)}; starting it again ({count})"), Start(name)]
        spec = self._alive.pop(name)
        if spec.kind is ProcessKind.SERVICE:
            return self._service_exited(spec, status, now)
        self._no_main_ended = False
        self._one_ended_well = self._one_ended_well or not status
        actions = self._main_exited(spec, status, now) if status else []
        if not self._mains() and self._is_well:
            self.code = 0
        if not self._mains() and self._left_places:
            self.code = self.code or exit_code(status) or 1
        if not self._mains() and not self.mains_over:
            self.mains_over = True
            actions += self._after_mains(now)
        return actions

    @property
    def _is_well(self) -> bool:
        """All ranks have ended: True if the job succeeded regardless of their exit codes."""
        if not self._elastic or self._is_leaving:
            return self._is_leaving
        return self._one_ended_well and self._signalled_at is None

    def signalled(self, signum: int, now: float) -> list[Action]:
        """The launcher received a signal."""
        if signum in USER_SIGNALS:
            return self._send(self._mains(), signum)
        name = signal.Signals(signum).name
        if self._signalled_at is None:
            self._signalled_at = now
            self._reason_code = 128 + signum
            if self.mains_over:
                return [Say(f"received {name}; ending"), *self._end_services(now)]
            if self._elastic and self._is_part and signum == signal.SIGTERM and self.phase is Phase.RUNNING:
                self._is_leaving = True
                self._enter(Phase.LEAVING, now)
                text = f"received {name}; the ranks leave at their next commit, within {self._grace_s:g} s"
                return [Say(text), *self._send(self._dismissed(), signal.SIGTERM)]
            return [Say(f"received {name}; passing it on and ending"), *self._stop_mains(signum, now)]
        if signum == signal.SIGHUP or now - self._signalled_at < REPEAT_IGNORED_S:
            return []
        return [Say(f"received {name} again; killing everything"), *self._kill_all(now)]

    def killed(self, now: float) -> list[Action]:
        """The launcher of the whole job kills what it has started."""
        self._reason_code = self._reason_code or 128 + signal.SIGKILL
        return self._kill_all(now)

    def foretold(self, code: int) -> None:
        """The launcher on another host will end with this exit code: something has failed there, before anything fails
        elsewhere as a consequence."""
        if self.code == 0 and self.phase is Phase.RUNNING:
            self.code = code

    def host_ended(self, name: str, now: float) -> list[Action]:
        """All ranks on another host have ended; its services may wait for ranks of others."""
        self._ended_hosts.add(name)
        if self.mains_over or not self._ended_hosts.issuperset(self._mains()) or self._left_places:
            return []
        self.mains_over = True
        return self._after_mains(now)

    def took_place(self, name: str) -> None:
        """A spare host has taken the place of one that is lost: it is a host like the others now."""
        if name in self._alive:
            self._left_places = max(0, self._left_places - 1)
            self._alive[name] = dataclasses.replace(self._alive[name], kind=ProcessKind.MAIN, is_spare=False)

    def ticked(self, now: float) -> list[Action]:
        """Time has passed."""
        due = [name for name, due_s in self._starts_again.items() if now >= due_s]
        for name in due:
            del self._starts_again[name]
        if due:
            return [Start(name) for name in due]
        if self.finished or self._phase_ends is None or now < self._phase_ends:
            return []
        late = ", ".join(self._alive)
        match self.phase:
            case Phase.LOSING:
                self.code = self.code or self._reason_code
                text = f"{', '.join(self._mains())} went on for {self._own_error_s:g} s without it; stopping"
                return [Say(text), *self._stop_mains(signal.SIGTERM, now)]
            case Phase.LEAVING:
                text = f"{', '.join(self._mains())} reached no commit within {self._grace_s:g} s; stopping"
                return [Say(text), *self._stop_mains(signal.SIGTERM, now)]
            case Phase.STOPPING:
                mains = self._mains()
                self._enter(Phase.KILLING, now)
                text = f"{', '.join(mains)} did not end within {self._grace_s:g} s; killing"
                return [Say(text), *self._send(mains, signal.SIGKILL)]
            case Phase.DRAINING:
                text = f"all ranks have ended; stopping {late}, which takes longer. {_RESULTS_ARE_THERE}"
                return [Say(text), *self._end_services(now)]
            case Phase.ENDING:
                text = f"{late} did not end within {self._grace_s:g} s; killing"
                if self.code == 0:
                    text = f"all ranks have ended well; {late} still does after {self._grace_s:g} s, and is ended now. "
                    text += _RESULTS_ARE_THERE
                return [Say(text), *self._kill_all(now)]
            case _:
                self.phase, self._phase_ends = Phase.OVER, None
                self.code = self.code or 1
                if any(spec.task is not None for spec in self._alive.values()):
                    return [Say(f"{late} did not say that it has ended: it will, when it finds the connection closed")]
                return [Say(f"{late} could not be killed: the system holds it in an uninterruptible wait")]

    def _is_restarted(self, spec: ProcessSpec, status: int) -> bool:
        """True if it is to be started again: it was killed or given up, and had not been asked to end; or it has been
        started again, and its address is in use: whoever has it may go."""
        was_killed = (status < 0 and -status not in ENDING_SIGNALS) or status == spec.again_status
        was_killed = was_killed or (status != 0 and spec.is_restarted_on_failure)
        if spec.is_rank and self._one_ended_well:
            return False  # training is done, and no other rank would wait for it
        was_killed = was_killed or (
            status == UNUSABLE_STATUS and spec.waits_for_address and spec.name in self._restarted
        )
        return self.phase is Phase.RUNNING and was_killed and self._restarted.get(spec.name, 0) < spec.restarts

    def _main_exited(self, spec: ProcessSpec, status: int, now: float) -> list[Action]:
        text = _ending(spec, status)
        is_lost = spec.lost_status is not None and status == spec.lost_status
        if is_lost and self.phase is Phase.RUNNING and any(other.is_spare for other in self._alive.values()):
            self._left_places += 1
            return [Say(f"{text}; a spare host takes its place")]
        if self.code == 0:
            # After a signal, status 1 is an uncaught exception: KeyboardInterrupt, or the loss of a rank that ended
            # first.
            is_ours = status == 1 and self._signalled_at is not None and self.phase is Phase.STOPPING
            is_ours = is_ours or (status < 0 and -status in self._stop_signals)
            self.code = self._reason_code if is_ours else exit_code(status)
        if self.phase is Phase.LOSING:
            return [Say(text)]
        if self.phase is not Phase.RUNNING:
            return []
        others = len(self._mains())
        if self._elastic and others:
            return [Say(f"{text}; the others go on without it")]
        if others:
            self._enter(Phase.LOSING, now, self._own_error_s)
            noun = "rank" if spec.task is None else "host"
            whom, whose = (
                (f"the other {others} {noun}s have", "their") if others > 1 else (f"the other {noun} has", "its")
            )
            text += f"; {whom} {self._own_error_s:g} s to end with an error of {whose} own"
        return [Say(text)]

    def _service_exited(self, spec: ProcessSpec, status: int, now: float) -> list[Action]:
        # Status 0 is no loss: the ranks have shut down and go on without it, to save a model for example.
        if status == 0:
            return []
        text = _ending(spec, status)
        if spec.is_spare:
            return [Say(f"{text}; the job goes on without this spare host")] if self.phase is Phase.RUNNING else []
        # A crash may be why a rank failed, even if it is seen after that. A service that gets SIGTERM, or hears of the
        # failed rank, ends with a message of its own.
        is_crash = (status < 0 and status != -signal.SIGTERM) or status == spec.lost_status
        is_first = self._no_main_ended and spec.name not in self._restarted
        if self.phase is Phase.RUNNING and status == spec.retry_status and is_first:
            self.retry = self.never_began = True
            self.code = exit_code(status)
            return self._kill_all(now)
        if self.phase is Phase.RUNNING and status == spec.hopeless_status and is_first:
            self.code = UNUSABLE_STATUS
            self.never_began = True
            return [Say(f"{spec.name} can't begin; its own message is above"), *self._kill_all(now)]
        if spec.is_replaceable:
            if self.phase is Phase.RUNNING and is_crash:  # else it has reported why, or the job has failed
                return [Say(f"{text}; the other summation services take over, if there are any")]
        elif not spec.is_vital:
            self._is_headless = True
            if self.phase is Phase.RUNNING and is_crash:
                return [Say(f"{text}; agreed tensors are still reduced, new ones and barriers have to wait")]
        elif self._elastic and not self._is_part and self.phase is Phase.RUNNING:
            return [Say(f"{text}; the job goes on without the ranks of its machine")]
        elif self.phase is Phase.RUNNING:
            self._reason_code = exit_code(status)
            self._enter(Phase.LOSING, now, self._own_error_s)
            text += f" while ranks needed it; they have {self._own_error_s:g} s to end with their own error"
        if self.phase is Phase.DRAINING:
            text += " after all ranks had ended; their results are not affected"
        elif self.phase is Phase.KILLING or not (is_crash or (self.phase is Phase.LOSING and self._no_main_ended)):
            return []
        return [Say(text)]

    @property
    def _draining_s(self) -> float:
        """The time that services have after the ranks: ranks of other machines may end later. But a machine that was
        asked to leave may have little time."""
        return self._drain_s if self._is_part and not self._is_leaving else self._grace_s

    def _after_mains(self, now: float) -> list[Action]:
        orderly = (Phase.RUNNING, Phase.LEAVING, Phase.LOSING)
        if self.code == 0 and self.phase in orderly and not self._is_headless:
            self._enter(Phase.DRAINING, now, self._draining_s)
            # On a machine that leaves while others go on, nothing tells services that the job is over: the job goes on.
            return self._send(tuple(self._alive) if self._is_leaving else self._dismissed(), signal.SIGTERM)
        return self._end_services(now)

    def _stop_mains(self, signum: int, now: float) -> list[Action]:
        self._enter(Phase.STOPPING, now)
        self._stop_signals |= {signum, signal.SIGKILL}
        return self._send(self._mains(), signum)

    def _end_services(self, now: float) -> list[Action]:
        self._enter(Phase.ENDING, now)
        return self._send(tuple(self._alive), signal.SIGTERM)

    def _kill_all(self, now: float) -> list[Action]:
        self.mains_over = True
        self._stop_signals.add(signal.SIGKILL)
        self._enter(Phase.KILLING, now)
        # Ranks first: one that outlives its communication service would report that service as lost.
        ranks = self._mains()
        return self._send((*ranks, *(name for name in self._alive if name not in ranks)), signal.SIGKILL)

    def _enter(self, phase: Phase, now: float, seconds: float | None = None) -> None:
        for name in self._starts_again:  # nothing is started any more
            if self._alive.pop(name).kind is ProcessKind.MAIN:
                self.code = self.code or self._reason_code
        self._starts_again.clear()
        self.phase = phase
        self._phase_ends = now + (self._grace_s if seconds is None else seconds)

    def _dismissed(self) -> tuple[str, ...]:
        return tuple(name for name, spec in self._alive.items() if spec.is_dismissed)

    def _mains(self) -> tuple[str, ...]:
        return tuple(name for name, spec in self._alive.items() if spec.kind is ProcessKind.MAIN)

    @staticmethod
    def _send(names: tuple[str, ...], signum: int) -> list[Action]:
        return [Send(names, signum)] if names else []

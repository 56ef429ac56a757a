"""The session and everything that lives as long as it does: ``init`` creates it, ``shutdown`` ends it.

One context serves the whole process. ``use`` replaces it for the current thread, so that several ranks can live in one
process. Objects that run on other threads (autograd's) keep their context.

``NameSource`` names the tensors that the user has not named: unnamed operations are matched in the order of their
calls, the nth of one rank with the nth of the others. Any thread.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError, HostsUpdatedInterrupt, NotInitializedError, UsageError
from byteps_py.session import CodedState, ResultRate, Session, failure_reports, open_session
from byteps_py.session.progress import Progress
from byteps_py.tensors import UNNAMED, Op
from byteps_py.torch.collectives import rank_reporting, router
from byteps_py.torch.collectives.all_reduce import shared_memory
from byteps_py.torch.collectives.job_connections import JobConnections, NextSession
from byteps_py.torch.collectives.movers import HostMover, Mover
from byteps_py.torch.collectives.result_pool import RESULTS
from byteps_py.torch.collectives.slot_view import PieceView, SlotView, TensorRequest
from byteps_py.torch.collectives.work import Handles

if TYPE_CHECKING:
    from byteps_py.prometheus.page import MetricsPage  # it takes a while to import

#: (bytes, names): tensors below this size use this many names in turn, so that memory stays bounded.
_ROTATION = ((64 << 10, 32), (4 << 20, 8))
_NAMES_OF_LARGE = 2  # larger tensors
#: For operations whose sizes may differ from call to call.
_NAMES_OF_VARYING = 8


class NameSource:
    """Numbers the unnamed operations of each kind in the order of their calls.

    A name keeps its shape, because ranks would have to agree on another one: an operation like an earlier one gets the
    earlier one's names again. The first operations of a kind get new names, by which ranks whose calls differ detect
    that. After such a disagreement all ranks ``restart``, since their counts differ.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._given: dict[str, int] = {}  # number of names by kind
        self._of: dict[tuple[str, Hashable], tuple[list[str], int]] = {}  # (names, uses) by kind and signature
        self._lock = threading.Lock()

    def next(self, kind: str, signature: Hashable, nbytes: int) -> str:
        """The name of the next operation. ``signature``: the facts on which ranks must agree (dtype, shape …).

        >>> source = NameSource()
        >>> source.next("sum", "float32[2]", 8), source.next("sum", "float32[3]", 12)
        ('sum.noname.0', 'sum.noname.1')
        """
        limit = next((names for limit, names in _ROTATION if nbytes < limit), _NAMES_OF_LARGE)
        with self._lock:
            names, uses = self._of.get((kind, signature), ([], 0))
            if len(names) < limit:
                names.append(self._new(kind))
            self._of[kind, signature] = names, uses + 1
            return names[uses % limit]

    def in_turn(self, kind: str) -> str:
        """The name of the next operation of a kind that needs no agreement in advance: a few names, strictly in turn.

        >>> source = NameSource()
        >>> [source.in_turn("gather") for _ in range(9)][-2:]
        ['gather.noname.7', 'gather.noname.0']
        """
        with self._lock:
            names, uses = self._of.get((kind, None), ([], 0))
            if len(names) < _NAMES_OF_VARYING:
                names.append(self._new(kind))
            self._of[kind, None] = names, uses + 1
            return names[uses % _NAMES_OF_VARYING]

    def restart(self, epoch: int) -> None:
        """Count from 0 again, with other names than in ``epoch``; does nothing if that epoch is over already."""
        with self._lock:
            if epoch == self.epoch:
                self.epoch += 1
                self._given.clear()
                self._of.clear()

    def _new(self, kind: str) -> str:
        number = self._given.get(kind, 0)
        self._given[kind] = number + 1
        return f"{kind}{UNNAMED}{self.epoch}.{number}" if self.epoch else f"{kind}{UNNAMED}{number}"


_log = logging.getLogger("byteps_py")

Opener = Callable[[Settings], Session]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The rank of this process, and the number of ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    machine_index: int
    num_machines: int
    is_homogeneous: bool

    @classmethod
    def of(cls, session: Session) -> RankPlace:
        """The place of this process in ``session``."""
        return cls(**{each.name: getattr(session, each.name) for each in dataclasses.fields(cls)})


class Closable(Protocol):
    """An object that lives as long as the session."""

    def close(self) -> None:
        """The session is closed: end with it."""


class Unfinished(Protocol):
    """An object that still needs the session."""

    def finish(self) -> None:
        """Complete its work: the session is about to be closed."""


class KeepsFactors(Protocol):
    """The states of factors of low rank, by the name of their matrix."""

    def factor_states(self) -> dict[str, Any]:
        """Copies of all, made of tensors on the host and of numbers."""

    def load_factor_states(self, states: Mapping[str, Any]) -> set[str]:
        """Go on from those of ``states`` that fit, and return their names. Others go on as they are."""


class StepCounts:
    """Counts this rank's optimizer steps, so that ranks whose optimizers differ are found out while they wait.

    Ranks that train one model make the same steps in the same order: how many steps a rank has begun says how many of
    its optimizers have stepped. Nothing is sent here; a session tells the counts while it waits (Session.steps_begun),
    and the scheduler compares them. The training thread calls. Counts that may differ between ranks that do the same
    are dropped: after a step that failed, and if several threads make steps. The counts are those of one session, since
    the latest join. ``joins``: how many there were: ranks join together, but hear of it one after another.
    """

    def __init__(self, joins: int = 0) -> None:
        self._since = f", since join {joins}" if joins else ""
        self._threads: dict[str, int] = {}  # by kind: the thread that makes the steps; 0: nothing is counted any more

    def begin(self, session: Session, kind: str, optimizers: int) -> None:
        """A step of ``kind`` begins. ``optimizers``: how many have stepped, this one included. Call it before the step
        waits for other ranks."""
        thread = threading.get_ident()
        if self._threads.setdefault(kind, thread) != thread:
            self.give_up(session, kind)
            return
        steps, _ = session.steps_begun.get(kind + self._since, (0, 0))
        session.steps_begun = {**session.steps_begun, kind + self._since: (steps + 1, optimizers)}

    def give_up(self, session: Session, kind: str) -> None:
        """Count no more steps of ``kind``."""
        self._threads[kind] = 0
        session.steps_begun = {
            name: counts for name, counts in session.steps_begun.items() if name != kind + self._since
        }


class Context:
    """The state of one rank. ``opener`` opens its session. Any thread."""

    def __init__(self, opener: Opener = open_session) -> None:
        self._opener = opener
        self.lock = threading.RLock()
        self._session: Session | None = None
        self._settings: Settings | None = None
        #: Its place in the job that it has left by ``suspend``, until it opens or closes a session again.
        self._suspended: RankPlace | None = None
        #: Of an elastic job whose group this rank has left with ``leave_for_next``.
        self._next: NextSession | None = None
        self._slot_views: dict[str, PieceView] = {}
        self._byte_views: dict[str, SlotView] = {}  # of gathers and exchanges
        self._movers: dict[torch.device, Mover] = {}
        self._claimed: dict[str, int] = {}
        self._counts: Counter[str] = Counter()  # in this session, since the latest join
        self._step_counts = StepCounts()  # the same
        self.progress = Progress()  # through all sessions
        self._metrics_page: MetricsPage | None = None
        self._holders: set[str] = set()
        self._coded_states: dict[str, CodedState] = {}  # from one session to the next: see Session
        self.incarnation = 0  # how often a job was left in the middle of its work; see Session
        #: This process was started again, and the other ranks are in the middle of their training: no rank answers it
        #: before it has the state that they have.
        self.is_catching_up = False
        self._names = NameSource()
        self.handles = Handles()
        self.process_sets: dict[int, tuple[int, ...]] = {}  # id → ranks; see process_sets.py
        self.process_sets_added = 0
        self.belongings: dict[type, Closable] = {}  # by type: objects of modules that this one must not know
        self.unfinished: weakref.WeakSet[Unfinished] = weakref.WeakSet()
        #: The objects that keep factors of low rank from step to step: see compression_state_dict.
        self.keeping_factors: weakref.WeakSet[KeepsFactors] = weakref.WeakSet()
        #: Functions that ``join`` completes and ``close`` does not.
        self.until_join: weakref.WeakSet[Unfinished] = weakref.WeakSet()
        #: Between ranks of different machines; None if there are none, or too many.
        self.connections: JobConnections | None = None
        self.joins = 0  # so far; declarations before the latest join are void
        #: Called once a session is open: what observes it.
        self.on_open: Callable[[Context], None] = lambda context: None

    # ---- life ------------------------------------------------------------------------------------------

    def open(self, settings: Settings | None = None, holder: str = "init") -> None:
        """Join the job; does nothing if it has already joined. ``settings``: None: from the environment. ``holder``:
        the user of the session, until its ``release``. Raises the errors of open_session."""
        if (next_session := self._next) is not None:
            next_session.wait()  # without the lock, which its thread needs to leave
        with self.lock:
            if self._next is not None or self._session is None:
                self._settings = settings or Settings.from_env()
                failure_reports.disregard()
                next_session, self._next = self._next, None
                session = self._opened(self._settings) if next_session is None else next_session.take()
                session.set_coded_states(self._coded_states)
                self._coded_states = {}
                try:
                    self._begin_progress(session, self._settings)
                except BaseException:
                    session.close()
                    raise
                self._session = session
                self.go_on_from(0)
                self.is_catching_up = (
                    self._settings.max_restarts > 0 and session.is_under_way and not session.has_synced
                )
                self._suspended = None
                if self.connections is None:
                    self.connections = self._connected(session, self._settings)
                if self.connections is not None:
                    self.until_join.add(self.connections)
            self._holders.add(holder)

    def _opened(self, settings: Settings) -> Session:
        session = self._opener(settings)
        session.incarnation = self.incarnation
        return session

    def _connected(self, session: Session, settings: Settings) -> JobConnections | None:
        """Begin to connect to the other ranks."""
        peers, may_share = session.peers, router.may_share(session.local_size)
        may_connect = session.exchanges_addresses and session.size <= router.MOST_CONNECTED
        if peers is not None and (may_share or may_connect):
            peers.directory.request_all_introductions()
        if peers is not None and may_share:
            shared_memory.prepare()
        return JobConnections(session, settings, self.mover) if may_connect else None

    def _begin_progress(self, session: Session, settings: Settings) -> None:
        """Raises ConfigurationError: this rank is to have a metrics page, and lacks what makes it."""
        session.progress = self.progress
        session.profile_wait = rank_reporting.profile_wait
        if settings.elastic or not self.progress.groups:
            self.progress.groups += 1
        rank_reporting.watch_optimizer_steps(self._torch_stepped)
        if settings.log_format == "json":
            rank_reporting.log_as_json(settings, session)
        if settings.metrics_port:
            session.observer = session.observer or ResultRate()
            self._metrics_page = rank_reporting.open_page(settings, session)

    @staticmethod
    def _torch_stepped(optimizer: torch.optim.Optimizer) -> None:
        context = current()
        if context.is_open or context.is_between:
            context.stepped(id(optimizer))

    def stepped(self, optimizer: int) -> None:
        """An optimizer of this rank has made a step. ``optimizer``: a number of its own."""
        self.progress.stepped(optimizer)
        self.go_on_from(self.progress.steps)
        if self.is_open:
            self.session.tell_progress()

    def go_on_from(self, steps: int) -> None:
        """So many steps were made before the next one, by this process or by those whose work it goes on with."""
        self.progress.steps = max(self.progress.steps, steps)
        if self.is_open and self.session.flight is not None:
            self.session.flight.recorder.step = self.progress.steps & 0xFFFFFFFF

    def rejoin(self, why: Exception) -> None:
        """Leave the group of an elastic job in the middle of its work, and be part of the next one, with the same
        users and process sets. Blocks until there is one. Raises as ``open``."""
        with self.lock:
            holders, process_sets, added = set(self._holders), dict(self.process_sets), self.process_sets_added
        if self._session is not None:
            self._session.returning = (f"{type(why).__name__}: {why}", False)
        with contextlib.suppress(BytePSError):  # errors of unfinished operations, whose results are not needed any more
            self.close(is_finished=False)
        self.open(self.settings)
        with self.lock:
            self._holders |= holders
            self.process_sets, self.process_sets_added = process_sets, added
        self.on_open(self)

    def leave_for_next(self, why: Exception) -> None:
        """Leave the group of an elastic job in the middle of its work, and return at once: a thread waits to be part of
        the next one, which ``open`` takes. Until then ``place`` is that of before, and operations raise
        HostsUpdatedInterrupt."""
        with self.lock:
            session, settings = self.session, self.settings
            session.returning = (f"{type(why).__name__}: {why}", isinstance(why, HostsUpdatedInterrupt))
            self._suspended = RankPlace.of(session)
            self._next = NextSession(lambda: self._go_over(settings))

    def _go_over(self, settings: Settings) -> Session:
        """From a group to the next one, of which all ranks are connected then."""
        with contextlib.suppress(BytePSError):  # errors of unfinished operations, whose results are not needed any more
            self._close(is_finished=False)
        session = self._opened(settings)
        connections = self._connected(session, settings)
        if connections is not None:
            connections.finish()
        self.connections = connections
        return session

    @property
    def is_between(self) -> bool:
        """This rank has left a group with ``leave_for_next``, and is not part of the next one yet."""
        return self._next is not None

    @property
    def is_next_ready(self) -> bool:
        """``open`` takes the next session, or raises the error, without a wait."""
        return self._next is not None and self._next.is_ready

    def release(self, holder: str) -> None:
        """Leave the job unless another holder needs the session."""
        with self.lock:
            self._holders.discard(holder)
            is_last = not self._holders
        if is_last:
            self.close()

    def close(self, is_finished: bool = True) -> None:
        """Leave the job; does nothing if there is none. Raises the errors of unfinished work after it has left.

        ``is_finished``: training is done, unless an exception is in flight or the process is exiting.
        """
        if self.is_between and not (failure_reports.is_exiting() or failure_reports.in_flight() is not None):
            self.open(self.settings)  # to leave it in order
        self._suspended = None
        self._close(is_finished)

    def _close(self, is_finished: bool) -> None:
        session, connections = self._session, self.connections
        try:
            if session is not None and failure_reports.uncaught() is None:
                for work in list(self.unfinished):
                    work.finish()
                if connections is not None:  # their rounds count on when ranks of a job come back
                    connections.finish()
                is_ending = failure_reports.is_exiting() or failure_reports.in_flight() is not None
                session.is_finished = is_finished and not is_ending
                if session.returning is not None and session.returning[1]:
                    self._keep_coded_states(session)
        finally:
            self._leave()

    def _keep_coded_states(self, session: Session) -> None:
        """All ranks come back, and go on where they are."""
        try:
            self._coded_states = session.coded_states()
        except BytePSError as error:
            _log.warning("error feedback and momentum of codecs begin with zeros: %s", error)

    def suspend(self) -> None:
        """``close``, and keep ``place`` valid until this process is part of a job again."""
        place = RankPlace.of(self.session) if self.is_open else self._suspended
        try:
            self.close(is_finished=False)
        finally:
            self._suspended = place

    def _leave(self) -> None:
        with self.lock:
            session, self._session = self._session, None
            page, self._metrics_page = self._metrics_page, None
            self.connections = None
            movers, self._movers = self._movers, {}
            belongings = list(self.belongings.values())
            self.belongings.clear()
            self._holders.clear()
            self._slot_views.clear()
            self._byte_views.clear()
            self.handles.clear()
            self._names = NameSource()
            self._counts.clear()
            self._step_counts = StepCounts(self.joins)
            self.process_sets.clear()
            self.process_sets_added = 0
        RESULTS.clear()
        with contextlib.ExitStack() as closing:  # from the last to the first, each even if another one fails
            for belonging in reversed(belongings):
                closing.callback(belonging.close)
            if session is not None:
                if session.observer is not None:
                    closing.callback(session.observer.closed)
                closing.callback(session.close)
            for mover in movers.values():
                closing.callback(mover.close)
            if page is not None:
                closing.callback(page.close)

    def join(self) -> int:
        """See Session.join. All operations under way are completed first. Later operations declare their tensors
        again. Raises UsageError with BYTEPS_LOCAL_SUM other than host."""
        if self.settings.local_sum != "host":
            raise UsageError(
                f"join() does not go together with BYTEPS_LOCAL_SUM={self.settings.local_sum}: GPUs of a machine sum "
                "only if all their ranks take part. Set BYTEPS_LOCAL_SUM=host on all ranks"
            )
        for work in [*self.unfinished, *self.until_join]:
            work.finish()
        self.handles.complete_all()
        for mover in list(self._movers.values()):
            mover.finish_fetches()  # the memory of all slots goes to others
        last = self.session.join()
        with self.lock:
            self.joins += 1
            self._slot_views.clear()
            self._byte_views.clear()
            self._names.restart(self._names.epoch)  # ranks that joined early have counted fewer calls
            self._counts.clear()
            self._step_counts = StepCounts(self.joins)
            self.session.steps_begun = {}
            belongings = list(self.belongings.values())
            self.belongings.clear()
        for belonging in belongings:
            belonging.close()
        return last

    def reopen(self, num_workers: int, num_servers: int, global_rank: int) -> None:
        """Join again after ``close``, as part of a job of another size. ``global_rank``: -1: the machine keeps its
        number. Raises UsageError if the session is open."""
        with self.lock:
            if self._session is not None:
                raise UsageError("resume() needs suspend() first")
            old = self._settings or Settings.from_env()
            worker_id = old.worker_id if global_rank < 0 else global_rank // old.local_size
            self.open(dataclasses.replace(old, num_workers=num_workers, num_servers=num_servers, worker_id=worker_id))

    @property
    def is_open(self) -> bool:
        """True between ``open`` and ``close``."""
        return self._session is not None and self._next is None

    @property
    def session(self) -> Session:
        """The open session. Raises NotInitializedError before ``open`` and after ``close``, HostsUpdatedInterrupt from
        ``leave_for_next`` to ``open``."""
        if self._next is not None:
            raise HostsUpdatedInterrupt
        session = self._session
        if session is None:
            raise NotInitializedError("byteps_py has not been initialized; use byteps_py.init() first")
        return session

    @property
    def names(self) -> NameSource:
        """Names for operations. Raises UsageError while this process is catching up."""
        self.check_caught_up()
        return self._names

    def check_caught_up(self) -> None:
        """Raises UsageError while this process is catching up."""
        if self.is_catching_up:
            raise UsageError(
                "this process was started again, and the other ranks are in the middle of their training: no rank "
                "answers an operation before bps.restore(). Until then, broadcast_parameters(), "
                "broadcast_optimizer_state() and barrier() do nothing: call other operations after bps.restore()"
            )

    @property
    def place(self) -> Session | RankPlace:
        """The place of this process in its job; after ``suspend``, in the job that it has left. Raises
        NotInitializedError."""
        session = None if self.is_between else self._session
        return session or self._suspended or self.session

    @property
    def settings(self) -> Settings:
        """The settings of the latest ``open``. Raises NotInitializedError before the first one."""
        if self._settings is None:
            raise NotInitializedError("byteps_py has not been initialized; use byteps_py.init() first")
        return self._settings

    # ---- tensors ---------------------------------------------------------------------------------------

    def slot_views(self, requests: Sequence[TensorRequest], answers_newcomers: bool = False) -> list[PieceView]:
        """The view of each request's slot. Requests that are not declared yet are declared in one call. Raises the
        errors of Session.declare. ``answers_newcomers``: other ranks answer also one that is catching up."""
        session = self.session
        if not answers_newcomers:
            self.check_caught_up()
        with self.lock:
            missing = [request for request in requests if not self._fits(request)]
            for request in missing:
                if (before := self._slot_views.get(request.spec.name)) is not None:
                    before.mover.finish_fetches()  # its memory goes to another slot, or to tensors of another device
            slots = session.declare([request.spec for request in missing]) if missing else []
            for request, slot in zip(missing, slots, strict=True):
                self._slot_views[request.spec.name] = PieceView(session, self.mover, slot, request)
            return [self._slot_views[request.spec.name] for request in requests]

    def kept_by_codecs(self) -> str:
        """Something that this rank keeps from step to step for compression, and that ends with the session, in words;
        empty: there is nothing."""
        with self.lock:
            for name, view in self._slot_views.items():
                if (codec := view.slot.spec.codec) is not None and codec.has_states:
                    return f"what tensor {name!r} with compression {codec} has not sent yet"
        factors = [name for each in list(self.keeping_factors) for name in each.factor_states()]
        return f"the factors of {factors[0]}" if factors else ""

    def byte_view(self, name: str, op: Op, group: tuple[int, ...], nbytes_in: int, nbytes_out: int) -> SlotView:
        """The slot of a gather or an exchange with capacity for ``nbytes_in`` and ``nbytes_out`` bytes. It grows when
        it must."""
        session = self.session
        self.check_caught_up()
        with self.lock:
            view = self._byte_views.get(name)
            if view is None or view.has_failed:
                view = self._byte_views[name] = SlotView(session, self.mover)
            view.declare_bytes(name, op, group, nbytes_in, nbytes_out)
            return view

    def holds(self, slot_view: PieceView) -> bool:
        """False once the tensor must be declared again: after a failure, in another job, after ``join``."""
        return slot_view.is_usable and self._slot_views.get(slot_view.slot.spec.name) is slot_view

    def _fits(self, request: TensorRequest) -> bool:
        slot_view = self._slot_views.get(request.spec.name)
        return (
            slot_view is not None
            and slot_view.is_usable
            and slot_view.session is self._session
            and slot_view.slot.spec.agrees_with(request.spec)
            and slot_view.mover is self.mover(request.device)
        )

    def mover(self, device: torch.device) -> Mover:
        """The mover of tensors of ``device`` to and from slots. One for each device."""
        mover = self._movers.get(device)
        if mover is None:
            mover = self._movers[device] = self.new_copier(device) if device.type == "cuda" else HostMover()
        return mover

    def new_copier(self, device: torch.device) -> Mover:
        """The mover of a CUDA device."""
        from byteps_py.torch.collectives.cuda import CudaCopier

        return CudaCopier(device)

    def claim(self, name: str) -> str:
        """``name`` for one owner's gradients; the second owner of a name gets ``name@2``, and so on.

        Two models may have the same parameter names. All ranks create their optimizers in the same order, so they
        number them alike. A name is never given back: an owner does not end at the same moment on all ranks.
        """
        with self.lock:
            owners = self._claimed[name] = self._claimed.get(name, 0) + 1
            return name if owners == 1 else f"{name}@{owners}"

    def number_of_next(self, kind: str) -> int:
        """The number of calls for ``kind`` in this job since the latest join. Ranks that call it in the same order get
        the same numbers."""
        with self.lock:
            self._counts[kind] += 1
            return self._counts[kind]

    def begin_step(self, kind: str) -> None:
        """A step of one of the optimizers that ``number_of_next`` has numbered for ``kind`` begins."""
        self._step_counts.begin(self.session, kind, self._counts[kind])

    def give_up_steps(self, kind: str) -> None:
        """Steps of ``kind`` are no longer counted in this session: ranks may go on with different ones."""
        if self._session is not None:
            self._step_counts.give_up(self._session, kind)

    def is_claimed(self, name: str) -> bool:
        """True if ``claim`` was called with ``name``."""
        return name in self._claimed


_process = Context()
_override: ContextVar[Context | None] = ContextVar("byteps_py.context", default=None)
atexit.register(_process.close)


def current() -> Context:
    """The context of this thread: the process's, unless ``use`` has replaced it."""
    return _override.get() or _process


@contextlib.contextmanager
def use(context: Context) -> Iterator[Context]:
    """Make ``context`` the current one of this thread, until the block ends."""
    token = _override.set(context)
    try:
        yield context
    finally:
        _override.reset(token)

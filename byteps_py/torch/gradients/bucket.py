"""A bucket: gradients that travel as one tensor, their state in the current round, and where their sum goes.
``plan_buckets`` decides which gradients these are.

    Bucket ─ Delivery ┬ ToGradient                         into ``param.grad``
                      └ ToOwner (hosted/steps.py)       to the owners of its elements

Must not know other buckets, optimizers or hooks. The caller holds the lock of the GradientReducer
(gradient_reducer.py), unless a method says otherwise.
"""

from __future__ import annotations

import abc
import enum
import functools
import operator
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from byteps_py import rank_bits
from byteps_py.errors import GradientOrderError, MismatchError, NonFiniteError
from byteps_py.session import Session
from byteps_py.tensor_codec import Codec
from byteps_py.tensors import NonFinite
from byteps_py.torch.collectives import nonfinite
from byteps_py.torch.collectives.dtypes import check_dense
from byteps_py.torch.collectives.parameter_owners import find_averaging
from byteps_py.torch.collectives.slot_view import PieceView, TensorRequest
from byteps_py.torch.compression import Compression, CompressionChoice
from byteps_py.torch.gradients.gradient_checksums import GradientChecksums, Gradients, Scratch
from byteps_py.torch.operations.reductions import Average, ReduceOp


def plan_buckets(
    sizes_bytes: Sequence[int], kinds: Sequence[Hashable], fusion_bytes: int, together: Sequence[Sequence[int]] = ()
) -> list[list[int]]:
    """Group gradients into buckets of at most ``fusion_bytes``. Returns the indices in each bucket.

    Index 0 is the first gradient in the order of the forward pass. Backward passes compute gradients roughly from last
    to first, so buckets are filled in that order. The gradients of a bucket are of one kind, which one tensor can hold.
    A gradient of ``fusion_bytes`` or more travels alone. Indices in one list of ``together`` share a bucket of any size
    if they are of one kind.

    >>> plan_buckets([10, 30, 10, 10], ["a", "a", "a", "b"], 25)
    [[3], [2, 0], [1]]
    >>> plan_buckets([10, 30, 10, 10], ["a", "a", "a", "b"], 25, [[0, 1, 3]])
    [[3], [2], [1, 0]]
    """
    buckets: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}  # kind → (bucket, bytes)
    group_of = {index: number for number, indices in enumerate(together) for index in indices}
    grouped: dict[Hashable, list[int]] = {}
    for index in reversed(range(len(sizes_bytes))):
        if index in group_of:
            key = group_of[index], kinds[index]
            if key not in grouped:
                grouped[key] = []
                buckets.append(grouped[key])
            grouped[key].append(index)
            continue
        size, kind = sizes_bytes[index], kinds[index]
        bucket, used = filling.get(kind, ([], fusion_bytes))
        if size >= fusion_bytes:
            bucket = [index]
            buckets.append(bucket)
            continue
        if used + size > fusion_bytes or not bucket:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(index)
        filling[kind] = (bucket, used + size)
    return buckets


@dataclass(frozen=True, slots=True)
class GradientOptions:
    """How to combine gradients.

    predivide: a factor f for averages: gradients are divided by f before the sum and multiplied by f/size after it.
    group: the ranks that combine their gradients; empty for all. prefix: of the gradients' names.
    nonfinite: what to do if gradients are NaN or infinite.
    caller: what combines the gradients, as parameter_owners.py knows it.
    """

    compression: CompressionChoice = Compression.none
    op: ReduceOp = Average
    predivide: float = 1.0
    group: tuple[int, ...] = ()
    prefix: str = "Gradient."
    sparse_as_dense: bool = False
    nonfinite: NonFinite = NonFinite.ALLOW
    caller: str = ""

    @property
    def divides(self) -> bool:
        """True if the service divides the sum; otherwise an average is multiplied with ``after``."""
        return self.op is Average and self.predivide == 1.0

    def members(self, size: int) -> int:
        """The number of ranks that combine gradients, in a job of ``size`` ranks."""
        return len(self.group) or size

    def after(self, size: int) -> float:
        """The factor of a result."""
        return 1.0 if self.predivide == 1.0 else self.predivide / self.members(size)


class GradientPlace:
    """The bucket of a parameter's gradient and its position there. Looked up once: hashing a parameter is slow."""

    __slots__ = ("bucket", "position")

    def __init__(self, bucket: Bucket, position: int) -> None:
        self.bucket = bucket
        self.position = position


class BucketState(enum.Enum):
    """The state of a bucket in a round. ``reset`` makes it OPEN again."""

    OPEN = "its gradients are computed, or none is yet"
    SENT = "its gradients were handed over, or need not travel"
    ASKED = "ranks exchange which of its gradients are sparse, in place of them"
    UNCLEAR = "gradients of some rank may be sparse, so that it is to be split"
    DONE = "its sum is delivered"


#: The states that may follow each.
AFTER = {
    BucketState.OPEN: {BucketState.SENT, BucketState.ASKED},
    BucketState.SENT: {BucketState.DONE, BucketState.UNCLEAR},
    BucketState.ASKED: {BucketState.UNCLEAR},
    BucketState.UNCLEAR: set[BucketState](),
    BucketState.DONE: set[BucketState](),
}
_OPEN = BucketState.OPEN  # hooks read it


class Delivery(abc.ABC):
    """The destination of a GradientReducer's sums."""

    #: True if gradients travel even where no other rank combines them.
    always_travels = False
    #: When a gradient was changed too early, and how to do it right.
    untouched_until: str
    touched_remedy: str

    def kind_of(self, name: str, param: torch.nn.Parameter, dtype: torch.dtype) -> Hashable:
        """Gradients of different kinds must not share a bucket. ``dtype``: on the wire. Raises UsageError for a
        gradient that can't be delivered."""
        return ()

    def request(self, request: TensorRequest, is_sparse: bool) -> TensorRequest:
        """What a bucket declares, from what it declares for sums that all ranks get. ``is_sparse``: of a
        SparseBucket."""
        return request

    @abc.abstractmethod
    def prepare(self, bucket: Bucket, gradients: Gradients, is_early: bool) -> Gradients:
        """The gradients to hand over now, from those that the bucket has."""

    @abc.abstractmethod
    def receive(self, bucket: Bucket) -> None:
        """The bucket was handed over. Wait as long as the delivery needs, and deliver the sums. Raises
        GradientOrderError, and as Session.wait does."""

    @abc.abstractmethod
    def receive_rows(self, bucket: Bucket, rows: torch.Tensor) -> None:
        """Deliver ``rows``, the sum of a SparseBucket, which has arrived."""


@dataclass(frozen=True, slots=True)
class BucketParts:
    """The parts of a bucket. ``first``: the position of its first parameter in the order of the forward pass."""

    request: TensorRequest
    names: list[str]
    params: list[torch.nn.Parameter]
    options: GradientOptions
    first: int
    scratch: Scratch
    delivery: Delivery


class Bucket:
    """Gradients that travel as one tensor. Its state is that of the current round.

    due: if owners have the sum, which
    parameters take part in the step that is to be made with it; None: none is.
    """

    #: It travels in a slot of the communication service.
    has_slot = True

    def __init__(self, parts: BucketParts) -> None:
        self.request = parts.request
        self.names = parts.names
        self.params = parts.params
        self.options = parts.options
        self.first = parts.first
        self.delivery = parts.delivery
        self.slot_view: PieceView | None = None
        self.codec = parts.request.spec.codec  # from the end of the warm-up on
        self._rounds_before = 0  # it travelled with another one
        self.due: tuple[bool, ...] | None = None
        self._checksums = GradientChecksums(parts.scratch, self._contribution)
        self.reset()

    def reset(self) -> None:
        """Begin a round."""
        self.arrived: list[int] = []  # positions of gradients, in the order in which they were computed
        # The number of gradients in this round. Counted at the first one, because requires_grad may change before.
        self.expected = 0
        self.state = _OPEN
        self.sparse_flags: PieceView | None = None  # ASKED: which gradients are sparse
        self.dispute: MismatchError | None = None  # UNCLEAR: ranks have sent different things
        self.participates = [False] * len(self.params)  # set by ``collect``: requires_grad may change later
        self.gives = [False] * len(self.params)  # set by ``hand_over``: which of them have a gradient
        self.final: list[torch.Tensor | None] = [None] * len(self.params)  # gradients that must not change
        self.versions = [0] * len(self.params)  # of ``final``
        self._checksums.reset()

    def move_to(self, state: BucketState) -> None:
        """Raises RuntimeError for a state that can't follow, which is a fault of this package."""
        if state not in AFTER[self.state]:
            raise RuntimeError(f"{self.request.spec.name!r} is {self.state.name}: {state.name} can't follow")
        self.state = state

    @property
    def sent(self) -> bool:
        """True if something of the round was sent, or need not travel."""
        return self.state is not _OPEN

    def mark(self, position: int, grad: torch.Tensor | None) -> bool:
        """Note that a gradient was computed. True if the bucket may be complete (``is_complete``). Without the lock."""
        if grad is not None and self.state is _OPEN:
            self.final[position], self.versions[position] = grad, grad._version
        self.arrived.append(position)
        return len(self.arrived) >= self.expected

    def is_complete(self, passes: int) -> bool:
        """True if every gradient was computed ``passes`` times, provided that none was computed more often."""
        if not self.expected:
            self.expected = passes * max(1, sum(param.requires_grad for param in self.params))
        return len(self.arrived) >= self.expected

    def recount(self, passes: int) -> str | None:
        """Allow changes of gradients that were computed less than ``passes`` times. Returns the name of a gradient that
        was computed more often, if there is one."""
        for position, count in Counter(self.arrived).items():
            if count > passes:
                return self.names[position]
            if count < passes:
                self.final[position] = None
        return None

    def collect(self, sparse: bool = False) -> list[torch.Tensor | None]:
        """The gradients to hand over; None, which means zeros, for frozen parameters and missing gradients.

        Raises UsageError for a gradient on the meta device, and, unless ``sparse``, for one that is not dense.
        """
        self.participates = [param.requires_grad for param in self.params]
        for position in self.arrived:
            self.participates[position] = True
        found = [
            p.grad if participates else None for p, participates in zip(self.params, self.participates, strict=True)
        ]
        for position, grad in enumerate(found):
            if grad is not None and (grad.layout is not torch.strided or grad.is_meta):
                if self.options.sparse_as_dense and not grad.is_meta:
                    found[position] = self._make_dense(position, grad)
                elif grad.is_meta or not sparse:
                    check_dense(grad, self.names[position])  # raises
        return found

    def _make_dense(self, position: int, grad: torch.Tensor) -> torch.Tensor:
        dense = grad.to_dense()
        self.replace_gradient(position, dense)
        return dense

    def hand_over(self, gradients: Sequence[torch.Tensor | None], is_early: bool = False) -> None:
        """Send the ``gradients`` that ``collect`` returned. Has no effect if the bucket does not travel.

        is_early: the training continues before it waits, and could change gradients meanwhile.
        """
        if self.slot_view is None:
            return
        self.gives = [grad is not None for grad in gradients]
        given = self.delivery.prepare(self, gradients, is_early)
        if is_early:
            self._checksums.send(self.slot_view, given)
        else:
            self.slot_view.contribute(self._contribution(given))

    def _contribution(self, gradients: Gradients) -> Gradients:
        factor = self.options.predivide
        return gradients if factor == 1.0 else [None if grad is None else grad.detach() / factor for grad in gradients]

    def replace_gradient(self, position: int, new: torch.Tensor) -> None:
        """Let ``new`` take the place of the parameter's gradient, with the same values."""
        grad = self.params[position].grad
        if self.final[position] is grad and grad is not None and self.versions[position] == grad._version:
            self.final[position], self.versions[position] = new, new._version
        self.params[position].grad = new

    def describe(self, position: int) -> str:
        """A parameter in words, for a comparison between ranks. With its shape if the service does not see that."""
        param, shape = self.params[position], ""
        if len(self.params) > 1:
            shape = f" {str(param.dtype).removeprefix('torch.')}{list(param.shape)}"
        return f"{self.names[position]!r}{shape}"

    def begin_session(self, warmup_steps: int) -> None:
        """In a new session, in which all ranks begin the same warm-up."""
        if warmup_steps and self.codec is not None:
            self.travel_with(None)

    def choose_form(self, warmup_steps: int) -> None:
        """Before a round: make ``request`` and ``slot_view`` those of the form in which the bucket travels."""
        if self.codec is not self.request.spec.codec and self.round >= warmup_steps:
            self.travel_with(self.codec)

    def after_join(self) -> None:
        """All ranks have joined, some before others. Before the first round after that."""

    def prioritize(self, priority: int) -> None:
        """Set the priority with which the bucket travels, before its first round."""
        self.request = replace(self.request, spec=replace(self.request.spec, priority=priority))

    def travel_with(self, codec: Codec | None) -> None:
        """Use ``codec`` from the next round on, before which ranks agree again. Rounds are counted on."""
        self._rounds_before = self.round
        self.request = replace(self.request, spec=replace(self.request.spec, codec=codec))
        self.slot_view = None

    def set_terms(self, terms: str) -> None:
        """Set what else ranks must agree on. They agree again before the bucket's next round."""
        self.request = replace(self.request, spec=replace(self.request.spec, terms=terms))
        self.slot_view = None

    def take_over(self, other: Bucket, positions: Sequence[int]) -> None:
        """Continue the round of ``other`` for its gradients at ``positions``, which are this bucket's gradients."""
        self.arrived = [i for i, position in enumerate(positions) if other.participates[position]]
        self.final = [other.final[i] for i in positions]
        self.versions = [other.versions[i] for i in positions]

    @property
    def changed(self) -> str | None:
        """The name of a parameter whose gradient was changed after it was final; None if there is none."""
        for position, (param, final, version) in enumerate(zip(self.params, self.final, self.versions, strict=True)):
            if final is not None and (param.grad is not final or final._version != version):
                return self.names[position]
        found = [
            p.grad if participates else None for p, participates in zip(self.params, self.participates, strict=True)
        ]
        changed = self._checksums.changed(found)
        return None if changed is None else self.names[changed]

    @property
    def is_active(self) -> bool:
        """False if all its parameters are frozen, so that it is not part of the round."""
        return bool(self.arrived) or any(param.requires_grad for param in self.params)

    @property
    def round(self) -> int:
        """The number of the round, from 1; 0 if the bucket does not travel."""
        return self._rounds_before + self.slot_view.slot.round if self.slot_view is not None else 0

    @property
    def results(self) -> list[torch.Tensor] | None:
        """The results, by gradient; None if it does not travel, or results are not gradients."""
        return self.slot_view.results if self.slot_view is not None else None

    @property
    def blame(self) -> int:
        """The ranks that made the result NaN or infinite (rank_bits.py); 0 if there are none, or without a check."""
        return self.slot_view.slot.nonfinite_ranks if self.slot_view is not None else 0

    def advance(self) -> bool:
        """Send what depends on messages of other ranks, after waiting for them. False if nothing more is to be sent
        before ``receive``, as always for dense gradients."""
        return False

    def await_sum(self) -> None:
        """Wait for the sum. Raises as Session.wait does."""
        if self.slot_view is not None:
            self.slot_view.wait()

    def receive(self) -> None:
        """Deliver the sum, as the delivery says. Raises GradientOrderError, and as Session.wait does."""
        self.delivery.receive(self)

    def write_results(self) -> None:
        """Put the result, which has arrived, into ``param.grad``. Has no effect if the bucket did not travel."""
        slot_view = self.slot_view
        if slot_view is None:
            return
        copied: list[int] = []
        outputs: list[torch.Tensor] = []
        given: list[torch.Tensor] = []
        for position, (param, participates) in enumerate(zip(self.params, self.participates, strict=True)):
            if not participates:
                continue  # frozen: must not get a gradient
            grad = slot_view.results[position]
            if param.dtype is slot_view.dtype and param.is_cpu:
                param.grad = grad
            else:
                if param.grad is None or param.grad.layout is not torch.strided:
                    param.grad = torch.empty_like(param)
                grad = param.grad
                copied.append(position)
                outputs.append(grad)
            given.append(grad)
        slot_view.fetch(outputs, copied)
        after = self.options.after(slot_view.session.size)
        if after != 1.0 and given:
            with torch.no_grad():
                torch._foreach_mul_(given, after)

    @property
    def is_usable(self) -> bool:
        """False if what the bucket would keep of the round for later ones is not finite. After ``write_results``."""
        return True

    def end_round(self, is_used: bool) -> None:
        """Keep what later rounds go on from, if a step is made with this one's results."""

    def check_untouched(self) -> None:
        """Raises GradientOrderError if a gradient was changed while it was in flight."""
        self.refuse_change(self.changed)
        self.check_untouched_on_device()

    def check_untouched_on_device(self) -> None:
        """The rest of the check that ``receive`` makes, for gradients on a GPU. Raises GradientOrderError."""
        changed = self._checksums.changed_on_device()
        self.refuse_change(None if changed is None else self.names[changed])

    def refuse_change(self, touched: str | None) -> None:
        """Raises GradientOrderError for a parameter whose gradient was changed; None: there is none."""
        if touched is not None:
            param = self.params[self.names.index(touched)]
            if (other := find_averaging([param], besides=self.options.caller)) is not None:
                raise GradientOrderError(
                    f"the gradient of {touched!r} was changed after backward() and before step(): {other} averages it, "
                    "too. Use one of the two: the plain optimizer, or the module without a wrapper"
                )
            raise GradientOrderError(
                f"the gradient of {touched!r} was changed after backward() and before "
                f"{self.delivery.untouched_until}: the change would be lost. {self.delivery.touched_remedy}"
            )


class ToGradient(Delivery):
    """Into ``param.grad`` of all ranks: a view of the slot's result, or a copy of it."""

    untouched_until = "synchronize()"
    touched_remedy = (
        "Call optimizer.synchronize() first, then clip or unscale, then step() inside optimizer.skip_synchronize()"
    )

    def __init__(self) -> None:
        self._own: dict[torch.nn.Parameter, torch.Tensor] = {}  # see ``prepare``

    def prepare(self, bucket: Bucket, gradients: Gradients, is_early: bool) -> Gradients:
        """Copies gradients that share memory with their results, as zero_grad(set_to_none=False) leaves them, if the
        training goes on meanwhile. It could see either of the two otherwise, and a change of the gradient would change
        the result."""
        if not is_early or bucket.slot_view is None:
            return gradients
        given = list(gradients)
        for position, (grad, address) in enumerate(zip(gradients, bucket.slot_view.result_addresses, strict=True)):
            if grad is not None and grad.data_ptr() == address and grad.numel():
                param = bucket.params[position]
                own = self._own.get(param)
                if own is None:
                    own = self._own[param] = torch.empty_like(grad, requires_grad=False)
                own.copy_(grad.detach())
                bucket.replace_gradient(position, own)
                given[position] = own
        return given

    def receive(self, bucket: Bucket) -> None:
        touched = bucket.changed  # checked while the result is in flight
        bucket.await_sum()
        bucket.refuse_change(touched)
        bucket.write_results()

    def receive_rows(self, bucket: Bucket, rows: torch.Tensor) -> None:
        bucket.params[0].grad = rows


def release_results(bucket: Bucket) -> None:
    """Copy gradients out of the slot's memory, which the service reuses when the name is declared again."""
    if bucket.slot_view is not None:
        for param, address in zip(bucket.params, bucket.slot_view.result_addresses, strict=True):
            if param.grad is not None and param.grad.data_ptr() == address:
                param.grad = param.grad.detach().clone()


def find_nonfinite(session: Session, buckets: Sequence[Bucket], options: GradientOptions) -> NonFiniteError | None:
    """The error for gradients of ``buckets`` that have arrived; None if they are finite or not checked. Reads gradients
    only if the service has reported some, or if the rank is alone."""
    if not options.nonfinite:
        return None
    alone = options.members(session.size) == 1
    bad = {bucket: blame for bucket in buckets if (blame := _blame(bucket, session) if alone else bucket.blame)}
    if not bad:
        return None
    places = [place for bucket in bad for place in _places(bucket)]
    step = max(bucket.round for bucket in bad)
    return nonfinite.explain(functools.reduce(operator.or_, bad.values()), session.size, step, places)


def _blame(bucket: Bucket, session: Session) -> int:
    """The blame of a rank that is alone. Its gradients need not travel, so the service may not check them."""
    if bucket.slot_view is not None:
        return bucket.blame
    return rank_bits.of_rank(session.rank, session.size) if any(True for _ in _places(bucket)) else 0


def _places(bucket: Bucket) -> Iterator[str]:
    for position, (name, param) in enumerate(zip(bucket.names, bucket.params, strict=True)):
        if (results := bucket.results) is not None:
            found = nonfinite.where(name, results[position], param.dtype)
        elif param.grad is not None and bucket.participates[position]:
            found = nonfinite.where(name, param.grad)
        else:
            found = None
        if found is not None:
            yield found

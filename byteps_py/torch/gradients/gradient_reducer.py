"""Gradients on their way: from "this one is final" to "all of them are combined", bucket by bucket.

Owns which gradients of a round were handed over. Must not know optimizers or hooks: those are in passes.py and
parallel.py, which share this. Autograd's threads call ``ready`` (one at a time per device, hence the lock), the
training thread calls ``finish``.

    hook → ready(place) ─ last of its bucket → copy into the slot, hand over ─┐
    step → finish()  ─ the rest of the buckets, zeros for unused ─────────┴→ wait → p.grad = view of the result
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from byteps_py.errors import CommunicationError, GradientOrderError, MismatchError, NonFiniteError
from byteps_py.session import Session
from byteps_py.tensors import TOGETHER, DType, NonFinite, Op, TensorSpec
from byteps_py.torch.engine import nonfinite
from byteps_py.torch.engine.context import Context
from byteps_py.torch.engine.dtypes import wire_dtype
from byteps_py.torch.engine.slot_view import PieceView, TensorRequest
from byteps_py.torch.gradients import nonfinite_gradients
from byteps_py.torch.gradients.bucket import Bucket, GradientOptions, GradientPlace
from byteps_py.torch.gradients.bucket_layout import plan_buckets
from byteps_py.torch.gradients.gradient_checksums import Scratch
from byteps_py.torch.gradients.plan_comparison import PlanComparison
from byteps_py.torch.gradients.sparse_bucket import SparseBucket


class GradientReducer:
    """Combines the gradients of named parameters over the ranks as ``options`` say, each round once.

    named: in order of the forward pass. groups: names that travel together, whatever their sizes; the others do as
    their sizes suggest. The result replaces ``param.grad``: it is a view of the service's
    memory, valid until the gradient is handed over again, or (CUDA, compression) the gradient's own memory.
    """

    def __init__(
        self,
        context: Context,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        options: GradientOptions | None = None,
        groups: Sequence[Sequence[str]] = (),
    ) -> None:
        self._context = context
        self._options = replace(options or GradientOptions(), nonfinite=nonfinite.wanted(context))
        self._buckets: list[Bucket] = []
        self._places: dict[torch.nn.Parameter, GradientPlace] = {}
        self._is_prioritized = False
        self._session: Session | None = None  # the one whose slots the buckets use
        self._lock = threading.Lock()
        self._scratch = Scratch()
        # By name: a rank may well have an optimizer that others have not.
        first = min((name for name, _ in named), default="")
        self._agreement = PlanComparison(
            context, context.claim(f"{self._options.prefix}(all) {first}"), self._options.group
        )
        self._names: list[str] = []  # in the order in which they came
        self._is_agreed = False  # that all ranks have planned alike
        self._disagreement: MismatchError | None = None
        self._left_out = 0  # averages that nobody stepped with
        #: Whether a gradient may be sparse; if not, UsageError is raised where one is.
        self.takes_sparse = not self._options.sparse_as_dense
        #: This rank takes no part: its gradients stay its own.
        self.outside = bool(self._options.group) and context.session.rank not in self._options.group
        #: How many backward passes add up to a final gradient. Constant within a round.
        self.passes = 1
        #: What to say of a gradient that was computed more often than that.
        self.too_often = "a backward pass may compute it once. Use checkpoint(…, use_reentrant=False)"
        #: Of the last round: its gradients are not finite, and the step is to be left out.
        self.poison: NonFiniteError | None = None
        self.add(named, groups)

    def add(self, named: Sequence[tuple[str, torch.nn.Parameter]], groups: Sequence[Sequence[str]] = ()) -> None:
        """Take more parameters in. They come behind the earlier ones."""
        if self.outside:
            return
        behind = len(self._places)
        self._is_agreed, self._disagreement = False, None
        self._names += [name for name, _ in named]
        options = self._options
        dtypes = [options.compression.wire_dtype(param.dtype) for _, param in named]
        sizes = [param.numel() * dtype.itemsize for (_, param), dtype in zip(named, dtypes, strict=True)]
        kinds = [(dtype, p.device, p.requires_grad) for (_, p), dtype in zip(named, dtypes, strict=True)]
        index_of = {name: index for index, (name, _) in enumerate(named)}
        together = [[index_of[name] for name in group] for group in groups]
        for bucket_indices in plan_buckets(sizes, kinds, self._context.settings.fusion_bytes, together):
            indices = sorted(bucket_indices)
            names = [named[i][0] for i in indices]
            params = [named[i][1] for i in indices]
            first = behind + min(indices)
            bucket = Bucket(self._request(names, params, first), names, params, options, first, self._scratch)
            self._buckets.append(bucket)
            self._places.update((param, GradientPlace(bucket, position)) for position, param in enumerate(params))

    def prioritize(self) -> None:
        """What the next forward pass needs first goes first: for who waits for one gradient after the other. Without
        effect on gradients that have travelled already."""
        self._is_prioritized = True
        for bucket in self._buckets:
            spec = replace(bucket.request.spec, priority=self._priority(bucket.first))
            bucket.request = replace(bucket.request, spec=spec)
        if any(bucket.slot_view is not None for bucket in self._buckets):
            warnings.warn(
                "CrossBarrier wraps an optimizer that has made steps already: its gradients go in the order in which "
                "they become ready, not the most urgent first. Wrap it before the first step",
                stacklevel=3,
            )

    def _priority(self, first: int) -> int:
        return -first if self._is_prioritized else TOGETHER

    def _request(self, names: list[str], params: list[torch.nn.Parameter], first: int) -> TensorRequest:
        options = self._options
        dtype = options.compression.wire_dtype(params[0].dtype)
        shapes = tuple(tuple(param.shape) for param in params)
        spec = TensorSpec(
            self._context.claim(options.prefix + _title(names)),
            wire_dtype(dtype, names[0]),
            shapes[0] if len(shapes) == 1 else (sum(param.numel() for param in params),),
            options.op.wire_op,
            average=options.divides,
            priority=self._priority(first),
            group=options.group,
            nonfinite=options.nonfinite,
        )
        return TensorRequest(spec, dtype, shapes, params[0].device)

    @property
    def begun(self) -> bool:
        """True from the first ``ready`` of a round to its ``finish`` or ``depart``."""
        return any(bucket.due for bucket in self._buckets)

    def place(self, param: torch.nn.Parameter) -> GradientPlace:
        """What to call ``ready`` with."""
        return self._places[param]

    def ready(self, place: GradientPlace, param: torch.Tensor) -> None:
        """The gradient of ``param``, which travels there, was computed. After ``passes`` times it is final, and must
        not change before ``finish``. Never blocks for others. Raises GradientOrderError if it was computed more
        often: now, or where its bucket is not complete, in ``finish``."""
        # A thousand small gradients are a thousand calls: what can wait for the last one of the bucket does.
        bucket = place.bucket
        if bucket.mark(place.position, param.grad):
            self._look_at(bucket)

    def _look_at(self, bucket: Bucket) -> None:
        with self._lock:
            if bucket.sent and len(bucket.arrived) > bucket.due:
                raise self._too_often(bucket.names[bucket.arrived[-1]])
            if not bucket.sent and bucket.is_complete(self.passes):
                self._check_passes(bucket)
                if self._disagreement is None:  # ``finish`` says so
                    self._send(bucket, is_early=True)

    def _check_passes(self, bucket: Bucket) -> None:
        name = bucket.recount(self.passes)
        if name is not None:
            raise self._too_often(name)

    def _too_often(self, name: str) -> GradientOrderError:
        return GradientOrderError(f"the gradient of {name!r} came too often: {self.too_often}")

    def finish(self) -> None:
        """Hand over what is left, wait for everything, and put the results into ``param.grad``.

        Raises GradientOrderError if a gradient was touched after it was handed over, else the first error of
        the session, else NonFiniteError if the scheme says so; the round is over in any case.
        """
        errors: list[Exception] = []
        self.poison = None
        with self._lock:
            self._send_rest(errors)
            _attempt(errors, self._agree)
            if self._disagreement is not None:
                self._abandon()
            on_their_way = [bucket for bucket in self._buckets if bucket.sent]
            disputed: list[tuple[Bucket, Exception | None]] = []
            for bucket in on_their_way:
                _attempt(errors, bucket.travel)
            for bucket in on_their_way:  # all of them, failures or not: none may stay pending
                _attempt(errors, self._receive, bucket, disputed)
            settled: list[Bucket] = []
            for bucket, error in disputed:
                _attempt(errors, self._settle, bucket, error, settled)
            for part in settled:
                _attempt(errors, self._send, part)
            for part in settled:
                _attempt(errors, part.travel)
            for part in settled:
                _attempt(errors, part.receive)
            if not errors:
                sent = [bucket for bucket in self._buckets if bucket.sent]
                self.poison = nonfinite_gradients.found_in(self._context.session, sent, self._options)
            for bucket in self._buckets:
                bucket.reset()
        if errors:
            raise errors[0]
        self._judge()

    def leave_out(self) -> None:
        """Nobody is to use the gradients of the last round: take them away, and log why."""
        if self.poison is not None:
            nonfinite.tell(self.poison, self._context.session)
            for param in self._places:
                param.grad = None

    def _judge(self) -> None:
        if self.poison is not None and self._options.nonfinite is NonFinite.RAISE:
            raise self.poison

    def drop(self) -> None:
        """Forget the round, if one has begun: its gradients are of no use any more.

        In a job that goes on the other ranks wait for them, so that they are sent all the same.
        """
        if self.begun:
            for bucket in self._buckets:
                bucket.recount(self.passes)
            has_final = any(grad is not None for bucket in self._buckets for grad in bucket.final)
            if has_final and self._context.is_open and self._context.session is self._session:
                with contextlib.suppress(CommunicationError, GradientOrderError, NonFiniteError):  # nobody wants it
                    self.finish()
            with self._lock:
                for bucket in self._buckets:
                    bucket.reset()

    def depart(self) -> list[Bucket]:
        """The first half of ``finish``: hand over what is left. Returns the buckets on their way, in forward order.

        Each must go through ``arrive`` before its next round. Raises as ``finish`` does; then none is on its way.
        """
        errors: list[Exception] = []
        with self._lock:
            self._send_rest(errors)
            departed = [bucket for bucket in self._buckets if bucket.sent]
            for bucket in departed:
                bucket.due = 0
                _attempt(errors, bucket.check_untouched)
        if errors:
            with contextlib.suppress(Exception):  # the first one is raised below
                self.finish()
            raise errors[0]
        return sorted(departed, key=lambda bucket: bucket.first)

    def arrive(self, bucket: Bucket) -> bool:
        """The second half of ``finish``, for one bucket: its results into ``param.grad``. False if they are not to be
        used. Raises its error."""
        try:
            with self._lock:
                self._agree()
            if bucket.slot_view is not None:
                bucket.slot_view.wait()
                bucket.deliver()
            self.poison = nonfinite_gradients.found_in(self._context.session, [bucket], self._options)
        finally:
            with self._lock:
                if self._disagreement is not None:
                    bucket.slot_view = None  # see ``_abandon``
                bucket.reset()
        self._judge()
        if self.poison is not None:
            nonfinite.tell(self.poison, self._context.session)
        return self.poison is None

    # ---- sparse gradients: which they are turns out while the others may be on their way already -------------

    @property
    def has_sparse(self) -> bool:
        """A gradient was sparse, and may be so again."""
        return any(isinstance(bucket, SparseBucket) for bucket in self._buckets)

    def _receive(self, bucket: Bucket, disputed: list[tuple[Bucket, Exception | None]]) -> None:
        """As the bucket does; if its ranks were not all right to take it for dense, put it to ``disputed``."""
        try:
            if bucket.kinds is not None:
                bucket.kinds.wait()
                disputed.append((bucket, None))
            else:
                bucket.receive()
        except MismatchError as error:
            # Perhaps another rank's gradients are sparse: all its ranks have this error, and find out together.
            if not self.takes_sparse or isinstance(bucket, SparseBucket):
                raise
            disputed.append((bucket, error))

    def _ask(self, name: str, gradients: Sequence[torch.Tensor | None]) -> PieceView:
        """Begin to find out which gradients of a bucket are sparse on any rank."""
        spec = TensorSpec(name, DType.UINT8, (len(gradients),), Op.MAX, group=self._options.group)
        request = TensorRequest(spec, torch.uint8, ((len(gradients),),), torch.device("cpu"))
        (slot_view,) = self._context.slot_views([request])
        sparse = [grad is not None and grad.layout is not torch.strided for grad in gradients]
        slot_view.contribute([torch.tensor(sparse, dtype=torch.uint8)])
        return slot_view

    def _settle(self, bucket: Bucket, error: Exception | None, settled: list[Bucket]) -> None:
        """Find out which gradients of a bucket are sparse on any rank; those travel by themselves from now on.

        Adds what comes in the bucket's place and takes part in the round to ``settled``. Raises ``error`` if none is.
        """
        kinds = bucket.kinds
        if kinds is None or error is not None:
            kinds = self._ask(f"{bucket.request.spec.name}.kinds", bucket.collect(sparse=True))
            kinds.wait()
        sparse = kinds.results[0].tolist()
        if error is not None and not any(sparse):
            raise error
        params, names = bucket.params, bucket.names
        split: list[Bucket] = []
        dense = [position for position, is_sparse in enumerate(sparse) if not is_sparse]
        parts = [([position], True) for position, is_sparse in enumerate(sparse) if is_sparse]
        for positions, is_sparse in [*parts, (dense, False)] if dense else parts:
            its_names, its_params = [names[i] for i in positions], [params[i] for i in positions]
            request = self._request(its_names, its_params, bucket.first)
            if is_sparse:
                part: Bucket = SparseBucket(
                    self._context, request, its_names[0], its_params[0], self._options, bucket.first, self._scratch
                )
            else:
                part = Bucket(request, its_names, its_params, self._options, bucket.first, self._scratch)
            part.take_over(bucket, positions)
            split.append(part)
            for position, param in enumerate(its_params):
                self._places[param].bucket, self._places[param].position = part, position
        index = self._buckets.index(bucket)
        self._buckets[index : index + 1] = split
        settled += [part for part in split if part.wanted]

    # ---- sending -------------------------------------------------------------------------------------------

    def _begin_agreement(self) -> None:
        if self._buckets and self._exchanges_needed() and not self._is_agreed:
            self._agreement.begin(self._plan())

    def _agree(self) -> None:
        """Raises MismatchError, on all ranks and from now on, unless all have planned alike."""
        if self._disagreement is not None:
            raise self._disagreement
        if self._agreement.is_under_way:
            try:
                self._agreement.settle(self._plan())
            except MismatchError as error:
                self._disagreement = error
                raise
            self._is_agreed = True

    def _abandon(self) -> None:
        """What is on its way under names that not all ranks know will never come back."""
        for bucket in self._buckets:
            if bucket.sent:
                bucket.slot_view = None
            bucket.reset()

    def _plan(self) -> list[tuple[str, str]]:
        options = self._options
        asked = (
            f"op={options.op.name.title()}, compression={options.compression.__name__}, "
            f"gradient_predivide_factor={options.predivide:g}, sparse_as_dense={options.sparse_as_dense}"
        )
        entries = {
            name: (bucket.request.spec.name, bucket.described(position))
            for bucket in self._buckets
            for position, name in enumerate(bucket.names)
        }
        return [("", asked), *[entries[name] for name in self._names]]

    def note_unused(self) -> None:
        """This rank makes no step with the last round's averages. All must do so, or none: it becomes a part of what
        ranks agree on before the next round of one bucket, so that this is an error if they did not."""
        with self._lock:
            dense = [b for b in self._buckets if b.slot_view is not None and not isinstance(b, SparseBucket)]
            if dense:
                self._left_out += 1
                noun = "step" if self._left_out == 1 else "steps"
                smallest = min(dense, key=lambda bucket: bucket.request.spec.nbytes)
                smallest.leave_results()
                smallest.set_terms(f"{self._left_out} {noun} left out after synchronize()")

    def begin_anew(self) -> None:
        """All ranks are made equal, whatever they did before."""
        with self._lock:
            self._forget_left_out()

    def _forget_left_out(self) -> None:
        self._left_out = 0
        for bucket in self._buckets:
            if bucket.request.spec.terms and not bucket.sent:
                bucket.leave_results()
                bucket.set_terms("")

    def meet(self, evaluations: int | None) -> None:
        """See Agreement: in a step with a closure, before each evaluation's gradients are combined and at the end."""
        if self._buckets and self._exchanges_needed():
            self._agreement.meet(evaluations)

    def _send_rest(self, errors: list[Exception]) -> None:
        for bucket in self._buckets:
            if not bucket.sent and bucket.wanted:
                _attempt(errors, self._check_passes, bucket)
                _attempt(errors, self._send, bucket)
        _attempt(errors, self._begin_agreement)

    def _send(self, bucket: Bucket, is_early: bool = False) -> None:
        gradients = bucket.collect(self.takes_sparse)
        if self._exchanges_needed():
            if self._disagreement is not None:
                raise self._disagreement
            if isinstance(bucket, SparseBucket):
                bucket.start()
            elif any(grad is not None and grad.layout is not torch.strided for grad in gradients):
                bucket.slot_view = None
                bucket.kinds = self._ask(bucket.request.spec.name, gradients)
            else:
                if bucket.slot_view is None or not self._context.holds(bucket.slot_view):
                    self._declare()
                bucket.hand_over(gradients, is_early)
            self._begin_agreement()
        bucket.sent = True

    def _exchanges_needed(self) -> bool:
        session = self._context.session
        session.check_open()  # with nobody to exchange with it would not be asked
        if session is not self._session:  # the first round, or the first one of another job
            self._session = session
            self._is_agreed, self._disagreement = False, None
            self._agreement.forget()
            self._forget_left_out()
            for bucket in self._buckets:
                bucket.slot_view = None
        return self._options.members(session.size) > 1 or self._context.settings.force_distributed

    def _declare(self) -> None:
        """Declare all buckets that take part and are not declared, in one call."""
        new = [
            bucket
            for bucket in self._buckets
            if bucket.wanted
            and not isinstance(bucket, SparseBucket)
            and bucket.kinds is None
            and (bucket.slot_view is None or not self._context.holds(bucket.slot_view))
        ]
        requests = [bucket.request for bucket in new]
        if not self._is_agreed:
            requests.append(self._agreement.request)
        for bucket, slot_view in zip(new, self._context.slot_views(requests), strict=False):
            bucket.slot_view = slot_view


def _title(names: Sequence[str]) -> str:
    """A bucket's name. It stands for all members: ranks whose buckets differ must not be summed."""
    if len(names) == 1:
        return names[0]
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=4).hexdigest()
    return f"{names[0]}+{len(names) - 1} ({digest})"


def _attempt(errors: list[Exception], action: Callable[..., None], *arguments: object) -> None:
    try:
        action(*arguments)
    except Exception as error:
        errors.append(error)

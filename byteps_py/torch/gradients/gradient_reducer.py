"""Combines gradients over ranks, bucket by bucket, while the backward pass still runs.

Owns which gradients of a round were handed over. Must not know optimizers or hooks: backward_passes.py and
distributed_data_parallel.py use this. Autograd's threads call ``ready`` (one at a time for each device, hence the
lock), the training thread calls ``finish``.

    hook → ready(place) ─ last of its bucket → copy into the slot, hand over ─┐
    step → finish() ─ the other buckets, zeros for missing gradients ─────────┴→ wait → p.grad = view of the result
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from byteps_py.errors import CommunicationError, GradientOrderError, MismatchError, NonFiniteError
from byteps_py.session import Session
from byteps_py.tensors import PRIORITY_READY_ORDER, DType, NonFinite, Op, TensorSpec
from byteps_py.torch.collectives import nonfinite
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import wire_dtype
from byteps_py.torch.collectives.plan_comparison import PlanComparison
from byteps_py.torch.collectives.slot_view import PieceView, TensorRequest
from byteps_py.torch.compression import check_low_rank, codec_for
from byteps_py.torch.gradients.bucket import (
    Bucket,
    BucketParts,
    BucketState,
    Delivery,
    GradientOptions,
    GradientPlace,
    ToGradient,
    find_nonfinite,
    plan_buckets,
    release_results,
)
from byteps_py.torch.gradients.factor_bucket import FactorBucket
from byteps_py.torch.gradients.gradient_checksums import Scratch
from byteps_py.torch.gradients.group_bucket import GroupBucket, GroupSums
from byteps_py.torch.gradients.sparse_bucket import SparseBucket

_ADVICE = (
    "Give DistributedOptimizer the same parameters under the same names and in the same order on all ranks, with the "
    "same options, groups, num_groups and BYTEPS_FUSION_BYTES. Ranks that train different parts of a model need a "
    "process_set for each part"
)


class GradientReducer:
    """Combines the gradients of named parameters over the ranks as ``options`` say, each round once.

    named: in the order of the forward pass. groups: names that travel together, of any size; the other gradients travel
    together as their sizes suggest. delivery: where results go. By default, they replace ``param.grad``. It is then a
    view of the service's memory, valid until the gradient is handed over again, or, with CUDA or compression, the
    gradient's own memory. group_sums: by which gradients travel that it takes; None: all in slots of the service.
    """

    def __init__(
        self,
        context: Context,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        options: GradientOptions | None = None,
        groups: Sequence[Sequence[str]] = (),
        delivery: Delivery | None = None,
        group_sums: GroupSums | None = None,
    ) -> None:
        self._context = context
        self._delivery = delivery or ToGradient()
        self._group_sums = group_sums
        self._options = replace(options or GradientOptions(), nonfinite=nonfinite.mode_of(context))
        #: In the order in which they were planned.
        self.buckets: list[Bucket] = []
        self._places: dict[torch.nn.Parameter, GradientPlace] = {}
        self._is_prioritized = False
        self._session: Session | None = None  # the session whose slots the buckets use
        self._joins = 0  # of the context when plans were compared
        self._lock = threading.Lock()
        self._scratch = Scratch()
        self._agreement = PlanComparison(context, "gradients to combine", _ADVICE, self._options.group)
        self._names: list[str] = []  # in the order of ``add``
        #: True if all ranks are known to have equal plans.
        self.is_agreed = False
        self._disagreement: MismatchError | None = None
        self._is_counted = False  # the step of this round
        self._unused_rounds = 0  # rounds whose averages no step used
        #: Whether ``ready`` hands buckets over. If False, it has no effect.
        self.is_early = True
        #: Called with each bucket that was handed over, by the thread that did so, with the lock held.
        self.on_sent: Callable[[GradientReducer, Bucket], None] | None = None
        #: Whether gradients may be sparse. If False, a sparse gradient raises UsageError.
        self.accepts_sparse = not self._options.sparse_as_dense
        #: The ranks that combine gradients; (): all.
        self.group = self._options.group
        #: This rank is not in the group: its gradients stay its own.
        self.is_excluded = bool(self._options.group) and context.session.rank not in self._options.group
        #: The number of backward passes after which a gradient is final. Constant within a round.
        self.passes_per_step = 1
        #: The remedy in the error for a gradient that was computed more often.
        self.too_often_remedy = "a backward pass may compute it once. Use checkpoint(…, use_reentrant=False)"
        #: No step is made with the gradients of this round: they stay here, and ``ready`` has no effect.
        self.is_skipped = False
        #: Whether ``ready`` leaves it to ``finish`` to raise the loss of a rank, and to hand over again.
        self.leaves_losses = False
        #: Set if the gradients of the last round are not finite, so that the step must be skipped.
        self.nonfinite_error: NonFiniteError | None = None
        self._loaded: Mapping[str, Any] = {}  # states of factors, until a session begins
        self.add(named, groups)
        context.keeping_factors.add(self)

    def add(self, named: Sequence[tuple[str, torch.nn.Parameter]], groups: Sequence[Sequence[str]] = ()) -> None:
        """Add parameters behind the earlier ones."""
        if self.is_excluded:
            return
        offset = len(self._places)
        self.is_agreed, self._disagreement = False, None
        self._names += [name for name, _ in named]
        options = self._options
        compressors = [options.compression.of(name, param) for name, param in named]
        dtypes = [each.wire_dtype(param.dtype) for each, (_, param) in zip(compressors, named, strict=True)]
        for compressor, (name, param) in zip(compressors, named, strict=True):
            check_low_rank(compressor, name, param)
        sizes = [
            (param.numel() if low_rank is None else low_rank.most_elements(param)) * dtype.itemsize
            for low_rank, (_, param), dtype in zip((c.low_rank for c in compressors), named, dtypes, strict=True)
        ]
        kinds = [
            (compressor, dtype, param.device, param.requires_grad, self._delivery.kind_of(name, param, dtype))
            for compressor, (name, param), dtype in zip(compressors, named, dtypes, strict=True)
        ]
        index_of = {name: index for index, (name, _) in enumerate(named)}
        together = [[index_of[name] for name in group] for group in groups]
        for bucket_indices in plan_buckets(sizes, kinds, self._context.settings.fusion_bytes, together):
            indices = sorted(bucket_indices)
            bucket = self._new_bucket([named[i] for i in indices], offset + indices[0])
            self.buckets.append(bucket)
            self._places.update((param, GradientPlace(bucket, place)) for place, param in enumerate(bucket.params))

    def factor_states(self) -> dict[str, Any]:
        """See KeepsFactors."""
        with self._lock:
            if self._session is not self._context.session:
                return dict(self._loaded)
            buckets = [bucket for bucket in self.buckets if isinstance(bucket, FactorBucket)]
            return {key: state for bucket in buckets for key, state in bucket.factor_states().items()}

    def load_factor_states(self, states: Mapping[str, Any]) -> set[str]:
        """See KeepsFactors."""
        with self._lock:
            buckets = [bucket for bucket in self.buckets if isinstance(bucket, FactorBucket)]
            taken = {key for bucket in buckets for key in bucket.load_factor_states(states)}
            if self._session is not self._context.session:  # its beginning makes them begin anew
                self._loaded = {key: states[key] for key in taken}
            return taken

    def _new_bucket(
        self, named: Sequence[tuple[str, torch.nn.Parameter]], first: int, is_sparse: bool = False
    ) -> Bucket:
        names, params = [name for name, _ in named], [param for _, param in named]
        request = self._delivery.request(self._request(names, params, first), is_sparse)
        if is_sparse:
            parts = BucketParts(request, names, params, self._options, first, Scratch(), self._delivery)
            return SparseBucket(self._context, parts)
        compressor = self._options.compression.of(names[0], params[0])  # the same for all of them
        parts = BucketParts(request, names, params, self._options, first, self._scratch, self._delivery)
        is_plain = compressor.low_rank is None and request.dtype is params[0].dtype
        if is_plain and self._group_sums is not None and self._group_sums.takes(request):
            return GroupBucket(parts, self._group_sums, self.buckets)
        kind = Bucket if compressor.low_rank is None else FactorBucket
        bucket = kind(parts)
        bucket.begin_session(self._warmup_steps)
        return bucket

    @property
    def _warmup_steps(self) -> int:
        return self._options.compression.warmup_steps

    def prioritize(self) -> None:
        """For CrossBarrier: send the gradients that the next forward pass needs first before the others. Has no effect
        on gradients that have travelled before."""
        self._is_prioritized = True
        for bucket in self.buckets:
            bucket.prioritize(self._priority(bucket.first))
        if any(bucket.slot_view is not None for bucket in self.buckets):
            warnings.warn(
                "CrossBarrier wraps an optimizer that has made steps already: its gradients travel in the order in "
                "which they become ready, not the most urgent first. Wrap it before the first step",
                stacklevel=3,
            )

    def _priority(self, first: int) -> int:
        return -first if self._is_prioritized else PRIORITY_READY_ORDER

    def _request(self, names: list[str], params: list[torch.nn.Parameter], first: int) -> TensorRequest:
        options = self._options
        compressor = options.compression.of(names[0], params[0])  # the same for all of them
        dtype = compressor.wire_dtype(params[0].dtype)
        shapes = tuple(tuple(param.shape) for param in params)
        nbytes = sum(param.numel() for param in params) * dtype.itemsize
        codec = codec_for(compressor, dtype, nbytes, names[0], self._context.settings)
        spec = TensorSpec(
            self._context.claim(options.prefix + _bucket_name(names)),
            wire_dtype(dtype, names[0]),
            shapes[0] if len(shapes) == 1 else (sum(param.numel() for param in params),),
            options.op.wire_op,
            average=options.divides,
            priority=self._priority(first),
            group=options.group,
            nonfinite=options.nonfinite,
            codec=codec,
        )
        return TensorRequest(spec, dtype, shapes, params[0].device)

    @property
    def has_begun(self) -> bool:
        """True from the first ``ready`` of a round to its ``finish`` or ``hand_over_all``."""
        return any(bucket.expected for bucket in self.buckets)

    def place(self, param: torch.nn.Parameter) -> GradientPlace:
        """The argument of ``ready`` for ``param``."""
        return self._places[param]

    def ready(self, place: GradientPlace, param: torch.Tensor) -> None:
        """Note that the gradient of ``param`` was computed. After ``passes_per_step`` times it is final, and must not
        change before ``finish``. Does not wait for other ranks. Raises GradientOrderError if it was computed more
        often; if its bucket is not complete, ``finish`` raises the error."""
        # Called for each gradient, of which there may be thousands, so most work is left to the last one of a bucket.
        bucket = place.bucket
        if self.is_early and not self.is_skipped and bucket.mark(place.position, param.grad):
            self._send_if_complete(bucket)

    def _send_if_complete(self, bucket: Bucket) -> None:
        with self._lock:
            if bucket.sent and len(bucket.arrived) > bucket.expected:
                raise self._too_often_error(bucket.names[bucket.arrived[-1]])
            if not bucket.sent and bucket.is_complete(self.passes_per_step):
                self._check_passes(bucket)
                if self._disagreement is None:  # otherwise ``finish`` raises it
                    try:
                        self._send(bucket, is_early=True)
                    except CommunicationError:
                        if not self.leaves_losses:
                            raise

    def _check_passes(self, bucket: Bucket) -> None:
        name = bucket.recount(self.passes_per_step)
        if name is not None:
            raise self._too_often_error(name)

    def _too_often_error(self, name: str) -> GradientOrderError:
        return GradientOrderError(f"the gradient of {name!r} came too often: {self.too_often_remedy}")

    def finish(self) -> None:
        """Hand over the remaining buckets, wait for all results, and put them into ``param.grad``.

        Raises the first of: GradientOrderError if a gradient was changed after it was handed over, an error of the
        session, NonFiniteError if BYTEPS_NONFINITE is raise. The round is over in any case.
        """
        errors: list[Exception] = []
        self.nonfinite_error = None
        with self._lock:
            self._send_rest(errors)
            _attempt(errors, self._agree)
            if self._disagreement is not None:
                self._abandon()
            self._complete(self.buckets, errors)
            self._complete_split(errors)
            if not errors:
                done = [bucket for bucket in self.buckets if bucket.state is BucketState.DONE]
                self.nonfinite_error = find_nonfinite(self._context.session, done, self._options)
                is_used = self.nonfinite_error is None and all(bucket.is_usable for bucket in done)
                for bucket in done:
                    bucket.end_round(is_used)
            self._reset()
            self._is_counted = False
        if errors:
            self._context.give_up_steps(self._agreement.kind)
            raise errors[0]
        self._raise_if_nonfinite()

    def skip_step(self) -> None:
        """If the last round's gradients are not finite, set them to None and log why."""
        if self.nonfinite_error is not None:
            nonfinite.report(self.nonfinite_error, self._context.session)
            for param in self._places:
                param.grad = None

    def _raise_if_nonfinite(self) -> None:
        if self.nonfinite_error is not None and self._options.nonfinite is NonFinite.RAISE:
            raise self.nonfinite_error

    def drop(self) -> None:
        """Discard the current round, if one has begun.

        While the job continues, other ranks wait for the gradients, so they are sent nevertheless.
        """
        if self.has_begun:
            for bucket in self.buckets:
                bucket.recount(self.passes_per_step)
            has_final = any(grad is not None for bucket in self.buckets for grad in bucket.final)
            if has_final and self._context.is_open and self._context.session is self._session:
                with contextlib.suppress(CommunicationError, GradientOrderError, NonFiniteError):  # discarded anyway
                    self.finish()
            with self._lock:
                self._reset()

    def _reset(self) -> None:
        for bucket in self.buckets:
            bucket.reset()
        if self._group_sums is not None:
            self._group_sums.reset()

    def hand_over_all(self) -> list[Bucket]:
        """The first half of ``finish``: hand over the remaining buckets. Returns all buckets in flight.

        They are in the order of the forward pass. Call ``finish_bucket`` for each of them before its next
        round. Raises as ``finish`` does; then no bucket is in flight.
        """
        handed_over = self.hand_over_rest()
        errors: list[Exception] = []
        with self._lock:
            for bucket in handed_over:
                bucket.expected = 0
                _attempt(errors, bucket.check_untouched)
        self._raise_after_finish(errors)
        self._is_counted = False
        return sorted(handed_over, key=lambda bucket: bucket.first)

    def hand_over_rest(self) -> list[Bucket]:
        """Hand over the remaining buckets, for a ``finish`` that comes later. Returns all buckets in flight. Raises as
        ``finish`` does; then no bucket is in flight."""
        errors: list[Exception] = []
        with self._lock:
            self._send_rest(errors)
            handed_over = [bucket for bucket in self.buckets if bucket.sent]
        self._raise_after_finish(errors)
        return handed_over

    def _raise_after_finish(self, errors: list[Exception]) -> None:
        if errors:
            with contextlib.suppress(Exception):  # the first error is raised below
                self.finish()
            self._context.give_up_steps(self._agreement.kind)
            raise errors[0]

    def finish_bucket(self, bucket: Bucket) -> bool:
        """The second half of ``finish``, for one bucket: put its results into ``param.grad``. False if the results must
        not be used. Raises as ``finish`` does."""
        try:
            with self._lock:
                self._agree()
            if bucket.slot_view is not None or not bucket.has_slot:
                bucket.await_sum()
                bucket.write_results()
            self.nonfinite_error = find_nonfinite(self._context.session, [bucket], self._options)
            bucket.end_round(self.nonfinite_error is None and bucket.is_usable)
        except BaseException:
            self._context.give_up_steps(self._agreement.kind)
            raise
        finally:
            with self._lock:
                if self._disagreement is not None:
                    bucket.slot_view = None  # see ``_abandon``
                bucket.reset()
        self._raise_if_nonfinite()
        if self.nonfinite_error is not None:
            nonfinite.report(self.nonfinite_error, self._context.session)
        return self.nonfinite_error is None

    # ---- sparse gradients: found only when they are computed, while others may be in flight ------------------

    @property
    def has_sparse(self) -> bool:
        """True if a gradient was sparse in an earlier round."""
        return any(isinstance(bucket, SparseBucket) for bucket in self.buckets)

    def _complete(self, buckets: Sequence[Bucket], errors: list[Exception]) -> None:
        """Receive all that are in flight, even after an error, since none may stay pending. Some are UNCLEAR then."""
        in_flight = [bucket for bucket in buckets if bucket.sent]
        going = in_flight
        while going:  # all of them one message further, then all of them the next
            going = [bucket for bucket in going if _advance(errors, bucket)]
        for bucket in in_flight:
            _attempt(errors, self._receive, bucket)
        for bucket in in_flight:  # now, because the host waits for the device here
            _attempt(errors, bucket.check_untouched_on_device)

    def _complete_split(self, errors: list[Exception]) -> None:
        """Split the buckets that are UNCLEAR, and go on with their rounds in their parts, which are not split again."""
        parts: list[Bucket] = []
        for bucket in [each for each in self.buckets if each.state is BucketState.UNCLEAR]:
            _attempt(errors, self._split, bucket, parts)
        for part in parts:
            _attempt(errors, self._send, part)
        self._complete(parts, errors)
        errors += [part.dispute for part in parts if part.dispute is not None]

    def _receive(self, bucket: Bucket) -> None:
        try:
            if bucket.sparse_flags is not None:
                bucket.sparse_flags.wait()
                bucket.move_to(BucketState.UNCLEAR)
            else:
                bucket.receive()
                bucket.move_to(BucketState.DONE)
        except MismatchError as error:
            # Another rank's gradients may be sparse. All ranks get this error, and find out together.
            if not self.accepts_sparse or isinstance(bucket, SparseBucket):
                raise
            bucket.dispute = error
            bucket.move_to(BucketState.UNCLEAR)

    def _start_sparse_flags(self, name: str, gradients: Sequence[torch.Tensor | None]) -> PieceView:
        """Begin to exchange which gradients of a bucket are sparse on any rank."""
        spec = TensorSpec(name, DType.UINT8, (len(gradients),), Op.MAX, group=self._options.group)
        request = TensorRequest(spec, torch.uint8, ((len(gradients),),), torch.device("cpu"))
        (slot_view,) = self._context.slot_views([request])
        sparse = [grad is not None and grad.layout is not torch.strided for grad in gradients]
        slot_view.contribute([torch.tensor(sparse, dtype=torch.uint8, device="cpu")])
        return slot_view

    def _split(self, bucket: Bucket, parts: list[Bucket]) -> None:
        """Split a bucket: gradients that are sparse on any rank travel alone from now on.

        Adds the new buckets that are part of the round to ``parts``. Raises its dispute if no gradient is sparse.
        """
        flags = bucket.sparse_flags
        if flags is None or bucket.dispute is not None:
            flags = self._start_sparse_flags(f"{bucket.request.spec.name}.kinds", bucket.collect(sparse=True))
            flags.wait()
        sparse = flags.results[0].tolist()
        if bucket.dispute is not None and not any(sparse):
            raise bucket.dispute
        split: list[Bucket] = []
        dense = [position for position, is_sparse in enumerate(sparse) if not is_sparse]
        kinds = [([position], True) for position, is_sparse in enumerate(sparse) if is_sparse]
        for positions, is_sparse in [*kinds, (dense, False)] if dense else kinds:
            part = self._new_bucket([(bucket.names[i], bucket.params[i]) for i in positions], bucket.first, is_sparse)
            part.take_over(bucket, positions)
            split.append(part)
            for position, param in enumerate(part.params):
                self._places[param].bucket, self._places[param].position = part, position
        index = self.buckets.index(bucket)
        self.buckets[index : index + 1] = split
        bucket.reset()  # its round goes on in its parts
        parts += [part for part in split if part.is_active]

    # ---- sending -------------------------------------------------------------------------------------------

    def _begin_agreement(self) -> None:
        """The last thing that a step does before it waits for other ranks."""
        if not self.buckets:
            return
        self._follow_session()
        if not self._travels:
            return
        if not self.is_agreed:
            self._agreement.begin(self._plan())
        is_waiting = self._agreement.is_under_way or any(bucket.sent for bucket in self.buckets)
        if is_waiting and not self._is_counted and self._disagreement is None:
            self._context.begin_step(self._agreement.kind)
            self._is_counted = True

    def _agree(self) -> None:
        """Compare plans. Raises MismatchError, on all ranks and in every later round, unless all plans are equal."""
        if self._disagreement is not None:
            raise self._disagreement
        if self._agreement.is_under_way:
            try:
                self._agreement.finish(self._plan())
            except MismatchError as error:
                self._disagreement = error
                raise
            self.is_agreed = True

    def _abandon(self) -> None:
        """Forget buckets in flight: their names are not known to all ranks, so they get no answer."""
        for bucket in self.buckets:
            if bucket.sent:
                bucket.slot_view = None
            bucket.reset()

    def _plan(self) -> list[tuple[str, str]]:
        options = self._options
        warmup = f" after {self._warmup_steps} steps" if self._warmup_steps else ""
        options_text = (
            f"op={options.op.name.title()}, compression={options.compression.__name__}{warmup}, "
            f"gradient_predivide_factor={options.predivide:g}, sparse_as_dense={options.sparse_as_dense}"
        )
        entries = {
            name: (bucket.request.spec.name, bucket.describe(position))
            for bucket in self.buckets
            for position, name in enumerate(bucket.names)
        }
        return [("", options_text), *[entries[name] for name in self._names]]

    def note_unused_averages(self) -> None:
        """Note that this rank makes no step with the last round's averages. All ranks must do so, or none. The count of
        such rounds becomes part of what ranks agree on before one bucket's next round, so a difference is an error."""
        with self._lock:
            dense = [b for b in self.buckets if b.slot_view is not None and not isinstance(b, SparseBucket)]
            if dense:
                self._unused_rounds += 1
                noun = "step" if self._unused_rounds == 1 else "steps"
                smallest = min(dense, key=lambda bucket: bucket.request.spec.nbytes)
                release_results(smallest)
                smallest.set_terms(f"{self._unused_rounds} {noun} left out after synchronize()")

    def forget_unused_averages(self) -> None:
        """Forget unused averages, because all ranks get equal state."""
        with self._lock:
            self._forget_unused_averages()

    def _forget_unused_averages(self) -> None:
        self._unused_rounds = 0
        for bucket in self.buckets:
            if bucket.request.spec.terms and not bucket.sent:
                release_results(bucket)
                bucket.set_terms("")

    def check_closure_calls(self, evaluations: int | None) -> None:
        """See PlanComparison. Called in a step with a closure: before each exchange of gradients and last."""
        if self.buckets:
            self._follow_session()
            if self._travels:
                self._agreement.check_closure_calls(evaluations)

    def _send_rest(self, errors: list[Exception]) -> None:
        for bucket in self.buckets:
            if not bucket.sent and bucket.is_active:
                _attempt(errors, self._check_passes, bucket)
                _attempt(errors, self._send, bucket)
        _attempt(errors, self._begin_agreement)
        if errors:
            self._context.give_up_steps(self._agreement.kind)

    def _send(self, bucket: Bucket, is_early: bool = False) -> None:
        gradients = bucket.collect(self.accepts_sparse)
        self._follow_session()
        if self._travels:
            if self._disagreement is not None:
                raise self._disagreement
            if isinstance(bucket, SparseBucket):
                bucket.start()
            elif isinstance(bucket, GroupBucket):
                bucket.refuse_sparse(gradients)
                bucket.hand_over(gradients, is_early)
            elif any(grad is not None and grad.layout is not torch.strided for grad in gradients):
                bucket.slot_view = None
                bucket.sparse_flags = self._start_sparse_flags(bucket.request.spec.name, gradients)
            else:
                bucket.choose_form(self._warmup_steps)
                if bucket.slot_view is None or not self._context.holds(bucket.slot_view):
                    self._declare()
                bucket.hand_over(gradients, is_early)
        bucket.move_to(BucketState.SENT if bucket.sparse_flags is None else BucketState.ASKED)
        if self.on_sent is not None:
            self.on_sent(self, bucket)

    def _follow_session(self) -> None:
        """In a new session, or after a rank has joined, ranks agree anew. Raises what Session.check_open raises."""
        session = self._context.session
        session.check_open()  # a rank that is alone does not use the session, which would raise
        is_new = session is not self._session  # the first round, or the first one of another job
        if is_new:
            self._session = session
            self._forget_unused_averages()
            for bucket in self.buckets:
                bucket.slot_view = None
                bucket.begin_session(self._warmup_steps)
                if isinstance(bucket, FactorBucket) and self._travels:  # a rank that is alone owes nothing
                    bucket.load_factor_states(self._loaded)
                    bucket.choose_form(self._warmup_steps)
            self._loaded = {}
        elif self._context.joins != self._joins:
            for bucket in self.buckets:
                bucket.after_join()
        if is_new or self._context.joins != self._joins:  # a rank that joined early may not have compared its plan
            self._joins = self._context.joins
            self.is_agreed, self._disagreement = False, None
            self._agreement.forget()

    @property
    def _travels(self) -> bool:
        """True if gradients are sent, though it be to this rank alone."""
        has_others = self._options.members(self._context.session.size) > 1
        return has_others or self._context.settings.force_distributed or self._delivery.always_travels

    def _declare(self) -> None:
        """Declare all buckets of the round that are not declared, in one call."""
        new = [
            bucket
            for bucket in self.buckets
            if bucket.is_active
            and bucket.has_slot
            and not isinstance(bucket, SparseBucket)
            and bucket.sparse_flags is None
            and (bucket.slot_view is None or not self._context.holds(bucket.slot_view))
        ]
        for bucket, slot_view in zip(new, self._context.slot_views([each.request for each in new]), strict=True):
            bucket.slot_view = slot_view


def _bucket_name(names: Sequence[str]) -> str:
    """A bucket's name. It depends on all members, so that different buckets are never summed."""
    if len(names) == 1:
        return names[0]
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=4).hexdigest()
    return f"{names[0]}+{len(names) - 1} ({digest})"


def _advance(errors: list[Exception], bucket: Bucket) -> bool:
    try:
        return bucket.advance()
    except Exception as error:
        errors.append(error)
        return False


def _attempt(errors: list[Exception], action: Callable[..., None], *arguments: object) -> None:
    try:
        action(*arguments)
    except Exception as error:
        errors.append(error)

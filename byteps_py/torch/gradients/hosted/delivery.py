"""Sums of a hosted optimizer go to the services of their owners, which keep the states.

Owns which sums a step is due with (Bucket.due), and which optimizer has a parameter. Must not know states, for hooks of
parameters hold buckets, and a model may outlive its optimizer. The training thread calls.
"""

from __future__ import annotations

import contextlib
import gc
import math
import operator
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import torch
from torch.utils.weak import WeakIdKeyDictionary

from byteps_py.errors import CommunicationError, UsageError
from byteps_py.tensors import NonFinite
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import wire_dtype
from byteps_py.torch.collectives.slot_view import TensorRequest
from byteps_py.torch.gradients.bucket import Bucket, Delivery
from byteps_py.torch.gradients.gradient_checksums import Gradients
from byteps_py.torch.gradients.hosted.rules import check_dtypes
from byteps_py.torch.gradients.hosted.states_mode import ModeChoice, StatesMode

#: Of a parameter: a weak reference to the optimizer that has it, one at a time, because its service has the
#: parameter's master. A parameter may outlive its optimizer, and the reverse.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def claim(named: Sequence[tuple[str, torch.nn.Parameter]], owner: object) -> None:
    """Give ``owner`` the parameters until it is gone. Raises UsageError if another one has one of them."""
    if any(_other(param, owner) for _, param in named):
        gc.collect()  # an optimizer that is not used any more may be part of a cycle
    for name, param in named:
        if _other(param, owner):
            raise UsageError(
                f"hosted=True: parameter {name!r} belongs to another hosted optimizer already: its service has the "
                "parameter's states, and both would change it. Use one optimizer with several param_groups, or delete "
                "the other one first (del optimizer)"
            )
    for _, param in named:
        _owners[param] = weakref.ref(owner)


def _other(param: torch.nn.Parameter, owner: object) -> bool:
    reference = _owners.get(param)
    return reference is not None and reference() not in (None, owner)


class ToOwner(Delivery):
    """To the ranks' services, each of which gets the elements that its ranks own, and keeps them until a step.
    ``group_of``: of each parameter, the number of its param_group, whose numbers a step of a whole bucket takes.
    ``is_shadowed``: other machines get them, too. ``choice``: where the states are."""

    always_travels = True
    untouched_until = "step()"
    touched_remedy = (
        "A hosted optimizer's gradients stay on the rank as they are, and the services clip and unscale their "
        "averages: call optimizer.clip_grad_norm_(max_norm) instead of torch.nn.utils.clip_grad_norm_, and "
        "scaler.unscale_(optimizer) before it where there is a GradScaler"
    )

    def __init__(
        self, context: Context, group_of: Mapping[torch.nn.Parameter, int], is_shadowed: bool, choice: ModeChoice
    ) -> None:
        self._context, self._group_of = context, group_of
        self._is_shadowed, self._choice = is_shadowed, choice
        #: Gradients are copied before the training goes on, which may change or replace them meanwhile.
        self.is_copied = False

    def kind_of(self, name: str, param: torch.nn.Parameter, dtype: torch.dtype) -> Hashable:
        if param.device.type not in ("cpu", "cuda"):
            raise UsageError(
                f"hosted=True: parameter {name!r} lies on {param.device}; hosted are those on cpu and cuda"
            )
        check_dtypes(name, wire_dtype(dtype, name), wire_dtype(param.dtype, name))
        return param.dtype, self._group_of[param]

    def request(self, request: TensorRequest, is_sparse: bool) -> TensorRequest:
        # Whether sums are finite is found out by their owners, see agreement.py.
        spec = replace(request.spec, nonfinite=NonFinite.ALLOW)
        if is_sparse:
            rows, *others = request.shapes[0]
            spec = replace(spec, shape=(rows, math.prod(others)))  # pieces of whole rows
        else:
            count = sum(math.prod(shape) for shape in request.shapes)
            spec = replace(
                spec, shape=(count,), ownership=spec.name, is_shadowed=self._is_shadowed,
                is_replicated=self._choice.mode is StatesMode.MACHINE, remark=self._choice.remark,
            )  # fmt: skip
        return replace(request, spec=spec, result_shapes=())

    def prepare(self, bucket: Bucket, gradients: Gradients, is_early: bool) -> Gradients:
        """No step is made with an earlier sum. Raises UsageError for a parameter that has another shape than its
        states."""
        for name, param, shape in zip(bucket.names, bucket.params, bucket.request.shapes, strict=True):
            if tuple(param.shape) != shape:
                raise UsageError(
                    f"hosted=True: parameter {name!r} has changed its shape from {list(shape)} to {list(param.shape)}, "
                    "and its service has states for the first one: make a new optimizer for the new parameter"
                )
        self._skip(bucket)
        return gradients

    def receive(self, bucket: Bucket) -> None:
        """A step with the sum is due. It need not have arrived."""
        bucket.refuse_change(None if self.is_copied else bucket.changed)
        bucket.due = self.taking_part(bucket)

    def receive_rows(self, bucket: Bucket, rows: torch.Tensor) -> None:
        """The rank makes the step of rows itself, and so has the sum."""
        bucket.params[0].grad = rows
        bucket.due = (True,)

    def taking_part(self, bucket: Bucket) -> tuple[bool, ...]:
        """The parameters that take part in the step of the round, which was handed over. Where no other rank adds to
        the sum, a parameter without a gradient stays as it is; of several ranks, others may have one."""
        if bucket.options.members(self._context.session.size) > 1 or self._context.settings.force_distributed:
            return tuple(bucket.participates)
        return tuple(map(operator.and_, bucket.participates, bucket.gives))

    def skip(self, buckets: Sequence[Bucket]) -> None:
        """Make no step with the sums of ``buckets``. All ranks do so, or none."""
        for bucket in buckets:
            if bucket.slot_view is not None and bucket.slot_view.session is self._context.session:
                with contextlib.suppress(CommunicationError):  # a job that has ended makes no step either
                    self._skip(bucket)
            bucket.due = None

    @staticmethod
    def _skip(bucket: Bucket) -> None:
        is_due, bucket.due = bucket.due is not None, None
        if is_due and bucket.slot_view is not None:
            bucket.slot_view.wait_for_departure()
            bucket.slot_view.session.state_host.skip_step(bucket.slot_view.slot)
            bucket.slot_view.wait()

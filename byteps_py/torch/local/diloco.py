"""DiLoCo: ranks make steps by themselves, and combine what these changed now and then.

DiLoCo (Douillard et al. 2023) sends a model once in ``every`` steps, instead of gradients in each; its streaming form
(Douillard et al. 2025) sends it in fragments, one after the other, while the ranks go on. For each fragment:

    step k·every + offset            … + delay
    ──────────┬──────────────────────────┬───────────────────────────────────────────────► inner steps
              │ change = global - own    │ global = outer step with the mean change
              └─► mean over all ranks ──►│ own = alpha·own + (1 - alpha)·global

The outer optimizer steps flat copies, one for each fragment and param_group, which have the same bits on all ranks.
The training thread calls.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from byteps_py import rank_bits
from byteps_py.errors import HorovodInternalError, HostsUpdatedInterrupt, NonFiniteError, UsageError
from byteps_py.session import CodedState
from byteps_py.tensors import NonFinite
from byteps_py.torch.collectives import context as contexts, nonfinite, parameter_owners
from byteps_py.torch.collectives.dtypes import as_bytes
from byteps_py.torch.compression import Compression, Compressor, codec_for, compression_of, without_feedback
from byteps_py.torch.gradients.async_optimizer import AsyncStepper
from byteps_py.torch.gradients.cross_barrier import CrossBarrierMixin
from byteps_py.torch.gradients.hosted.optimizer import HostedOptimizerMixin
from byteps_py.torch.gradients.optimizer_mixin import DistributedOptimizerMixin
from byteps_py.torch.gradients.shared_values import FlatCopy, Named, copy_dtype
from byteps_py.torch.operations.broadcasts import allgather_object
from byteps_py.torch.operations.handles import kind_in_group, synchronize
from byteps_py.torch.operations.process_sets import ProcessSet, global_process_set, group_of, members_of, prefix_of
from byteps_py.torch.operations.reductions import Average, ReductionOptions, Sum, start_reduction
from byteps_py.torch.operations.state_broadcast import StateSending, broadcast_parameters, state_from_root

__all__ = ["DiLoCo", "Streaming"]

#: Of the latest step, in the time that steps take.
_SMOOTHING = 0.1
#: Of all sums: how their names begin.
_KIND = "DiLoCo"
#: Of a state_dict. Another one is refused.
_FORMAT = "byteps_py.local.DiLoCo 3"


@dataclass(frozen=True, slots=True)
class Streaming:
    """How a model travels in parts, while the ranks go on.

    fragments: so many parts of about equal size are combined one after the other, evenly over the steps from one outer
    step to the next.
    delay: a fragment's mean is used so many steps after it was sent; it travels under these steps.
    alpha: what a parameter keeps of the rank's own value when it gets the global one, at least 0 and below 1. None: 0.5
    with a delay, whose steps would be lost otherwise, else 0.
    """

    fragments: int = 1
    delay: int = 0
    alpha: float | None = None

    @property
    def own_share(self) -> float:
        """``alpha``, or its default."""
        return self.alpha if self.alpha is not None else 0.5 if self.delay else 0.0


@dataclass(eq=False)
class Fragment:
    """A part of the model that is combined at one time. ``name``: of its sums. ``offset``: in which of ``every``
    steps."""

    name: str
    offset: int
    copies: list[FlatCopy]
    handles: list[int] = field(default_factory=list)  # of the sums under way
    has_values: bool = False  # new global values are there, which the parameters have yet to get
    is_finite: bool = True  # the own change that was sent last
    sent_at: int = 0  # the latest step whose change was sent
    is_whole: bool = True  # … all elements of it
    outer_steps: int = 0  # made of it


@dataclass(frozen=True, slots=True)
class _Standing:
    """How far a rank has come. ``made``: see DiLoCo._made. ``fingerprint``: of its global values. ``step_s``: the time
    that a step takes, 0 before the second one."""

    made: tuple[int, int]
    outer_steps: list[int]
    fingerprint: bytes
    step_s: float

    @property
    def is_new(self) -> bool:
        """It has made no step."""
        return self.made[1] == 0

    def needs(self, newest: _Standing) -> bool:
        """It has not what the rank with the newest values has."""
        return self.is_new or self.fingerprint != newest.fingerprint


class DiLoCo:
    """Let ranks train by themselves, and combine their models once in ``every`` steps, through an outer optimizer.

    A rank sends 1/``every`` of the bytes that it would send with DistributedOptimizer, and waits as rarely.

    model: its parameters begin as rank 0's (of ``process_set``: its first rank's; in an elastic job once it is in a
    TorchState). Buffers stay each rank's own.
    inner: the optimizer of the ranks' own steps, as torch makes it, or a list: Muon for matrices beside AdamW for the
    rest. Schedulers belong to it. DistributedOptimizer with a process_set makes the steps of a site, whose ranks stay
    equal, and DiLoCo combines sites.
    outer: an optimizer of the same parameters that has made no step; it gets flat global copies of them in their place,
    so it must treat each element by itself, as SGD and AdamW do. The mean of the ranks' changes is its gradient. None:
    SGD with Nesterov momentum 0.9 and a learning rate of 0.7, the papers'. SGD with a learning rate of 1 and no
    momentum averages the models.
    every: the number of inner steps from one outer step to the next, H in the papers.
    streaming: in how many fragments the model travels, and under how many steps each. By default in one, under none.
    compression: of the changes, one of bps.Compression; topk(0.03, bits=2) sends least. Where topk and randomk leave an
    element out, parameters keep the rank's own values; what these differ by from the global ones is sent later. So no
    other error feedback is needed, and none is used with these two.
    process_set: the ranks that train this model together.

    Each rank keeps 8 bytes for each parameter (global value and change), and the outer optimizer's states.

    All ranks create it in the same order, and call ``step`` in any order and at any time: names say what belongs
    together. A step for which a GradScaler has found an infinity makes no inner step, and counts. Raises UsageError for
    arguments that contradict each other, for hosted optimizers and those that average over all ranks, for parameters
    of which ranks have different parts, NotInitializedError before init(), and ``step`` also MismatchError, StallError,
    PeerLostError and NonFiniteError. In an elastic job a rank that has lost its group goes on with inner steps until
    there is another one; then ``step`` raises what bps.elastic.run catches.

    >>> import torch, byteps_py as bps
    >>> bps.init()
    >>> model = torch.nn.Linear(2, 1)
    >>> inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    >>> optimizer = bps.local.DiLoCo(model, inner, every=10)
    >>> for _ in range(20):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     optimizer.step()
    >>> optimizer.steps, optimizer.outer_steps
    (20, 2)
    >>> bps.shutdown()
    """

    #: A GradScaler calls ``step`` of each batch, so that all ranks count the same steps, and sets the attributes
    #: found_inf and grad_scale for as long.
    _step_supports_amp_scaling = True
    #: All ranks have the outer optimizer's states.
    _outer_is_common = True

    def __init__(
        self,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        outer: torch.optim.Optimizer | None = None,
        *,
        every: int,
        streaming: Streaming = Streaming(),
        compression: type[Compressor] | Mapping[str, Any] = Compression.none,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self._every = whole_number("every", every, 1)
        self._delay, self._alpha = whole_number("delay", streaming.delay, 0), streaming.own_share
        fragments = whole_number("fragments", streaming.fragments, 1)
        self._model = model
        self._compression, self._leaves_out = _of_changes(compression)
        #: The inner optimizers.
        self.inner = [inner] if isinstance(inner, torch.optim.Optimizer) else list(inner)
        named = _trained(model, self.inner)
        if fragments > min(every, len(named)):
            raise UsageError(
                f"DiLoCo: {fragments} fragments of {len(named)} parameters can't be combined within every={every} "
                "steps: give at most as many as there are of each"
            )
        if self._delay >= every:
            raise UsageError(f"DiLoCo: delay={self._delay}, but the next outer step is due after every={every} steps")
        if not 0 <= self._alpha < 1:
            raise UsageError(f"DiLoCo: alpha is a share of at least 0 and below 1, not {self._alpha!r}")
        context = contexts.current()
        ranks, self._group = members_of(process_set), group_of(process_set)
        _check_inner(self.inner, ranks)
        parameter_owners.check_whole(
            named, ranks, "DiLoCo", "Give process_set the ranks with the same parts, those of mesh.ranks('dp', 'cp')"
        )
        parameter_owners.check_unowned(named, "DiLoCo")
        groups = _groups_of(outer, [param for _, param in named])
        for name, param in named:
            codec_for(self._compression, copy_dtype(param), 0, name, context.settings)
        if nonfinite.mode_of(context) is NonFinite.SKIP:
            raise UsageError(
                "DiLoCo can't be had with BYTEPS_NONFINITE=skip: a rank whose own steps have made NaN has it in its "
                "inner optimizer's states as well. Use BYTEPS_NONFINITE=raise or allow"
            )
        claimed = self._name = context.claim(prefix_of(process_set, "DiLoCo"))
        if not context.settings.elastic:  # there, ranks that come later create it alone; TorchState makes all equal
            broadcast_parameters(named, ranks[0], f"{claimed}.", process_set=process_set)
        self._fragments = [
            Fragment(
                f"{claimed}.fragment{number}",
                (number + 1) * every // fragments % every,
                [FlatCopy.of(part) for part in _alike(piece, groups)],
            )
            for number, piece in enumerate(_pieces(named, fragments))
        ]
        self.outer = self._adopt(outer, groups)
        #: How many inner steps this rank has made.
        self.steps = 0
        #: Why this rank left its group of an elastic job, while it waits for the next one.
        self._lost: Exception | None = None
        self._stepped_s = self._step_s = 0.0  # when it made the latest one, and how long steps take, smoothed
        self._sending: StateSending | None = None  # to ranks of an elastic job that lack the newest values
        self._unsent_states: dict[str, CodedState] = {}  # by tensor: see _keep_unsent

    def _adopt(self, outer: torch.optim.Optimizer | None, groups: Mapping[torch.Tensor, int]) -> torch.optim.Optimizer:
        """The outer optimizer, which has the flat copies."""
        by_group: dict[int, list[torch.nn.Parameter]] = {}
        for copy in self._copies():
            by_group.setdefault(groups[copy.params[0]], []).append(copy.values)
        if outer is None:
            return torch.optim.SGD(by_group[0], lr=0.7, momentum=0.9, nesterov=True)
        for number, group in enumerate(outer.param_groups):
            group["params"] = by_group.get(number, [])
        return outer

    def _copies(self) -> Iterator[FlatCopy]:
        return (copy for fragment in self._fragments for copy in fragment.copies)

    @property
    def outer_steps(self) -> int:
        """How many outer steps, of any fragment, were made."""
        return sum(fragment.outer_steps for fragment in self._fragments)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the inner optimizers."""
        return [group for optimizer in self.inner for group in optimizer.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as torch's optimizers do."""
        for optimizer in self.inner:
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make an inner step, and what is due of outer ones. Returns what the closure returns."""
        if closure is not None and len(self.inner) > 1:
            raise UsageError("DiLoCo: a closure is for one inner optimizer; here are several")
        loss = None
        if self._unscale():
            for optimizer in self.inner:
                loss = optimizer.step() if closure is None else optimizer.step(closure)
        self._count_step()
        context = contexts.current()
        if self._lost is not None and context.is_between:
            if context.is_next_ready:
                raise self._lost
            return loss  # the rank trains by itself
        try:
            self._make_outer_steps(context)
        except (HorovodInternalError, HostsUpdatedInterrupt) as lost:
            if not (context.settings.elastic and context.is_open):
                raise
            self._lost = lost
            context.leave_for_next(lost)
        return loss

    def _count_step(self) -> None:
        self.steps += 1
        now_s = time.monotonic()
        if self._stepped_s:
            taken_s = now_s - self._stepped_s
            self._step_s += (_SMOOTHING if self._step_s else 1.0) * (taken_s - self._step_s)
        self._stepped_s = now_s

    def _make_outer_steps(self, context: contexts.Context) -> None:
        """Those that are due. Raises HostsUpdatedInterrupt if machines of an elastic job are about to come or go. Ranks
        need not agree on it: those that wait for a rank that has left are told so."""
        if context.settings.elastic and any(context.session.hosts_changed()):
            raise HostsUpdatedInterrupt
        for fragment in self._fragments:
            self._finish_if_due(fragment)
            if self.steps % self._every == fragment.offset:
                self._send(fragment)
                self._finish_if_due(fragment)

    def _unscale(self) -> bool:
        """Divide gradients by the scale of a GradScaler, if one calls ``step``. False if it has found an infinity."""
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        if found_inf is not None and any(isinstance(each, DistributedOptimizerMixin) for each in self.inner):
            raise UsageError(
                "DiLoCo: a GradScaler is not for inner optimizers that average gradients (DistributedOptimizer with a "
                "process_set): it would look at them before they are averages. Train in bfloat16 or float32"
            )
        if found_inf is not None and found_inf.item():
            return False
        if scale is not None:
            inverse = scale.double().reciprocal().float()
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad.mul_(inverse.to(param.grad.device))
        return True

    def synchronize(self) -> None:
        """Make all outer steps for the changes so far, without delay; all ranks then have the global parameters. All
        ranks call it after the same number of steps: at the end of training, or before the model is saved. With a
        compression that leaves elements out, the whole changes travel here, without it."""
        for fragment in self._fragments:
            self._finish(fragment, self._alpha)
            if fragment.sent_at < self.steps or self._alpha or self._leaves_out:
                self._start(fragment, is_whole=True)
        for fragment in self._fragments:
            self._finish(fragment, alpha=0.0)

    def _send(self, fragment: Fragment) -> None:
        """Send the changes of a fragment."""
        self._start(fragment, is_whole=not self._leaves_out)

    def _start(self, fragment: Fragment, is_whole: bool) -> None:
        """``is_whole``: without a compression that leaves elements out."""
        fragment.is_whole = is_whole
        compression = Compression.none if is_whole and self._leaves_out else self._compression
        options = ReductionOptions(Average, _KIND, self._group, compression=compression)
        must_be_finite = nonfinite.mode_of(contexts.current()) is NonFinite.RAISE
        fragment.is_finite, fragment.sent_at = True, self.steps
        for index, copy in enumerate(fragment.copies):
            copy.take_change()
            if must_be_finite:
                fragment.is_finite = fragment.is_finite and nonfinite.is_finite(copy.change)
            name = f"{fragment.name}.{index}{'.whole' if is_whole and self._leaves_out else ''}"
            fragment.handles.append(start_reduction([copy.change], [copy.change], name, options))

    def _receive(self, fragment: Fragment) -> None:
        """Make the outer step, if changes were sent. The parameters get the new global values later."""
        if not fragment.handles:
            return
        for handle in fragment.handles:
            if synchronize(handle) is None:
                raise UsageError(
                    "DiLoCo: the ranks have joined another job since a fragment was sent, and its sum is lost: give "
                    "bps.elastic.TorchState the DiLoCo, or load a state_dict"
                )
        fragment.handles.clear()
        self._check_finite(fragment)
        for copy in fragment.copies:
            copy.is_sent = None if fragment.is_whole else copy.change != 0
        self._outer_step(fragment)
        fragment.has_values = True
        fragment.outer_steps += 1
        self._keep_unsent(fragment)

    def _keep_unsent(self, fragment: Fragment) -> None:
        """In an elastic job: what this rank's machine has not sent, for its next group."""
        context, codec = contexts.current(), self._compression.codec
        if context.settings.elastic and codec is not None and codec.has_states:
            names = [f"{_KIND}.{fragment.name}.{index}" for index in range(len(fragment.copies))]
            self._unsent_states |= context.session.coded_states(names)

    def _outer_step(self, fragment: Fragment) -> None:
        """With the changes as gradients."""
        for copy in fragment.copies:
            copy.values.grad = copy.change
        self.outer.step()
        for copy in fragment.copies:
            copy.values.grad = None

    def _check_finite(self, fragment: Fragment) -> None:
        """Raises NonFiniteError on all ranks, if BYTEPS_NONFINITE says so and the mean change has NaN or infinity."""
        context = contexts.current()
        if nonfinite.mode_of(context) is not NonFinite.RAISE:
            return
        places = [
            place
            for copy in fragment.copies
            if not nonfinite.is_finite(copy.change)
            for name, change in zip(copy.names, copy.changes, strict=True)
            if (place := nonfinite.where(name, change)) is not None
        ]
        if not places:
            return
        size = context.session.size
        is_from = torch.zeros(size, dtype=torch.uint8, device="cpu")
        is_from[context.session.rank] = not fragment.is_finite
        synchronize(
            start_reduction(
                [is_from], [is_from], f"{fragment.name}.nonfinite", ReductionOptions(Sum, "DiLoCo", self._group)
            )
        )
        bits = [rank_bits.of_rank(rank, size) for rank in is_from.nonzero().flatten().tolist()]
        raise NonFiniteError(
            f"NaN or infinity from {rank_bits.text(functools.reduce(operator.or_, bits, 0), size)}, step "
            f"{fragment.sent_at}: in the changes that DiLoCo combines of {nonfinite.listed(places)}; look at the "
            "batches and the losses there. BYTEPS_NONFINITE=allow lets the values pass"
        )

    def _finish_if_due(self, fragment: Fragment) -> None:
        if self.steps >= fragment.sent_at + self._delay:
            self._finish(fragment, self._alpha)

    def _finish(self, fragment: Fragment, alpha: float) -> None:
        """Make the outer step of a fragment, if its changes were sent, and use its values. ``alpha``: see Streaming."""
        self._receive(fragment)
        if fragment.has_values:
            fragment.has_values = False
            for copy in fragment.copies:
                copy.give_values(alpha)

    # ---- elastic jobs ---------------------------------------------------------------------------------------------

    def rejoin(self) -> None:
        """Go on with the present ranks of an elastic job, as bps.elastic.TorchState does. All ranks call it.

        Global values, outer states and counts become those of the rank that has the newest; ranks that have others get
        them from it. Each rank keeps what it has learned since it got its own, and its inner states. Outer steps that
        were under way are made with the next changes; but if the newest values have this rank's change, it goes on as
        if it had got them. A rank that has made no step begins with the global values, that rank's buffers and the
        numbers of its inner optimizers' param_groups; its inner states begin anew, as in the papers.
        """
        if self._group:
            raise UsageError(
                "DiLoCo: a process set ends with its group of ranks, so DiLoCo with process_set can't be had in "
                "elastic jobs"
            )
        self._lost = None
        counts = [fragment.outer_steps for fragment in self._fragments]
        mine = _Standing(self._made(), counts, self._fingerprint(), self._step_s)
        standings: list[_Standing] = allgather_object(mine, name=f"{self._name}.standing")
        made = [each.made for each in standings]
        root = made.index(max(made))
        newest, rank = standings[root], contexts.current().session.rank
        others = [other for other, each in enumerate(standings) if other != root and each.needs(newest)]
        before = [copy.values.detach().clone() for copy in self._copies()]
        self.steps, began_s = max(steps for _, steps in made), time.monotonic()  # so that all send the same next
        is_new = mine.is_new and rank != root
        if others and rank in (root, *others):
            group = (*sorted([root, *others]),) if len(others) + 1 < len(standings) else ()
            label = kind_in_group(group, f"{self._name}.state")
            if rank == root:
                self._sending = StateSending(self._state_for_others(), label, group)
            else:
                self._take_state(state_from_root(None, root, label, group), is_new)
                self._catch_up(time.monotonic() - began_s, newest.step_s)
        self._stepped_s = 0.0
        olds = iter(before)
        for fragment, outer_steps in zip(self._fragments, newest.outer_steps, strict=True):
            has_own_change = bool(fragment.handles) and outer_steps > fragment.outer_steps
            fragment.handles.clear()
            fragment.has_values = not is_new and (fragment.has_values or has_own_change)
            fragment.outer_steps = outer_steps
            for copy, old in zip(fragment.copies, olds, strict=False):
                if has_own_change:  # nobody told this rank of which elements
                    copy.is_sent = None
                if is_new:
                    copy.give_values()
                elif not has_own_change:
                    copy.move_parameters(old)
        if self._unsent_states:
            session = contexts.current().session
            session.set_coded_states(session.coded_states() | self._unsent_states)

    def _catch_up(self, passed_s: float, step_s: float) -> None:
        """Count the steps that the others have made since, up to the next one that sends a fragment: there they wait
        for this rank."""
        to_next = min((fragment.offset - self.steps - 1) % self._every for fragment in self._fragments)
        if step_s:
            self.steps += min(to_next, int(passed_s / step_s))

    def _fingerprint(self) -> bytes:
        """Of what is the same on all ranks once they are together."""
        found = hashlib.blake2b(digest_size=16)
        for copy in self._copies():
            found.update(as_bytes(copy.values.cpu()).numpy().data)
            for _, value in sorted(self.outer.state[copy.values].items()) if self._outer_is_common else ():
                found.update(as_bytes(torch.as_tensor(value, device="cpu")).numpy().data)
        return found.digest()

    def _state_for_others(self) -> dict[str, Any]:
        return {
            "values": [copy.values.detach() for copy in self._copies()],
            "outer": self.outer.state_dict() if self._outer_is_common else None,
            "numbers": [_numbers(group) for group in self.param_groups],
            "buffers": dict(self._model.named_buffers()),
        }

    @torch.no_grad()
    def _take_state(self, state: Mapping[str, Any], is_new: bool) -> None:
        for copy, values in zip(self._copies(), state["values"], strict=True):
            copy.values.copy_(values)
        if state["outer"] is not None:
            self.outer.load_state_dict(state["outer"])
        if is_new:
            for group, numbers in zip(self.param_groups, state["numbers"], strict=True):
                group.update(numbers)
            for name, buffer in self._model.named_buffers():
                buffer.copy_(state["buffers"][name])

    def _made(self) -> tuple[int, int]:
        """How new the global values are; and how many steps this rank has made."""
        return self.outer_steps, self.steps

    # ---- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All but the model's parameters: the inner and outer optimizers' states, global values, counts, and the
        outer steps whose values have yet to be used. It waits for sums under way.

        Between outer steps ranks have different models and inner states: let each rank save its own, or call
        ``synchronize`` before, and save rank 0's.
        """
        for fragment in self._fragments:
            self._receive(fragment)
        return {
            "format": _FORMAT,
            "steps": self.steps,
            "inner": [optimizer.state_dict() for optimizer in self.inner],
            "outer": self.outer.state_dict(),
            "fragments": [
                {
                    "sent_at": fragment.sent_at,
                    "outer_steps": fragment.outer_steps,
                    "has_values": fragment.has_values,
                    "is_sent": [copy.is_sent for copy in fragment.copies],
                    "values": [copy.values.detach() for copy in fragment.copies],
                }
                for fragment in self._fragments
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``. The model's parameters are loaded by the caller. Raises UsageError for another
        model's, or other fragments."""
        if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
            raise UsageError("DiLoCo: this is no state_dict of a DiLoCo of this version")
        there, here = (
            [[values.numel() for values in fragment["values"]] for fragment in state["fragments"]],
            [[copy.values.numel() for copy in fragment.copies] for fragment in self._fragments],
        )
        if there != here or len(state["inner"]) != len(self.inner):
            raise UsageError(
                f"DiLoCo: the state_dict has fragments of {there} elements and {len(state['inner'])} inner optimizers, "
                f"here are {here} and {len(self.inner)}: make the DiLoCo with the same model and fragments"
            )
        for optimizer, saved in zip(self.inner, state["inner"], strict=True):
            optimizer.load_state_dict(saved)
        self.outer.load_state_dict(state["outer"])
        self.steps = state["steps"]
        for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
            fragment.handles.clear()
            fragment.sent_at = saved["sent_at"]
            fragment.outer_steps, fragment.has_values = saved["outer_steps"], saved["has_values"]
            for copy, values, is_sent in zip(fragment.copies, saved["values"], saved["is_sent"], strict=True):
                copy.values.copy_(values)
                copy.is_sent = None if is_sent is None else is_sent.to(copy.values.device)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises UsageError: the object belongs to this process and its job."""
        raise UsageError("a DiLoCo can't be copied or pickled: save, copy or send its state_dict()")


# ---- arguments -------------------------------------------------------------------------------------------------------


def whole_number(name: str, value: object, least: int) -> int:
    """An argument of DiLoCo. Raises UsageError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"DiLoCo: {name} is a whole number of at least {least}, not {value!r}")
    return value


def _of_changes(choice: Any) -> tuple[type[Compressor], bool]:
    """(the compression of changes, whether it leaves elements out). Raises UsageError."""
    compression = compression_of(choice)
    if (codec := compression.codec) is None or not codec.leaves_out:
        return compression, False
    if codec.momentum:
        raise UsageError(
            f"DiLoCo: {compression.__name__} would count a change again in each outer step until it is sent: leave out "
            "the compression's momentum, and give it to the outer optimizer"
        )
    return without_feedback(compression), True


def _trained(model: torch.nn.Module, inner: Sequence[torch.optim.Optimizer]) -> list[Named]:
    """The parameters of the inner optimizers, with their names, in the model's order."""
    mine = [param for optimizer in inner for group in optimizer.param_groups for param in group["params"]]
    trained = set(mine)
    named = [(name, param) for name, param in model.named_parameters() if param in trained]
    if len(named) != len(mine) or not named:
        raise UsageError(
            f"DiLoCo: the inner optimizers have {len(mine)} parameters, of which {len(named)} are of the model: give "
            "each parameter of this model to one of them"
        )
    return named


def _check_inner(inner: Sequence[torch.optim.Optimizer], ranks: Sequence[int]) -> None:
    """Raises UsageError for optimizers whose steps are not the rank's, or the site's, own."""
    for optimizer in inner:
        if isinstance(optimizer, HostedOptimizerMixin | CrossBarrierMixin):
            kind = "a hosted optimizer" if isinstance(optimizer, HostedOptimizerMixin) else "a CrossBarrier"
            raise UsageError(
                f"DiLoCo: the inner optimizer is {kind}, which has parameters and states elsewhere, and would not see "
                "the global values: give torch's optimizer"
            )
        if isinstance(optimizer, DistributedOptimizerMixin) and isinstance(optimizer._stepper, AsyncStepper):
            raise UsageError(
                "DiLoCo: the inner optimizer is an AsyncOptimizer, which combines what machines change already: give "
                "torch's optimizer"
            )
        if isinstance(optimizer, DistributedOptimizerMixin) and len(ranks) > 1:
            site = set(optimizer.combining_ranks) or set(range(contexts.current().session.size))
            if site >= set(ranks):
                raise UsageError(
                    "DiLoCo: the inner optimizer averages gradients over all ranks in every step already: give torch's "
                    "optimizer, or a DistributedOptimizer whose process_set has the ranks of one site"
                )


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a param_group: learning rates and the like."""
    return {key: value for key, value in group.items() if key != "params"}


def _groups_of(outer: torch.optim.Optimizer | None, params: Sequence[torch.nn.Parameter]) -> dict[torch.Tensor, int]:
    """The number of each parameter's param_group in the outer optimizer."""
    if outer is None:
        return dict.fromkeys(params, 0)
    if isinstance(outer, DistributedOptimizerMixin):
        raise UsageError("DiLoCo: the outer optimizer gets means already: give torch's optimizer")
    groups = {param: number for number, group in enumerate(outer.param_groups) for param in group["params"]}
    if groups.keys() != set(params):
        raise UsageError(
            f"DiLoCo: the outer optimizer has {len(groups)} parameters, the inner ones have {len(params)}: they must "
            "be the same"
        )
    if outer.state:
        raise UsageError("DiLoCo: the outer optimizer has made steps: give a new one, and load DiLoCo's state_dict")
    return groups


def _pieces(named: Sequence[Named], count: int) -> list[list[Named]]:
    """Parameters as ``count`` runs of neighbours of about equal size, none of them empty."""
    total, sent = sum(param.numel() for _, param in named), 0
    pieces: list[list[Named]] = [[]]
    for index, (name, param) in enumerate(named):
        missing = count - len(pieces)
        is_full = sent >= len(pieces) * total / count or len(named) - index == missing
        if pieces[-1] and missing and is_full:
            pieces.append([])
        pieces[-1].append((name, param))
        sent += param.numel()
    return pieces


def _alike(named: Sequence[Named], groups: Mapping[torch.Tensor, int]) -> list[list[Named]]:
    """Parameters by param_group, dtype and device, which one flat tensor has in common."""
    found: dict[tuple[object, ...], list[Named]] = {}
    for name, param in named:
        found.setdefault((groups[param], param.dtype, param.device), []).append((name, param))
    return list(found.values())

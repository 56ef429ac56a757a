"""The base class of hosted optimizers: gradients go to the services, and parameters come back.

Owns what torch's users see: step, clipping, state_dict. delivery.py sums and steps. The training thread calls.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from byteps_py.errors import BytePSError, JoinedError, MismatchError, NonFiniteError, UsageError
from byteps_py.kernels.update_rules import Hyperparameters
from byteps_py.tensors import NonFinite
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives import nonfinite
from byteps_py.torch.gradients.hosted.agreement import GradientProbe, explain_overflow, largest, overflows
from byteps_py.torch.gradients.hosted.delay import DelayedSteps
from byteps_py.torch.gradients.hosted.delivery import HostedReducer, claim
from byteps_py.torch.gradients.hosted.replication import ShadowedSteps
from byteps_py.torch.gradients.hosted.rules import check_numbers, numbers_of, rule_of
from byteps_py.torch.gradients.hosted.states import Factors, ParameterState, check_state
from byteps_py.torch.gradients.optimizer_mixin import DistributedOptimizerMixin
from byteps_py.torch.operations.reduction_plans import Sum
from byteps_py.torch.operations.reductions import reduced

#: "rule" encodes the switches, such as amsgrad.
_COMPARED = ("lr", "weight_decay", "momentum", "dampening", "beta1", "beta2", "eps", "lr_decay", "always_adapt", "rule")
#: Begins the error of a step that needs a rank that has joined.
_NO_JOIN = (
    "a hosted optimizer does not go together with join(): a step needs the gradients of all ranks, each of which may "
    "own states. Give all ranks the same number of batches, or leave hosted, or shadow, out"
)

Step = Callable[..., Any]


def names_join(step: Step) -> Step:
    """``step`` of a hosted optimizer, whose JoinedError says so."""

    @functools.wraps(step)
    def named(*arguments: Any, **others: Any) -> Any:
        try:
            return step(*arguments, **others)
        except JoinedError as error:
            if str(error).startswith(_NO_JOIN):
                raise
            raise JoinedError(f"{_NO_JOIN} ({error})") from None

    return named


class HostedOptimizerMixin(DistributedOptimizerMixin):
    """The base class that DistributedOptimizer puts before the wrapped optimizer's class with ``hosted=True``."""

    _reducer: HostedReducer
    _clip: float
    _unscale: float
    _overflows: bool  # a GradScaler was told to skip the step
    _probe: GradientProbe
    _delayed: DelayedSteps
    _limit: float | None = None  # of the norm, for the next delayed step
    _norm: torch.Tensor  # the latest known one
    #: A GradScaler sets ``grad_scale`` for step(), and calls it for gradients that are infinite, too.
    _step_supports_amp_scaling = True
    _name: str
    _loaded: dict[int, Mapping[str, Any]] | None  # the states, if there was no step since they were loaded

    @names_join
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Sum what backward() has computed, let the services step, and take the new parameters.

        Raises UsageError for a closure, and for a hyperparameter that is NaN or infinite; MismatchError if ranks have
        different param_groups; and as synchronize() of an optimizer that is not hosted. After an error no rank has the
        step.
        """
        if closure is not None:
            raise UsageError(
                "a hosted optimizer takes no closure: a closure evaluates the loss for parameters that the service "
                "would have to send back each time. Call backward() before step()"
            )
        if self._delayed.is_due:
            self._step_later()
            return
        self._sum()  # first: a rank whose numbers are wrong must not leave the other ranks waiting for its gradients
        numbers = self._step_numbers()
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:  # otherwise the scaler has unscaled already
            self._unscale = float(scale.double().reciprocal().float())
        if self._reducer.shadow is not None:
            self._reducer.shadow.pack_extra()
        self._compare(numbers, self._rule_codes())
        for number, found in enumerate(numbers):
            check_numbers(found, number)
        if self._nonfinite_error is not None:
            nonfinite.tell(self._nonfinite_error, contexts.current().session)
            self._overflows = True
        if self._overflows:
            self._reducer.drop_sums()
            if self._reducer.shadow is not None:
                self._reducer.shadow.calls += 1
        else:
            self._reducer.begin_steps(numbers, Factors(self._unscale, self._clip), self._initial_sums)
            self._reducer.record_step(self.param_groups)
            self._reducer.take_parameters()
            self._loaded = None
            if self._reducer.shadow is not None:
                self._reducer.loaded = copy.deepcopy(self._reducer.loaded)  # of parameters that have no states yet
                self._reducer.shadow.taken_over()
        self._forget_factors()
        self._delayed.count()
        self._reducer.is_delayed = self._delayed.is_due
        self._mark_stepped()
        self._passes.hook(p for group in self.param_groups for p in group["params"])  # some may have been unfrozen

    def _step_numbers(self) -> list[Hyperparameters]:
        """Of each param_group, for the step that is made now."""
        return [numbers_of(group) for group in self.param_groups]

    def _step_later(self) -> None:
        """Finish the step before this one, and begin this one, which the next one finishes."""
        self._delayed.finish()
        self._add_new_groups()
        numbers, rules = [numbers_of(group) for group in self.param_groups], self._rule_codes()
        limit, self._limit = self._limit, None
        self._reducer.hand_over_now()

        def make() -> None:  # on a thread of its own
            self._forget_factors()
            self._reducer.finish()
            self._check_finite()
            if limit is not None:
                self._norm = self._find_clip(limit)
            self._compare(numbers, rules)
            for number, found in enumerate(numbers):
                check_numbers(found, number)
            if self._nonfinite_error is not None:
                nonfinite.tell(self._nonfinite_error, contexts.current().session)
                self._reducer.drop_sums()
                return
            self._reducer.begin_steps(numbers, Factors(clip=self._clip), self._initial_sums)
            self._loaded = None

        self._delayed.start(self._on_this_stream(make))
        self._mark_stepped()

    def _on_this_stream(self, work: Callable[[], None]) -> Callable[[], None]:
        """``work``, which reads parameters, as a function for a thread that sees them as this one does."""
        device = next((param.device for group in self.param_groups for param in group["params"]), None)
        if device is None or device.type != "cuda":
            return work
        stream = torch.cuda.current_stream(device)

        def run() -> None:
            with torch.cuda.stream(stream):
                work()

        return run

    def flush(self) -> None:
        """Finish the step that ``delayed_update_after`` has delayed, if there is one: parameters are the newest after
        it. All ranks call it, or none. ``state_dict`` and ``bps.shutdown`` call it. Raises the errors of the step."""
        self._delayed.finish()

    step.hooked = True  # type: ignore[attr-defined]

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients of the next step. Call it on all ranks after backward() and before step().

        Returns the norm of the averages of all gradients, float64, before they are clipped. Gradients on the ranks stay
        as they are. Of a step that is delayed (``delayed_update_after``), the norm is that of the latest step whose
        norm is known, NaN if there is none. Raises as step() does.

        >>> import torch, byteps_py as bps
        >>> bps.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> opt = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), hosted=True)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> round(opt.clip_grad_norm_(1.0).item(), 3)
        1.732
        >>> opt.step()
        >>> bps.shutdown()
        """
        if math.isnan(max_norm) or max_norm < 0:
            raise UsageError(f"max_norm is {max_norm}: give a number from 0 up")
        if self._delayed.is_due:
            self._limit, norm = max_norm, self._norm
            return norm
        self._sum()
        return self._find_clip(max_norm)

    def _find_clip(self, max_norm: float) -> torch.Tensor:
        squares = self._reducer.square_sum(self._initial_sums) * self._unscale**2
        own = torch.tensor([squares], dtype=torch.float64, device="cpu")
        norm = reduced(own, Sum, f"{self._name}.norm").sqrt()[0]
        factor = max_norm / (float(norm) + 1e-6)
        self._clip = 1.0 if factor > 1.0 else factor  # NaN stays NaN, as in torch
        return norm

    @property
    def shadow_extra(self) -> Any:
        """With ``shadow=True``: what travels with each step from now on, and comes back with ``bps.restore``: random
        states, the position of the data loader, a scheduler's state. Any object that can be pickled, small, each rank's
        own; step() pickles it as it is then. None for nothing.

        Raises UsageError without ``shadow=True``, and for what can't be pickled or is too large.
        """
        return self._shadowed_steps.extra

    @shadow_extra.setter
    def shadow_extra(self, value: Any) -> None:
        steps = self._shadowed_steps
        before, steps.extra = steps.extra, value
        try:
            steps.check_extra()  # an error must not come in the middle of a step
        except UsageError:
            steps.extra = before
            raise

    @property
    def shadow_step(self) -> int:
        """With ``shadow=True``: a step that a restarted job could go on from now, and that all ranks know of; usually
        the one before the last. 0 as long as not all states have come to other machines.

        Raises UsageError without ``shadow=True``.
        """
        return self._shadowed_steps.known

    @property
    def _shadowed_steps(self) -> ShadowedSteps:
        if self._reducer.shadow is None:
            raise UsageError("shadow_extra belongs to DistributedOptimizer(…, shadow=True)")
        return self._reducer.shadow

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See torch.optim.Optimizer. Raises GradientOrderError between backward() and step()."""
        super().zero_grad(set_to_none)
        if self._delayed.is_due:
            return  # the step under way has its sums
        self._reducer.drop_sums()
        self._forget_factors()

    def synchronize(self) -> None:
        """Raises UsageError: averages do not come back to the ranks."""
        raise UsageError(
            "a hosted optimizer does not bring averages back to the ranks: synchronize() has nothing to wait for. To "
            "clip, call optimizer.clip_grad_norm_(max_norm) before step()"
        )

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises UsageError, see ``synchronize``."""
        self.synchronize()
        yield

    def _groups_to_unscale(self) -> list[dict[str, Any]]:
        """A GradScaler is about to unscale gradients: the step does so instead. See GradientProbe."""
        if self._delayed.is_wanted:
            raise UsageError(
                "delayed_update_after does not go together with a GradScaler, which has to know in each step whether "
                "gradients have overflowed: train in bfloat16, or leave delayed_update_after out"
            )
        self._sum()
        self._overflows = self._find_overflow()
        return self._probe.groups(self._overflows)

    def _sum(self) -> None:
        if self._reducer.has_sums and not self._passes.has_begun:
            if not self._overflows:
                self._unscale = self._probe.factor
            return
        self._forget_factors()
        self._add_new_groups()
        self._reducer.finish()
        if self._reducer.shadow is not None:
            self._reducer.shadow.start(contexts.current())
        self._check_finite()

    def _check_finite(self) -> None:
        """As BYTEPS_NONFINITE says."""
        if (wanted := nonfinite.wanted(contexts.current())) is not NonFinite.ALLOW:
            self._nonfinite_error = self._find_nonfinite()
            if self._nonfinite_error is not None and wanted is NonFinite.RAISE:
                self._reducer.drop_sums()
                raise self._nonfinite_error

    def _find_overflow(self) -> bool:
        return overflows(contexts.current(), self._name, self._reducer.square_sum(self._initial_sums))

    def _find_nonfinite(self) -> NonFiniteError | None:
        """The error for sums that are NaN or infinite, the same on all ranks, which all call it; None if all are
        finite."""
        if not self._find_overflow():
            return None
        buckets = self._reducer.with_states
        names = [name for bucket in buckets for name in bucket.names]
        step = max((bucket.round for bucket in buckets), default=0)
        return explain_overflow(contexts.current(), self._name, names, self._reducer.bad_gradients(), step)

    def _forget_factors(self) -> None:
        """They belong to sums that are used, or dropped."""
        self._clip = self._unscale = 1.0
        self._overflows, self._nonfinite_error = False, None
        self._probe.groups(overflows=False)

    @property
    def _initial_sums(self) -> list[float]:
        return [float(group.get("initial_accumulator_value", 0.0)) for group in self.param_groups]

    def _rule_codes(self) -> list[float]:
        return [float(rule_of(self._wrapped, group).code) for group in self.param_groups]

    def _compare(self, numbers: list[Hyperparameters], rules: list[float]) -> None:
        """Raises MismatchError, on all ranks, if their numbers differ."""
        context, shadow = contexts.current(), self._reducer.shadow
        if context.session.size == 1 and shadow is None:
            return
        values = [
            rule if name == "rule" else getattr(found, name)
            for found, rule in zip(numbers, rules, strict=True)
            for name in _COMPARED
        ]
        own = torch.tensor([*values, self._unscale, self._clip], dtype=torch.float64, device="cpu")
        held, is_whole = shadow.held if shadow is not None else (0, False)
        refused = shadow.refused if shadow is not None else 0
        *both, least_held, least_whole, most_refused = largest(
            context, f"{self._name}.numbers", [*own, *-own, float(-held), float(-is_whole), float(refused)]
        )
        most, least = torch.tensor(both, dtype=torch.float64, device="cpu").chunk(2)
        if shadow is not None:
            shadow.agreed(int(-least_held), bool(least_whole), int(most_refused))
        for place in (most != -least).nonzero().flatten().tolist():
            if own[place].isnan():
                continue  # ``check_numbers`` says so, here and on all that have it
            group, name = divmod(place, len(_COMPARED))
            factors = ("the factor of a GradScaler, 1/scale,", "the factor of clipping")
            whole = place - len(values)
            what = f"{_COMPARED[name]} of param_groups[{group}]" if whole < 0 else factors[whole]
            raise MismatchError(
                f"ranks step with different numbers: {what} is "
                f"{float(own[place]):g} on rank {context.session.rank}, and from {-float(least[place]):g} to "
                f"{float(most[place]):g} on all. Set it alike, and step a learning-rate scheduler on every rank"
            )

    # ---- states ------------------------------------------------------------------------------------------------

    def _load_states(self, given: Mapping[torch.nn.Parameter, Mapping[str, Any]]) -> None:
        """Keep copies of these states, for the services to take over with the next step."""
        params = [param for group in self.param_groups for param in group["params"]]
        self._loaded = {place: copy.deepcopy(given[param]) for place, param in enumerate(params) if param in given}
        self._reducer.loaded = {params[place]: state for place, state in self._loaded.items()}

    def _take_stored_states(self, given: Mapping[torch.nn.Parameter, Mapping[str, Any]]) -> None:
        """As ``_load_states``, of states that are read when the services take them over."""
        params = [param for group in self.param_groups for param in group["params"]]
        self._loaded = {place: given[param] for place, param in enumerate(params) if param in given}
        self._reducer.loaded = dict(given)

    def _check_states(self, given: Mapping[torch.nn.Parameter, Mapping[str, Any]]) -> None:
        for param, state in given.items():
            rule = rule_of(self._wrapped, self.param_groups[self._reducer.group_of[param]])
            check_state(rule, param, state, repr(self._parameter_names[param]))

    def state_dict(self) -> dict[str, Any]:
        """See torch.optim.Optimizer: of the form that the optimizer has without ``hosted``, whole on every rank. A
        parameter of 16 bits has "master_param" beside torch's states. All ranks call it together, because it gathers,
        unless there was no step since the beginning or since ``load_state_dict``. Finishes a delayed step."""
        self.flush()
        packed: dict[str, Any] = torch.optim.Optimizer.state_dict(self)  # type: ignore[arg-type]
        packed["state"] = self._gathered_states() if self._loaded is None else copy.deepcopy(self._loaded)
        return packed

    def _gathered_states(self) -> dict[int, ParameterState]:
        """By number of the parameter; those that have states."""
        by_param: dict[torch.nn.Parameter, ParameterState] = {}
        for bucket in self._reducer.with_states:
            if (states := self._reducer.known_states(bucket)) is not None:
                by_param.update(zip(bucket.params, self._reducer.gathered(bucket, states), strict=True))
        params = [param for group in self.param_groups for param in group["params"]]
        return {place: state for place, param in enumerate(params) if (state := by_param.get(param))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See torch.optim.Optimizer. Takes the state_dict of a hosted optimizer or of one that is not, the same on all
        ranks. Discards gradients that were computed since the last step."""
        with contextlib.suppress(BytePSError):  # what it has made is replaced
            self.flush()
        self._passes.drop()
        self._state_replaced()
        super(DistributedOptimizerMixin, self).load_state_dict({**state_dict, "state": {}})  # type: ignore[misc]
        saved = [place for group in state_dict["param_groups"] for place in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        given = state_dict["state"]
        states = {param: given[place] for place, param in zip(saved, params, strict=True) if place in given}
        self._check_states(states)
        self._reducer.forget_states()
        self._load_states(states)

    def _check_one_has_all(self) -> None:
        if self._loaded is None and self._reducer.has_states:
            raise UsageError(
                "a hosted optimizer's states lie with all ranks, each a part, so that no rank can send them, and all "
                "have the same already. Call broadcast_optimizer_state() before the first step, or after the root's "
                "load_state_dict()"
            )

    def _is_lost(self) -> bool:
        return self._reducer.is_lost

    def _state_replaced(self) -> None:
        super()._state_replaced()
        self._reducer.drop_sums()
        self._forget_factors()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch.optim.Optimizer."""
        self.flush()
        torch.optim.Optimizer.add_param_group(self, param_group)  # type: ignore[arg-type]
        params = self._wrapped.param_groups[-1]["params"]
        try:
            claim([(self._parameter_names.get(param, "of a new group"), param) for param in params], self._reducer)
        except UsageError:
            self._wrapped.param_groups.pop()
            raise
        self._add_new_groups()

    def _add_new_groups(self) -> bool:
        for number, group in enumerate(self._wrapped.param_groups):
            for param in group["params"]:
                self._reducer.group_of.setdefault(param, number)
        return super()._add_new_groups()


def taken_states(optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, Mapping[str, Any]]:
    """The states that the optimizer has made or loaded, which are the services' from now on."""
    found: dict[Any, Mapping[str, Any]] = {param: dict(state) for param, state in optimizer.state.items() if state}
    optimizer.state.clear()
    return found


def rules_of(optimizer: torch.optim.Optimizer) -> Callable[[int], Any]:
    """The rule of each of its param_groups, by number, as it is when it is asked for."""
    return lambda number: rule_of(optimizer, optimizer.param_groups[number])

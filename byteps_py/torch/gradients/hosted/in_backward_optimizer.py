"""The base class of hosted optimizers whose services step under the backward pass (``step_in_backward=True``).

Owns what torch's users see of that: which calls come too late, and what a step says that they have changed.
in_backward.py begins the steps. The training thread calls, but for ``_compare_in_backward``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from byteps_py.errors import GradientOrderError, UsageError
from byteps_py.kernels.update_rules import Hyperparameters
from byteps_py.torch.gradients.hosted.in_backward import BackwardRound, InBackwardReducer, RoundNumbers
from byteps_py.torch.gradients.hosted.optimizer import HostedOptimizerMixin, names_join
from byteps_py.torch.gradients.hosted.rules import check_numbers, numbers_of, rule_of

_REMEDY = "Leave step_in_backward out to have it"


class InBackwardOptimizerMixin(HostedOptimizerMixin):
    """The base class that DistributedOptimizer puts before the wrapped optimizer's class with ``step_in_backward``."""

    _reducer: InBackwardReducer
    _late: Exception | None = None  # found out when the step could not be stopped any more

    def begin_in_backward(self) -> None:
        """Begin steps under the backward pass from the next one on that finds states."""
        read, compare = weakref.WeakMethod(self._read_numbers), weakref.WeakMethod(self._compare_in_backward)

        def read_numbers() -> RoundNumbers | None:
            method = read()
            return None if method is None else method()

        def compare_numbers(numbers: RoundNumbers) -> bool:
            method = compare()
            return method is not None and method(numbers)

        self._reducer.use(read_numbers, compare_numbers)
        weakref.finalize(self, self._reducer.current.finish).atexit = False

    def _read_numbers(self) -> RoundNumbers | None:
        groups = self._wrapped.param_groups
        try:
            rules = [rule_of(self._wrapped, group) for group in groups]
            return RoundNumbers([numbers_of(group) for group in groups], rules, self._initial_sums)
        except (TypeError, ValueError, LookupError):
            return None  # step() reads them again

    def _compare_in_backward(self, numbers: RoundNumbers) -> bool:
        super()._compare(numbers.numbers, [float(rule.code) for rule in numbers.rules])
        for number, found in enumerate(numbers.numbers):
            check_numbers(found, number)
        return True

    @names_join
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the parameters that the services have stepped, once all are there.

        Raises as with ``hosted`` alone. Besides, raises GradientOrderError if a number of param_groups or a parameter
        was changed since backward(): the step has been made all the same, on all ranks, with what backward() has found.
        """
        if closure is not None:
            return super().step(closure)
        self._late = None
        try:
            super().step()
        finally:
            self._reducer.current.finish()
        self._raise_late()
        return None

    def _raise_late(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            if isinstance(late, GradientOrderError):
                late.add_note("The step has been made, on all ranks, with what backward() has found.")
            raise late

    step.hooked = True  # type: ignore[attr-defined]

    def _sum(self) -> None:
        late: Exception | None = None
        try:
            super()._sum()
        except Exception as error:
            late = error
        round_ = self._reducer.end_round()
        if round_ is not None and round_.is_agreed:
            self._late = late or self._changed(round_)
        elif late is not None:
            raise late

    def _changed(self, round_: BackwardRound) -> GradientOrderError | None:
        """The error if something was changed since the round has begun, which its step has not seen."""
        known = round_.numbers
        for number, (group, before) in enumerate(zip(self._wrapped.param_groups, known.numbers, strict=False)):
            now = numbers_of(group)
            for name in before.__dataclass_fields__:
                if getattr(now, name) != getattr(before, name):
                    return GradientOrderError(
                        f"{name} of param_groups[{number}] has changed from {getattr(before, name):g} to "
                        f"{getattr(now, name):g} after backward() and before step(): with step_in_backward, a step has "
                        "the numbers that backward() has found. Step a learning-rate scheduler after optimizer.step()"
                    )
            if rule_of(self._wrapped, group) != known.rules[number]:
                return GradientOrderError(f"param_groups[{number}] has changed after backward() and before step()")
        params = [param for bucket in self._reducer.hosted for param in bucket.params]
        for param, version in zip(params, round_.versions, strict=False):
            if param._version != version:
                return GradientOrderError(
                    f"parameter {self._parameter_names[param]!r} was changed after backward() and before step(): with "
                    "step_in_backward, the change may be lost. Change parameters after optimizer.step()"
                )
        return None

    def _step_numbers(self) -> list[Hyperparameters]:
        round_ = self._reducer.round
        if round_ is None or not round_.is_agreed:
            return super()._step_numbers()
        known = round_.numbers.numbers
        return [*known, *(numbers_of(group) for group in self._wrapped.param_groups[len(known) :])]

    def _compare(self, numbers: list[Hyperparameters], rules: list[float]) -> None:
        round_ = self._reducer.round
        if round_ is not None and round_.error is not None:
            raise round_.error
        if round_ is None or not round_.is_agreed or len(numbers) > len(round_.numbers.numbers):
            super()._compare(numbers, rules)

    # ---- what comes too late -----------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See torch.optim.Optimizer. Raises GradientOrderError between backward() and step()."""
        self._check_between_steps("zero_grad")
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As with ``hosted`` alone. Raises GradientOrderError between backward() and step()."""
        self._check_between_steps("state_dict")
        return super().state_dict()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch.optim.Optimizer. Raises GradientOrderError between backward() and step()."""
        self._check_between_steps("add_param_group")
        super().add_param_group(param_group)

    def _check_between_steps(self, what: str) -> None:
        if self._passes.has_begun:
            raise GradientOrderError(
                f"optimizer.{what}() was called after loss.backward() and before optimizer.step(): with "
                "step_in_backward, the services step under the backward pass and may have done so already. Call "
                "optimizer.step() first"
            )

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Raises UsageError: the norm is known after the first steps are made."""
        raise UsageError(
            "step_in_backward does not go together with clip_grad_norm_(), which needs all sums before the first step: "
            f"the services step under the backward pass. {_REMEDY}"
        )

    def _groups_to_unscale(self) -> list[dict[str, Any]]:
        raise UsageError(
            "step_in_backward does not go together with a GradScaler, which has to know before the first step whether "
            f"gradients have overflowed: the services step under the backward pass. {_REMEDY}, or train in bfloat16"
        )

"""AsyncOptimizer: machines step by themselves, and servers add what their steps change (BytePS, section 5).

    own step of the wrapped optimizer ─► change = own - values ─► servers: values += change ─► own = values, as they are

No machine waits for another one, unless that is asked for (``staleness``). Machines are the unit, as in BytePS: the
ranks of one machine exchange together, and the sum of their changes is what the machine gives. Where all ranks are on
one machine, that is all there is, and no server takes part. The training thread calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from byteps_py import rank_bits
from byteps_py.errors import UsageError
from byteps_py.system.log import logger
from byteps_py.tensors import NO_BOUND, NonFinite
from byteps_py.torch.collectives import context as contexts, nonfinite, parameter_owners
from byteps_py.torch.gradients.backward_passes import CountedPasses
from byteps_py.torch.gradients.optimizer_mixin import DistributedOptimizerMixin, NamedParameters, checked_names
from byteps_py.torch.gradients.shared_values import SharedValues
from byteps_py.torch.gradients.stepper import StepCall, Stepper, WrappedOptimizer
from byteps_py.torch.operations.state_broadcast import broadcast_parameters

__all__ = ["AsyncOptimizer"]


def AsyncOptimizer(  # noqa: N802  a class to its users, like DistributedOptimizer
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None = None,
    *,
    staleness: int | None = None,
    every: int = 1,
    compensation: float = 0.0,
) -> Any:
    """Wrap ``optimizer`` so that each machine trains by itself, with parameters that all machines share. Use the
    result.

    After its own step, a machine sends what the step has changed. The summation servers, which have the parameters, add
    it, and the machine goes on with the parameters as they are then, with all changes that have come by that time. So a
    slow machine slows no other one down, and machines that are equally fast step with gradients that are a step or
    two old. The result differs from run to run, and from DistributedOptimizer's; learning rates may have to be lower.

    The result is an instance of the optimizer's class that shares its state and param_groups. Parameters begin as rank
    0's, and are of dtype float16, bfloat16, float32 or float64; servers keep float32 of the first three.

    named_parameters: usually model.named_parameters(), see DistributedOptimizer.
    staleness: by how many exchanges a machine may be ahead of the slowest one, at least 1; further ahead, it waits.
    None: no machine waits for another one, as in BytePS.
    every: the number of steps from one exchange to the next.
    compensation: of the delay, λ of DC-ASGD (Zheng et al. 2017): a gradient g becomes g + λ·g·g·(what others have
    changed since), in the step after it. 0: none. The optimizer's param_groups need ``lr``; ``every`` must be 1.

    Nothing is lost if a server crashes, or if servers come and go: each machine has the newest values that it got, and
    gives again what has no answer. If a machine is lost, an elastic job goes on from its last commit.

    At the end of training a rank calls ``bps.join()``, so that no machine waits for it, and then has the parameters of
    its last exchange; broadcast_parameters makes all ranks equal. Machines may make different numbers of steps, but the
    ranks of one machine must exchange equally often.

    load_state_dict and broadcast_optimizer_state begin anew: call them on all ranks, which then have equal parameters.
    Other changes of parameters between steps count as the machine's own, and go to all.

    With BYTEPS_ENABLE_ASYNC=1, DistributedOptimizer is this, with BYTEPS_ASYNC_STALENESS. Raises UsageError for
    arguments that contradict each other, for a hosted or distributed optimizer and parameters of which ranks have
    different parts, NotInitializedError before init(). step() raises NonFiniteError for changes that are NaN or
    infinite if BYTEPS_NONFINITE=raise (skip: none is given), MismatchError, StallError and PeerLostError.

    >>> import torch, byteps_py as bps
    >>> bps.init()
    >>> model = torch.nn.Linear(2, 1)
    >>> opt = bps.AsyncOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), staleness=8)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> opt.step()
    >>> bps.shutdown()
    """
    for name, value in (("staleness", staleness), ("every", every)):
        if isinstance(value, bool) or not isinstance(value, int | None) or (value is not None and value < 1):
            raise UsageError(f"AsyncOptimizer: {name} is a whole number of at least 1, not {value!r}")
    if not compensation >= 0:
        raise UsageError(f"AsyncOptimizer: compensation is a number of at least 0, not {compensation!r}")
    if compensation and every > 1:
        raise UsageError(
            f"AsyncOptimizer: compensation is for the gradient of one step, but there are every={every} from one "
            "exchange to the next: leave one of the two out"
        )
    if isinstance(optimizer, DistributedOptimizerMixin):
        raise UsageError(
            "AsyncOptimizer: the optimizer averages gradients, or is hosted, already: give torch's optimizer"
        )
    context = contexts.current()
    names = checked_names(optimizer, named_parameters)
    mine = {param for group in optimizer.param_groups for param in group["params"]}
    named = [(name, param) for param, name in names.items() if param in mine]
    if compensation and any("lr" not in group for group in optimizer.param_groups):
        raise UsageError("AsyncOptimizer: compensation needs an optimizer whose param_groups have lr")
    ranks = range(context.session.size)
    remedy = "Its ranks would have to exchange with the ranks that have the same parts only, which it can't"
    parameter_owners.check_whole(named, ranks, "AsyncOptimizer", remedy)
    parameter_owners.check_unowned(named, "AsyncOptimizer")
    claimed = context.claim("AsyncOptimizer")
    if not context.settings.elastic:  # there, ranks that come later create it alone; TorchState makes all equal
        broadcast_parameters(named, 0, f"{claimed}.")
    wrapped = WrappedOptimizer(optimizer, names, CountedPasses(1))
    values = SharedValues(context, claimed, NO_BOUND if staleness is None else min(staleness, NO_BOUND))
    return DistributedOptimizerMixin.wrap(optimizer, AsyncStepper(wrapped, values, every, compensation))


class AsyncStepper(Stepper):
    """The wrapped optimizer's step, and in each ``every``th one an exchange."""

    def __init__(self, wrapped: WrappedOptimizer, values: SharedValues, every: int, compensation: float) -> None:
        super().__init__(wrapped)
        self._shared, self._every, self._compensation = values, every, compensation
        self._steps = 0
        self._versions: list[int] = []  # of the parameters after the last step
        self._has_warned = False

    def refusal(self, call: str) -> Exception | None:
        if call == "skip_synchronize":
            return UsageError("AsyncOptimizer: gradients stay the rank's own, and may be clipped before step()")
        return None

    def groups_to_unscale(self) -> list[dict[str, Any]]:
        """A scaler that finds an infinity skips the step, and with it an exchange that may be due."""
        return self.wrapped.groups

    def state_replaced(self) -> None:
        """All ranks begin anew, from the parameters as they are then."""
        self._shared.restart()
        self._steps = 0

    def step(self, call: StepCall) -> Any:
        """Let the wrapped optimizer step, and exchange what it has changed if that is due. Raises NonFiniteError."""
        wrapped, shared = self.wrapped, self._shared
        wrapped.mark_stepped()
        if shared.copies and len(wrapped.groups) > wrapped.groups_added:
            raise UsageError("AsyncOptimizer: param_groups can't be added after the first step")
        wrapped.add_groups()
        if shared.is_alone:
            self._steps += 1
            return self._own_step(call)
        if not shared.copies:
            shared.start_from([(wrapped.names[param], param) for param in wrapped.params if param.requires_grad])
        else:
            self._look_for_changes()
        self._steps += 1
        loss = self._own_step(call)
        if self._steps % self._every == 0:
            self._exchange_changes()
        self._versions = self._current_versions()
        return loss

    def _current_versions(self) -> list[int]:
        return [param._version for copy in self._shared.copies for param in copy.params]

    def _look_for_changes(self) -> None:
        """Warn if parameters were changed between steps."""
        if self._has_warned or self._current_versions() == self._versions:
            return
        self._has_warned = True
        logger.warning(
            "AsyncOptimizer: parameters were changed between two steps. That counts as a change by this machine, and "
            "is added for all. If all ranks have changed them alike, as broadcast_parameters does, begin anew from "
            "them: call optimizer.load_state_dict(optimizer.state_dict()) on all ranks"
        )

    def _own_step(self, call: StepCall) -> Any:
        """The wrapped optimizer's. With BYTEPS_NONFINITE=raise or skip, only with gradients that are finite: NaN would
        stay in its states, and go to all machines."""
        context, names = contexts.current(), self.wrapped.names
        mode = nonfinite.mode_of(context)
        if mode is NonFinite.ALLOW:
            return call.on_rank(call.closure)
        loss = None if call.closure is None else call.closure()
        places = [
            place
            for param in self.wrapped.params
            if param.grad is not None
            and not nonfinite.is_finite(param.grad)
            and (place := nonfinite.where(names[param], param.grad)) is not None
        ]
        if not places:
            call.on_rank()
            return loss
        session = context.session
        error = nonfinite.explain(rank_bits.of_rank(session.rank, session.size), session.size, self._steps, places)
        if mode is NonFinite.RAISE:
            raise error
        logger.warning("rank %d leaves out a step, and the others do not. %s", session.rank, error)
        return loss

    def _exchange_changes(self) -> None:
        copies = self._shared.copies
        own = [[param.detach().clone() for param in copy.params] for copy in copies] if self._compensation else []
        for copy in copies:
            copy.take_change(-1)
        self._shared.give()
        self._shared.take()
        for copy in copies:
            copy.give_values()
        if self._compensation:
            self._compensate(own)

    @torch.no_grad()
    def _compensate(self, own: Sequence[Sequence[torch.Tensor]]) -> None:
        """Add what the gradients lacked of others' changes. ``own``: the parameters before the exchange."""
        rates = {param: group["lr"] for group in self.wrapped.groups for param in group["params"]}
        for copy, values in zip(self._shared.copies, own, strict=True):
            for param, before in zip(copy.params, values, strict=True):
                if param.grad is not None:
                    others = param - before
                    param.sub_(others.mul_(param.grad).mul_(param.grad), alpha=float(rates[param] * self._compensation))

"""Carries out a worker's list of actions: receives, computes, sends.

A receive is posted before the action before it begins, so that data comes while the worker computes, and after the
sends of earlier actions, for which others wait. A send never makes a stage wait.

If a stage raises, its worker goes on without computing: it receives the values of others, and sends FAILED in place of
its own, as do workers that receive FAILED. So no message is left over, nobody waits for ever, and all workers end the
step together. One thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from byteps_py.errors import PeerLostError, UsageError
from byteps_py.parallel.pipe.groups import PipelineLayout
from byteps_py.parallel.pipe.program import Action, ActionKind, Program, WeightRule
from byteps_py.parallel.pipe.skips import MAIN, Connection
from byteps_py.parallel.pipe.stage_runner import Apply, StageRunner, Values, call, copied
from byteps_py.parallel.pipe.step_data import StepData
from byteps_py.parallel.pipe.transfers import FAILED, Ends, ReceivingChannel, SendingChannel, ValueSent, WorkerFailed
from byteps_py.parallel.pipe.trees import flatten

#: Actions whose receives are posted while an earlier one computes.
_AHEAD = 2

#: The call of the module for a part.
ApplyFor = Callable[[int], Apply]
Place = tuple[int, int]  # (pipe, stage)
#: (pipe, connection, whether it is for gradients)
ChannelKey = tuple[int, Connection, bool]


def new_channels(
    program: Program,
    connections: Sequence[Connection],
    layout: PipelineLayout,
    group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[dict[ChannelKey, SendingChannel], dict[ChannelKey, ReceivingChannel]]:
    """This worker's channels to and from other workers, which are the ranks of ``group``."""
    sending: dict[ChannelKey, SendingChannel] = {}
    receiving: dict[ChannelKey, ReceivingChannel] = {}
    keys = itertools.product(enumerate(program.holders), connections, (False, True))
    for tag, ((pipe, holders), connection, is_gradient) in enumerate(keys):
        source, target = holders[connection.source], holders[connection.target]
        if is_gradient:
            source, target = target, source
        if source == target or layout.worker not in (source, target):
            continue
        other = layout.rank_of(target if layout.worker == source else source)
        ends = Ends(other, tag, group, device, copies=program.rule is not WeightRule.SYNCHRONOUS)
        if layout.worker == source:
            sending[pipe, connection, is_gradient] = SendingChannel(ends)
        else:
            receiving[pipe, connection, is_gradient] = ReceivingChannel(ends)
    return sending, receiving


class ProgramRunner:
    """``stages``: those of this worker. ``connections``: of each pipe. ``sending``, ``receiving``: the channels to and
    from other workers; a connection without one stays on this worker."""

    def __init__(
        self,
        stages: Mapping[Place, StageRunner],
        connections: Sequence[Connection],
        sending: Mapping[ChannelKey, SendingChannel],
        receiving: Mapping[ChannelKey, ReceivingChannel],
        last_stage: int,
    ) -> None:
        self._stages, self._last = stages, last_stage
        self._sending, self._receiving = sending, receiving
        self._to = {stage: [one for one in connections if one.target == stage] for stage in range(last_stage + 1)}
        self._from = {stage: [one for one in connections if one.source == stage] for stage in range(last_stage + 1)}
        self._handed_over: dict[tuple[ChannelKey, int], Any] = {}  # between stages of this worker
        #: The number of gradients that come back on a connection for a part.
        self._due: dict[tuple[int, Connection, int], int] = {}
        self._sent: list[ValueSent] = []  # since the last ``finish``
        self._earlier: list[list[ValueSent]] = []  # before it, oldest first

    def run(
        self,
        actions: Sequence[Action],
        data: StepData,
        after: Callable[[int, Action], None] = lambda position, action: None,
        apply_for: ApplyFor = lambda part: call,
    ) -> None:
        """Carry out ``actions``. ``after``: called after each one, also after a failure. An exception of a stage goes
        to ``data``; raises the errors of the backend."""
        self._post(actions[:_AHEAD])
        for position, action in enumerate(actions):
            for part in action.parts:
                if action.kind is ActionKind.FORWARD:
                    self._forward(action.pipe, action.stage, part, data, apply_for)
                else:
                    self._backward(action.pipe, action.stage, part, data)
            self._post(actions[position + 1 : position + 1 + _AHEAD])
            after(position, action)
            self._drop_sent(data)
        if data.has_failed:
            for stage in self._stages.values():
                stage.forget()

    def finish(self, data: StepData, unfinished: int = 0) -> None:
        """Wait until everything is sent, except since the last ``unfinished`` calls of this method: others may take
        that in their next steps only. An error of a stage goes to ``data``; raises the errors of the backend."""
        self._earlier.append(self._sent)
        self._sent = []
        while len(self._earlier) > unfinished:
            for sent in self._earlier.pop(0):
                self._wait(sent, data)

    def _drop_sent(self, data: StepData) -> None:
        left = []
        for sent in self._sent:
            if sent.is_over:
                self._wait(sent, data)
            else:
                left.append(sent)
        self._sent = left

    @staticmethod
    def _wait(sent: ValueSent, data: StepData) -> None:
        try:
            sent.wait()
        except UsageError as error:
            data.fail(error)

    # ---- forward and backward ----------------------------------------------------------------------------

    def _forward(self, pipe: int, stage: int, part: int, data: StepData, apply_for: ApplyFor) -> None:
        inputs: Values = {}
        for connection in self._to[stage]:
            value = inputs[connection.name] = self._take((pipe, connection, False), part)
            self._note(pipe, connection, part, value)
        outputs = self._computed(
            data, inputs.values(), lambda: self._outputs(pipe, stage, part, inputs, data, apply_for(part))
        )
        for connection in self._from[stage]:
            value = FAILED if outputs is None else outputs[connection.name]
            self._note(pipe, connection, part, value)
            self._give((pipe, connection, False), part, value)

    def _outputs(self, pipe: int, stage: int, part: int, inputs: Values, data: StepData, apply: Apply) -> Values:
        if not stage:
            inputs = {MAIN: data.inputs[part]}
        runs = self._stages[pipe, stage]
        loss_of = data.loss_of
        if stage < self._last:
            return runs.forward(part, inputs, apply)
        if loss_of is None:
            outputs = runs.forward(part, inputs, apply)
            data.outputs[part] = outputs[MAIN]
            return outputs
        runs.loss(part, inputs, lambda module, value: loss_of(apply(module, value), part))
        return {}

    def _backward(self, pipe: int, stage: int, part: int, data: StepData) -> None:
        gradients: Values = {}
        for connection in self._from[stage]:
            if self._due.pop((pipe, connection, part)):
                gradients[connection.name] = self._take((pipe, connection, True), part)
        runs = self._stages[pipe, stage]
        found = self._computed(data, gradients.values(), lambda: runs.backward(part, gradients))
        for connection in self._to[stage]:
            if self._due.pop((pipe, connection, part)):
                self._give((pipe, connection, True), part, FAILED if found is None else found[connection.name])

    def _computed(self, data: StepData, inputs: Iterable[Any], compute: Callable[[], Any]) -> Any:
        """The result of ``compute``; None: this worker, or one before it, has failed."""
        if any(isinstance(value, WorkerFailed) for value in inputs):
            data.has_failed = True
        if data.has_failed:
            return None
        try:
            return compute()
        except PeerLostError:  # of a rank by which the stage computes: no worker can end the step
            raise
        except Exception as error:
            data.fail(error)
            return None

    # ---- values between stages ---------------------------------------------------------------------------

    def _post(self, following: Sequence[Action]) -> None:
        """Post the receives of the next actions that certainly come."""
        for action in following:
            is_forward = action.kind is ActionKind.FORWARD
            for connection in (self._to if is_forward else self._from)[action.stage]:
                channel = self._receiving.get((action.pipe, connection, not is_forward))
                if channel is not None and (is_forward or self._due.get((action.pipe, connection, action.parts[0]))):
                    channel.post()

    def _take(self, key: ChannelKey, part: int) -> Any:
        channel = self._receiving.get(key)
        if channel is not None:
            return channel.receive()
        value = self._handed_over.pop((key, part))
        # The stage before may still need its output; the next one may change its input.
        return copied(value) if torch.is_grad_enabled() else value

    def _give(self, key: ChannelKey, part: int, value: Any) -> None:
        channel = self._sending.get(key)
        if channel is None:
            self._handed_over[key, part] = value
        else:
            self._sent += channel.send(value)

    def _note(self, pipe: int, connection: Connection, part: int, value: Any) -> None:
        """Record the number of gradients that come back for ``value``."""
        if torch.is_grad_enabled():
            is_there = not isinstance(value, WorkerFailed)
            count = sum(tensor.requires_grad for tensor in flatten(value)[0]) if is_there else 0
            self._due[pipe, connection, part] = count

"""Trains a model whose stages are on different ranks: ``bps.parallel.Pipeline``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from byteps_py.errors import PipelineError, UsageError
from byteps_py.parallel.float32_gradients import StepGradients
from byteps_py.parallel.gradient_scaling import decide_together
from byteps_py.parallel.gradients import partial_norms, scale_gradients, total_norm
from byteps_py.parallel.mesh import Mesh
from byteps_py.parallel.pipe.buffers import PipelineBuffers
from byteps_py.parallel.pipe.groups import (
    PipelineGroups,
    PipelineLayout,
    ReplicatedParameters,
    check_process_groups,
    holders_of,
    raise_failures,
)
from byteps_py.parallel.pipe.pipeline_plan import PipelinePlan, StagesFunction, TorchSchedule, agree, make_plan
from byteps_py.parallel.pipe.program import Action, ActionKind, Program, WeightRule
from byteps_py.parallel.pipe.program_runner import ProgramRunner, new_channels
from byteps_py.parallel.pipe.simulator import SyncMode
from byteps_py.parallel.pipe.skips import MAIN
from byteps_py.parallel.pipe.stage_runner import StageRunner
from byteps_py.parallel.pipe.step_data import (
    ComputedInputs,
    Losses,
    LossFunction,
    Outcome,
    StepData,
    parts_of,
)
from byteps_py.parallel.pipe.weight_versions import StaleSteps
from byteps_py.parallel.tensor.parallel_plan import sharded_parameters, tensor_parallel_group
from byteps_py.parallel.tensor.shard import Shard
from byteps_py.torch.collectives import parameter_owners


class Pipeline:
    """A model in stages, trained by a schedule of forward and backward passes. All ranks of the job create it at the
    same time, because all of them make its process groups; ranks of different meshes have pipelines that are
    independent of each other. All ranks of a mesh then call its methods alike. Any backend of torch.distributed moves
    the data.

        model = nn.Sequential(...)  # the same on all ranks
        pipe = bps.parallel.Pipeline(model, schedule="chimera", micro_batches=8)
        optimizer = torch.optim.Adam(pipe.parameters())
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = pipe.step(inputs, targets, nn.functional.cross_entropy)
            optimizer.step()

    Gradients are those of the mean over all micro-batches and data-parallel copies.

    Args:
        model: an nn.Sequential, which ``split`` cuts by the parameters of its layers; or the result of ``split``; or a
            list with the module of each stage, in which those of other ranks may be None if stages share no parameters;
            or a function that returns one of these lists for the schedule's number of stages.
        schedule: a name (see `bps schedule`; "1f1b" is dapple) or a Program; or "zero-bubble", "zb-v" or "dualpipev",
            which are torch's (pipeline_plan.py).
        micro_batches: of a step.
        mesh: its dimension "pp" is that of workers, "dp" that of data-parallel copies. Ranks of "cp" are copies too,
            with other tokens of the same sequences (context parallelism). Ranks that differ in other dimensions, such
            as "tp", have pipelines of their own. Default: all ranks are workers of one pipeline.
        recompute: keep the inputs of stages only, and repeat forward passes before backward passes.
        sync: when the gradients of a stage's copies are summed: "at-end", "eager" (after its last backward pass) or
            "eager-opt" (eagerly if the worker is idle afterwards).
        float32_gradients: gradients of parameters of 16 bits are accumulated over micro-batches and summed over copies
            in float32, and rounded to the parameter's type once, at the end of ``step`` (Llama 3, section 6.2). Not for
            pipedream and pipedream-2bw, nor for parameters of FSDP2, which has a ``reduce_dtype``. torch before 2.10
            can't: gradients have the parameter's type there.
        options: of the schedule: ``chunks``, ``consecutive``, ``pipes``, ``more``, ``warmup``.

    Raises UsageError if the model, the schedule and the mesh do not go together. One thread.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module | None] | StagesFunction,
        schedule: str | Program = "dapple",
        micro_batches: int = 1,
        mesh: DeviceMesh | Mesh | None = None,
        *,
        recompute: bool = False,
        sync: str | SyncMode = SyncMode.EAGER_OPT,
        float32_gradients: bool = True,
        **options: Any,
    ) -> None:
        layout: PipelineLayout | None = None
        check_process_groups()
        try:
            layout = PipelineLayout.of(mesh)
            plan: PipelinePlan | UsageError = make_plan(
                layout, model, schedule, micro_batches, recompute, sync, options
            )
        except UsageError as error:
            plan = error
        self._connections = agree(plan, layout)
        if isinstance(plan, UsageError) or layout is None:
            raise plan if isinstance(plan, UsageError) else RuntimeError("a plan without a layout")
        self._plan, self._layout = plan, layout
        own = plan.program.stages_of(layout.worker)
        #: The modules of this rank, by the number of the stage. A stage of two pipes is the same module.
        self.stages = {stage: module for _, stage in own if (module := plan.modules[stage]) is not None}
        self._device = layout.device_of(list(self.stages.values()))
        self._groups = PipelineGroups.new(layout, plan.program, list(plan.tied_by_workers()))
        self._workers, self._all = self._groups.workers, self._groups.everyone
        self._runner = self._new_runner()
        self._buffers = PipelineBuffers()
        for module in self.stages.values():
            self._buffers.add(module)
        self._replicas, self._tied, self._first_holder = self._replicated()
        self._torch: TorchSchedule | None = None
        self._computed = ComputedInputs()
        if plan.is_torchs:
            self._torch = self._new_torch_schedule()
        self._float32_gradients = float32_gradients
        self._stale: StaleSteps | None = None
        if plan.program.rule is not WeightRule.SYNCHRONOUS:
            ((stage, module),) = self.stages.items()
            self._stale = StaleSteps.of(plan.program, layout.worker, stage, module, self._replicas.get(stage))
        self._plan = plan.of_worker(layout.worker)
        parameter_owners.announce_pipeline(self, self.parameters())
        self._skip_together()

    # ---- training ------------------------------------------------------------------------------------------

    def step(
        self,
        inputs: Any,
        targets: Any,
        loss_fn: LossFunction,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> torch.Tensor:
        """Forward and backward passes of all micro-batches; returns the loss, on all ranks. Gradients are added to
        those that parameters have.

        Args:
            inputs: the batch of this data-parallel copy: a tensor, or tuples, lists and dicts of tensors, cut along
                their first dimensions; or MicroBatches, which may differ in shape. Workers without a first stage ignore
                it. If the program has computed it from trained parameters, their gradients are added, too: of this
                copy's part of the mean, on the worker with the first stage.
            targets: likewise; workers without a last stage ignore it.
            loss_fn: (output, target) of a micro-batch -> its mean loss; or (sum, count), if micro-batches have
                different numbers of tokens: the loss is then the sum over all of them by the sum of the counts.
            scaler: the gradients are multiplied by its scale, the loss is not. All ranks skip a step together.
            optimizer: for pipedream and pipedream-2bw, which change the weights themselves: of this rank's parameters.
                Their passes overlap with those of the next step, so call ``flush`` after the last one.

        Raises PipelineError on all ranks if a stage raises, and the errors of the backend.
        """
        if self._stale is not None:
            return self._stale_step(inputs, targets, loss_fn, optimizer)
        if optimizer is not None:
            raise UsageError(f"{self.program.name}: call optimizer.step() after step(); it takes no optimizer")
        if scaler is not None:
            self._skip_together()
        scale = 1.0 if scaler is None else float(scaler.scale(torch.ones((), device=self._device)))
        gradients = StepGradients(self.parameters(), self._float32_gradients)
        losses = Losses(loss_fn, scale / (self.program.parts * self._layout.copies))
        try:
            with self._buffers.kept_if_it_fails():
                outcome = self._pass_all(inputs, targets, losses)
        except BaseException:
            gradients.discard()
            raise
        share = 1.0
        if outcome.is_counted:
            share = scale / outcome.terms if outcome.terms else 0.0
            gradients.multiply(share)
        gradients.add()
        computed, self._computed = self._computed, ComputedInputs()
        computed.backward(share)
        return outcome.loss

    def flush(self) -> None:
        """The backward passes and updates that earlier steps of pipedream or pipedream-2bw have left. Parts of a batch
        that is not complete change nothing."""
        if self._stale is not None:
            data = StepData()
            with self._buffers.kept_if_it_fails():
                self._stale.flush(self._runner, data)
                self._outcome(data, Losses(None, 1.0))

    def evaluate(self, inputs: Any, targets: Any, loss_fn: LossFunction) -> torch.Tensor:
        """The loss of forward passes only, on all ranks; see ``step``. Call ``eval()`` before, as for any module."""
        losses = Losses(loss_fn, 1.0)
        with self._buffers.kept_if_it_fails():
            data = self._data(inputs, targets, losses)
            self._run_forward(data)
            return self._outcome(data, losses).loss

    def outputs(self, inputs: Any) -> dict[int, Any]:
        """The outputs of the model, by micro-batch, on the workers that hold the last stage; see ``step``."""
        with self._buffers.kept_if_it_fails():
            data = self._data(inputs, None, None)
            self._run_forward(data)
            self._outcome(data, Losses(None, 1.0))
        return data.outputs

    # ---- the module ----------------------------------------------------------------------------------------

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages by their names in the model. If the stages were given as a list, the
        number of the stage comes first: "2.weight". ``remove_duplicate``: each parameter once, by its first name."""
        seen: set[int] = set()
        for stage in sorted(self.stages):
            for name, parameter in self.stages[stage].named_parameters(remove_duplicate=remove_duplicate):
                if id(parameter) not in seen or not remove_duplicate:
                    seen.add(id(parameter))
                    yield self._prefix(stage) + name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages, each once: for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def counted_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of ``named_parameters`` that no worker before this one holds: over all workers, each one once."""
        for name, parameter in self.named_parameters():
            if self._first_holder[name] == self._layout.worker:
                yield name, parameter

    def sharded_parameters(self) -> dict[str, Shard]:
        """The parameters of this rank's stages that lie in parts on tensor-parallel ranks, by name."""
        return {
            self._prefix(stage) + name: shard
            for stage, module in self.stages.items()
            for name, shard in sharded_parameters(module).items()
        }

    def named_stages(self) -> Iterator[tuple[str, nn.Module]]:
        """This rank's modules, each with the prefix that the names of its parameters have in the model."""
        return ((self._prefix(stage), self.stages[stage]) for stage in sorted(self.stages))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers of this rank's stages, by their names in the model. See parallel/checkpoint."""
        return {
            self._prefix(stage) + name: tensor
            for stage, module in self.stages.items()
            for name, tensor in module.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """``state``: at least what ``state_dict`` returns, as that of the whole model. Raises UsageError."""
        if missing := sorted(set(self.state_dict()) - set(state)):
            raise UsageError(f"the state has no {missing[0]!r}")
        for stage, module in self.stages.items():
            prefix = self._prefix(stage)
            module.load_state_dict({name: state[prefix + name] for name in module.state_dict()})

    def train(self, mode: bool = True) -> Pipeline:
        """Like nn.Module.train()."""
        for module in self.stages.values():
            module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Like nn.Module.eval()."""
        return self.train(False)

    @property
    def program(self) -> Program:
        """The actions of each worker in a step."""
        return self._plan.program

    @property
    def group(self) -> dist.ProcessGroup:
        """All workers of all data-parallel copies."""
        return self._all

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Like ``torch.nn.utils.clip_grad_norm_``, for the gradients of all stages, each parameter once. Returns the
        norm, the same on all ranks."""
        named = [(name, one.grad) for name, one in self.counted_parameters() if one.grad is not None]
        tp = self._tensor_parallel_group()
        partial = partial_norms(named, self.sharded_parameters(), tp, norm_type).to(self._device)
        norm = total_norm(partial, [self._workers], norm_type)
        scale_gradients(self.parameters(), max_norm, norm)
        return norm

    def _skip_together(self) -> None:
        """A GradScaler skips a step on all ranks, or on none. Called again, as FSDP2 replaces parameters."""
        decide_together(self.parameters(), [self._tensor_parallel_group(), self._all])

    def _tensor_parallel_group(self) -> dist.ProcessGroup | None:
        return next((found for one in self.stages.values() if (found := tensor_parallel_group(one)) is not None), None)

    # ---- carrying out --------------------------------------------------------------------------------------

    def _pass_all(self, inputs: Any, targets: Any, losses: Losses) -> Outcome:
        """Forward and backward passes of a batch."""
        if self._torch is not None:
            self._torch.run(inputs, targets, losses)
            data = StepData()
        else:
            data = self._data(inputs, targets, losses)
            self._computed = self._cut_off(data)
        self._run(self.program.workers[self._layout.worker], data)
        return self._outcome(data, losses)

    def _run(self, actions: Sequence[Action], data: StepData) -> None:
        """Forward and backward passes, and the sums of gradients."""

        def launch(replicas: ReplicatedParameters) -> None:
            try:
                replicas.launch()
            except UsageError as error:
                data.fail(error)

        def after(position: int, action: Action) -> None:
            for stage in self._plan.reductions.get(position, ()):
                if stage in self._replicas:
                    launch(self._replicas[stage])

        self._runner.run(actions, data, after)
        whole = [*self._replicas.values(), *self._tied]
        for replicas in whole:
            if replicas.is_due:
                launch(replicas)
        self._runner.finish(data)
        for replicas in whole:
            replicas.finish()

    def _stale_step(
        self, inputs: Any, targets: Any, loss_fn: LossFunction, optimizer: torch.optim.Optimizer | None
    ) -> torch.Tensor:
        if self._stale is None or optimizer is None:
            raise UsageError(f"{self.program.name} changes weights within a step: give the optimizer to step()")
        self._stale.optimizer = optimizer
        losses = Losses(loss_fn, 1.0 / (self._stale.versions.batch * self._layout.copies), may_count=False)
        with self._buffers.kept_if_it_fails():
            data = self._data(inputs, targets, losses, self._stale.parts)
            self._cut_off(data)
            self._stale.run(self._runner, data, self.program.micro_batches)
            try:
                return self._outcome(data, losses).loss
            except PipelineError:
                self._stale.fail(self._runner, StepData())
                raise

    def _run_forward(self, data: StepData) -> None:
        own = self.program.workers[self._layout.worker]
        if self._torch is not None:
            raise UsageError(f"{self.program.name} is torch's schedule: it only trains")
        with torch.no_grad():
            self._runner.run([action for action in own if action.kind is ActionKind.FORWARD], data)
        self._runner.finish(data)

    def _data(self, inputs: Any, targets: Any, losses: Losses | None, first: int = 0) -> StepData:
        """The batch in parts, numbered from ``first`` on. An error goes to all ranks, which must not wait for this
        one."""
        data, each, own = StepData(), self.program.parts_of_micro_batch, set(self.stages)
        try:
            if 0 in own:
                data.inputs = dict(enumerate(self._input_parts(inputs), first))
            if losses is not None and self.program.stages - 1 in own:
                pieces = parts_of(targets, self.program.micro_batches, each, "targets")
                data.loss_of = lambda output, part: losses.of(output, pieces[part - first])
        except UsageError as error:
            data.fail(error)
        return data

    def _cut_off(self, data: StepData) -> ComputedInputs:
        """Detach inputs from the graph that has computed them."""
        computed = ComputedInputs()
        parts = computed.detach(list(data.inputs.values()))
        if computed and (len(self.program.holders) > 1 or self._stale is not None):
            why = (
                "changes weights within a step" if self._stale is not None else "has the first stage on several workers"
            )
            data.fail(
                UsageError(
                    f"the inputs require gradients, but {self.program.name} {why}: put the module that computes them "
                    "into the first stage, or detach() them"
                )
            )
        data.inputs = dict(zip(data.inputs, parts, strict=True))
        return computed

    def _input_parts(self, inputs: Any) -> list[Any]:
        """The parts of the first stage's inputs. Raises UsageError."""
        return parts_of(inputs, self.program.micro_batches, self.program.parts_of_micro_batch, "inputs")

    def _outcome(self, data: StepData, losses: Losses) -> Outcome:
        """The sums over all ranks. Then copies of a stage have the same buffers. Raises PipelineError if one of the
        ranks has failed."""
        own = torch.tensor(
            [losses.total, losses.count, losses.counted, data.error is not None, self._buffers.have_changed],
            dtype=torch.float64,
            device=self._device,
        )
        dist.all_reduce(own, group=self._all)
        total, count, counted, failed, changed = own.tolist()
        if failed:
            # The frames of its traceback refer to ``data``. A cycle would keep their tensors, and torch's checkpoints
            # that a stage has begun, until the next garbage collection.
            error, data.error = data.error, None
            raise_failures(error, self._all)
        if changed:
            self._buffers.make_equal()
        loss = torch.tensor(total / count if count else 0.0, dtype=torch.float64, device=self._device)
        return Outcome(loss, count, bool(counted))

    def _prefix(self, stage: int) -> str:
        """The prefix of the names of a stage's parameters."""
        return "" if self._plan.is_split else f"{stage}."

    # ---- setting up ----------------------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """After the loss of a rank: workers have sent each other nothing yet. All ranks call it, or make a pipeline."""
        self._runner = self._new_runner()
        if self._torch is not None:
            self._torch = self._new_torch_schedule()  # all find the shapes again
        self._computed = ComputedInputs()
        for replicas in [*self._replicas.values(), *self._tied]:
            replicas.begin_anew()

    def _new_torch_schedule(self) -> TorchSchedule:
        return TorchSchedule(self._plan.program, self.stages, self._device, self._workers)

    def _new_runner(self) -> ProgramRunner:
        stages = {}
        for pipe, stage in self.program.stages_of(self._layout.worker):
            outgoing = [one.name for one in self._connections if one.source == stage and one.name != MAIN]
            stages[pipe, stage] = StageRunner(self.stages[stage], outgoing, self._plan.recompute, stage == 0)
        channels = new_channels(self.program, self._connections, self._layout, self._workers, self._device)
        return ProgramRunner(stages, self._connections, *channels, self.program.stages - 1)

    def _replicated(
        self,
    ) -> tuple[dict[int, ReplicatedParameters], list[ReplicatedParameters], dict[str, int]]:
        """The parameters of each stage with copies, those that stages share, and the first worker that holds each
        parameter of this rank."""
        replicas: dict[int, ReplicatedParameters] = {}
        first_holder: dict[str, int] = {}
        for stage, workers in enumerate(holders_of(self.program)):
            names: dict[str, nn.Parameter] = {}
            if stage in self.stages:
                own = self.stages[stage].named_parameters()
                names = {self._prefix(stage) + name: one for name, one in own if id(one) not in self._plan.tied}
            first_holder |= dict.fromkeys(names, min(workers))
            group = self._groups.stages.get(stage)
            if group is not None:
                source = self._layout.rank_of_first(workers)
                replicas[stage] = ReplicatedParameters(list(names), list(names.values()), group)
                replicas[stage].broadcast(source)
                self._buffers.share(self.stages[stage], source, group)
        tied = []
        for workers, some in self._plan.tied_by_workers().items():
            if self._layout.worker in workers:
                first_holder |= {name: min(workers) for one in some for name in one.names}
            group = self._groups.tied.get(workers)
            if group is not None:
                tied.append(
                    ReplicatedParameters([one.names[0] for one in some], [one.parameter for one in some], group)
                )
                tied[-1].broadcast(self._layout.rank_of_first(workers))
        return replicas, tied, first_holder

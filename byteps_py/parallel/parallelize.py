"""All dimensions of a mesh at once: ``bps.parallel.parallelize_model``. Read it from top to bottom.

Each dimension has a package of its name: tensor, context, pipe. Data parallelism is torch's.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from byteps_py.errors import UsageError
from byteps_py.parallel import tensor
from byteps_py.parallel.compressed_gradients import CompressedAverages, check_compression, compress_gradients
from byteps_py.parallel.gradient_scaling import decide_together
from byteps_py.parallel.gradients import clip_grad_norm_, multiply_gradients
from byteps_py.parallel.hosted import EqualCopies, MeshHosting, hosted_optimizer, whole_module
from byteps_py.parallel.mesh import Mesh
from byteps_py.parallel.pipe.pipeline import Pipeline
from byteps_py.parallel.pipe.step_data import LossFunction, cut
from byteps_py.parallel.pipe.trees import flatten
from byteps_py.parallel.sharding.zero_optimizer import ZeroOptimizer
from byteps_py.torch.collectives import context as contexts
from byteps_py.torch.collectives.group_history import history_of
from byteps_py.torch.compression import Compression, CompressionArgument, compression_of
from byteps_py.torch.gradients.hosted.optimizer import HostedOptimizerMixin
from byteps_py.torch.gradients.hosted.restore import restore
from byteps_py.torch.gradients.hosted.whole_steps import WholeStepTiming
from byteps_py.torch.run.loader_position import random_states, set_random_states
from byteps_py.torch.run.model_state import ModelState
from byteps_py.torch.run.run_state import numbers_of, set_number

Module = nn.Module | Pipeline
DataParallelism = Literal["ddp", "zero1", "zero2", "zero3", "hsdp"]
NewOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

#: The values of ``data`` with which FSDP2 divides states among copies of the model, and sums their gradients itself.
_FULLY_SHARDED = ("zero2", "zero3", "hsdp")
#: Schedules that take the optimizer.
_UNSYNCHRONOUS = ("pipedream", "pipedream-2bw")


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """The way in which ``parallelize_model`` uses the mesh.

    Attributes:
        plan: the tensor-parallel style of each layer, by name: see ``tensor.parallelize``.
        sequence_dim: of hidden states; the norms of the plan see parts of it (sequence parallelism). None: all of it.
        data: the states that are divided among the ranks of "dp" and "cp", which are copies of the model: none ("ddp"),
            optimizer states ("zero1"), also gradients ("zero2"), also parameters ("zero3"); or as "zero3" among the
            ranks of "cp" only, with copies along "dp" ("hsdp").
        schedule: of the pipeline: a name of `bps schedule`, of those that change no weights themselves.
        micro_batches: of a step. Without a pipeline, their gradients are accumulated.
        recompute: a pipeline's stages keep their inputs only, and repeat forward passes before backward passes.
        autocast: the dtype of torch.autocast; None: none. With torch.float16, the loss is scaled (GradScaler).
        max_norm: gradients are clipped to this norm. None: they are not.
        hosted: with "ddp", the communication services keep the optimizer's states, and make its steps, for the ranks
            of ``mesh.gradient_group``: True, "machine" or "sharded", see DistributedOptimizer. ``p.grad`` stays the
            gradient of this rank's copy of the model.
        compression: how gradients travel between copies of the model: with "ddp", see DistributedOptimizer, also with
            ``hosted``; with "zero2" and "zero3", see ``fsdp.compress_gradients``. Checkpoints do not have the errors
            that machines keep for it, which compression_state_dict saves.
        shadow: as ``hosted``, and summation servers on other machines keep the states in step: a restarted job goes on
            from ``training.restore()``, which needs the same mesh.
    """

    plan: Mapping[str, tensor.Style] = field(default_factory=dict)
    sequence_dim: int | None = None
    data: DataParallelism = "ddp"
    schedule: str = "dapple"
    micro_batches: int = 1
    recompute: bool = False
    autocast: torch.dtype | None = None
    max_norm: float | None = None
    hosted: bool | str = False
    shadow: bool = False
    compression: CompressionArgument = Compression.none

    @property
    def is_hosted(self) -> bool:
        """Services make the steps."""
        return self.hosted is not False or self.shadow

    @property
    def is_compressed(self) -> bool:
        """Gradients travel in another form."""
        return self.compression is not Compression.none


def parallelize_model(
    model: nn.Sequential, mesh: Mesh, loss: LossFunction, optimizer: NewOptimizer, options: ParallelOptions
) -> ParallelTraining:
    """Cut ``model`` for this rank of ``mesh``, and make its optimizer. All ranks call it alike.

        mesh = bps.parallel.Mesh(tp=2, pp=2)  # dp: all other ranks
        model = nn.Sequential(...)            # the same on all ranks; its attention knows mesh.group("cp")
        options = ParallelOptions(plan={"*.w1": Column(), "*.w2": Row()}, micro_batches=4, max_norm=1.0)
        training = bps.parallel.parallelize_model(model, mesh, loss, partial(torch.optim.AdamW, lr=1e-3), options)
        for inputs, targets in batches:       # of this data-parallel rank
            loss = training.step(inputs, targets)
        checkpoint.save(training.module, "checkpoint/1000", training.optimizer)

    Args:
        model: its layers, on this rank's device. It is changed in place.
        mesh: of all ranks of the job.
        loss: (output, target) of a micro-batch -> its mean loss; or (sum, count), if micro-batches or ranks have
            different numbers of tokens: the loss of a step is then the sum over all of them by the sum of the counts.
        optimizer: parameters of this rank -> their optimizer.

    Raises UsageError if the model, the mesh and the options do not go together. One thread.
    """
    _check(mesh, options)
    if options.is_compressed:
        check_compression(model, options.compression, options.hosted, options.shadow)
    tensor.parallelize(model, options.plan, mesh.group("tp"), sequence_dim=options.sequence_dim)
    copies, is_fully_sharded = mesh.gradient_group, options.data in _FULLY_SHARDED
    is_hosted = options.is_hosted
    is_beside = is_hosted or (
        options.is_compressed and not is_fully_sharded
    )  # gradients of copies are summed beside the model
    module: Module = model
    if mesh.pp > 1:
        # If others than the pipeline sum gradients over copies, each copy of the model is a pipeline of its own.
        workers = mesh.device_mesh["pp"] if is_fully_sharded or is_beside else mesh.device_mesh
        module = Pipeline(model, options.schedule, options.micro_batches, workers, recompute=options.recompute)
    forward: nn.Module = model
    if is_fully_sharded:
        for stage in module.stages.values() if isinstance(module, Pipeline) else [model]:
            _fully_shard(stage, mesh, options.data)
            if options.is_compressed:
                compress_gradients(stage, options.compression)
        decide_together(module.parameters(), [copies])
    elif is_beside:
        EqualCopies(module, copies).parameters()
    elif isinstance(module, nn.Module):
        # Without views of what is sent, each parameter has 4 bytes more.
        forward = nn.parallel.DistributedDataParallel(model, process_group=copies, gradient_as_bucket_view=True)
    parameters = list(module.parameters())
    if options.data == "zero1":  # it makes the optimizer of the parameters that this rank steps
        own: torch.optim.Optimizer = ZeroOptimizer(parameters, optimizer, copies)  # type: ignore[arg-type]
    else:
        own = optimizer(parameters)
    if is_hosted:
        how = MeshHosting(options.hosted, options.shadow, options.micro_batches, options.compression)
        own = hosted_optimizer(own, module, mesh, how)
    averages = None
    if is_beside and not is_hosted:
        averages = CompressedAverages(module, copies, options.compression, options.micro_batches)
    mean = _MeanLoss(loss, mesh, module.program.parts if isinstance(module, Pipeline) else 1)
    equal = EqualCopies(module, copies) if is_beside else None
    parts = _Parts(module, forward, loss, mean, not (is_fully_sharded or is_beside), equal, averages)
    if (history := history_of(contexts.current())) is not None:
        history.renew_with(parts.begin_anew)
    return ParallelTraining(parts, own, options)


def _check(mesh: Mesh, options: ParallelOptions) -> None:
    if options.data not in get_args(DataParallelism):
        raise UsageError(f"data={options.data!r}: give one of {', '.join(get_args(DataParallelism))}")
    if options.data == "hsdp" and mesh.cp == 1:
        raise UsageError(
            "data='hsdp' shares parameters among the ranks of cp, and cp is 1: give 'zero3', or a larger cp"
        )
    if options.is_hosted and options.data != "ddp":
        asked = "shadow=True" if options.hosted is False else f"hosted={options.hosted!r}"
        raise UsageError(
            f"{asked} does not go together with data={options.data!r}, which keeps states on the ranks, and no copies "
            "of them: hosted='sharded' divides them among the services of the same ranks, with data='ddp'"
        )
    if options.is_compressed and options.data in ("zero1", "hsdp"):
        raise UsageError(
            f"compression does not go together with data={options.data!r}, of which torch sums gradients over copies "
            "itself: give data='ddp', 'zero2' or 'zero3'"
        )
    if options.is_compressed and options.data in _FULLY_SHARDED:
        compression_of(options.compression)  # raises UsageError
    if mesh.sharding > 1 and options.data in _FULLY_SHARDED:
        raise UsageError(f"data={options.data!r} takes no mesh with sharding={mesh.sharding}: give the ranks to dp")
    if mesh.tp > 1 and not options.plan:
        raise UsageError(f"tp={mesh.tp} needs a plan: ParallelOptions(plan={{'*.w1': tensor.Column(), …}})")
    if mesh.pp > 1 and options.schedule in _UNSYNCHRONOUS:
        raise UsageError(f"{options.schedule} changes weights within its steps: use bps.parallel.Pipeline")


def _fully_shard(stage: nn.Module, mesh: Mesh, data: str) -> None:
    """FSDP2, for each layer and for the rest. "hsdp": parts lie along "cp", copies of them along "dp"."""
    ranks = mesh.submesh("dp", "cp", flat=data != "hsdp")
    for layer in [*stage.children(), stage]:
        fully_shard(layer, mesh=ranks, reshard_after_forward=data != "zero2")


@dataclass(frozen=True)
class _Parts:
    """``forward``: ``module``, with the wrapper that sums its gradients over ``mesh.gradient_group``.
    ``is_summed_by_pipeline``: a pipeline does, and takes the mean of ``loss``; else ``mean`` does. ``equal``: keeps
    buffers of copies equal, unless ``forward`` or the pipeline does. ``averages``: of gradients, if nothing else makes
    them."""

    module: Module
    forward: nn.Module
    loss: LossFunction
    mean: _MeanLoss
    is_summed_by_pipeline: bool
    equal: EqualCopies | None = None
    averages: CompressedAverages | None = None

    def begin_anew(self) -> None:
        """A rank was started again: what ranks have told each other in steps before is not known to all."""
        self.mean.begin_anew()
        if isinstance(self.module, Pipeline):
            self.module.begin_anew()


class ParallelTraining:
    """A model on this rank of a mesh, with its optimizer. ``parallelize_model`` makes it; all ranks call its methods
    alike.

    Attributes:
        module: for ``checkpoint.save`` and ``load``: the model, or its pipeline.
        optimizer: for schedulers of the learning rate, and for checkpoints.
        scaler: of the loss. It does nothing unless ``autocast`` is torch.float16.
        norm: of the gradients in the last step, before clipping; None without ``max_norm``.
    """

    def __init__(self, parts: _Parts, optimizer: torch.optim.Optimizer, options: ParallelOptions) -> None:
        self.module, self.optimizer = parts.module, optimizer
        self._parts, self._options = parts, options
        self._device = next(iter(parts.module.parameters())).device
        self.scaler = torch.amp.GradScaler(self._device.type, enabled=options.autocast is torch.float16)
        self.norm: torch.Tensor | None = None

    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Train on the batch of this data-parallel rank. Ranks that differ in other dimensions only give the same one.
        Returns the loss over the batches of all ranks, a scalar that is the same on each of them."""
        return TrainingStep(self, inputs, targets).make_whole()

    def backward(self, inputs: Any, targets: Any) -> torch.Tensor:
        """The forward and backward passes of ``step``. Gradients replace those that parameters have; with torch.float16
        they are scaled. With ``hosted``, they are those of this rank's copy of the model."""
        # Gradients that are views of what is sent stay: others would be summed elsewhere first, and copied there.
        is_view = isinstance(self._parts.forward, nn.parallel.DistributedDataParallel)
        self.optimizer.zero_grad(set_to_none=not is_view)
        module, mean = self.module, self._parts.mean
        if self._parts.equal is not None:
            self._parts.equal.buffers()
        if isinstance(module, Pipeline) and self._parts.is_summed_by_pipeline:
            with self._autocast():
                return module.step(inputs, targets, self._parts.loss, self.scaler)
        mean.begin(targets, self._device)
        if isinstance(module, Pipeline):
            with self._autocast():
                module.step(inputs, targets, mean, self.scaler)
        else:
            self._accumulate(inputs, targets)
        if self._parts.averages is not None:
            self._parts.averages.finish()
        if isinstance(self.optimizer, HostedOptimizerMixin) and not isinstance(module, Pipeline):
            return mean.take(self.optimizer._stepper.multiply)  # gradients are on their way
        return mean.take(functools.partial(multiply_gradients, module.parameters()))

    def evaluate(self, inputs: Any, targets: Any) -> torch.Tensor:
        """The loss of forward passes only; see ``step``. Call ``module.eval()`` before, as for any module."""
        return Evaluation(self, inputs, targets).make_whole()

    @property
    def local_module(self) -> nn.Module:
        """The modules of this rank as one: for a RunState, which restores by itself."""
        return whole_module(self.module)

    def restore(self) -> int | None:
        """With ``shadow``: go on from the last step that servers hold of an earlier run, with the same mesh, as
        ``bps.restore`` does. Returns how often ``optimizer.step()`` was called; None if they hold nothing. All ranks
        call it, before the first step. Raises UsageError, and as ``bps.restore`` does."""
        return restore(self.local_module, self.optimizer)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Like ``torch.nn.utils.clip_grad_norm_``, over the gradients of all ranks, each parameter once. Returns the
        norm before clipping, the same on all ranks. With ``hosted``, the next step clips, and ``norm_type`` is 2."""
        if isinstance(self.optimizer, HostedOptimizerMixin):
            if norm_type != 2.0:
                raise UsageError(f"norm_type={norm_type}: a hosted optimizer clips by the norm of type 2")
            return self.optimizer.clip_grad_norm_(max_norm)
        if isinstance(self.module, Pipeline):
            return self.module.clip_grad_norm_(max_norm, norm_type)
        return clip_grad_norm_(self.module, max_norm, norm_type)

    def _autocast(self) -> torch.autocast:
        dtype = self._options.autocast
        return torch.autocast(self._device.type, dtype, enabled=dtype is not None)

    def _micro_batches(self, inputs: Any, targets: Any) -> list[tuple[Any, Any]]:
        count = self._options.micro_batches
        return list(zip(cut(inputs, count, "inputs"), cut(targets, count, "targets"), strict=True))

    def _accumulate(self, inputs: Any, targets: Any) -> None:
        """The passes without a pipeline. The ranks sum their gradients in the last one."""
        micro_batches, forward = self._micro_batches(inputs, targets), self._parts.forward
        for number, (part, target) in enumerate(micro_batches, start=1):
            is_last = number == len(micro_batches)
            if isinstance(forward, FSDPModule):
                forward.set_requires_gradient_sync(is_last)
                if self._options.data == "zero2":  # whole parameters stay for the next micro-batch
                    forward.set_reshard_after_backward(is_last)
            is_alone = isinstance(forward, nn.parallel.DistributedDataParallel) and not is_last
            with forward.no_sync() if is_alone else contextlib.nullcontext():  # type: ignore[operator]
                with self._autocast():
                    loss = self._parts.mean(forward(part), target)
                self.scaler.scale(loss).backward()


class TrainingCall(abc.ABC):
    """A RepeatableCall of ``training``, and what belongs to it."""

    #: In a loop that is not a RunState's, too.
    is_step = False

    def __init__(self, training: ParallelTraining, inputs: Any, targets: Any) -> None:
        self._training, self._inputs, self._targets = training, inputs, targets
        self._loss = torch.zeros((), device="cpu")

    def make_whole(self) -> torch.Tensor:
        """``make``, and after the loss of a rank once more, in a job whose ranks are started again."""
        optimizer = self._training.optimizer
        if isinstance(optimizer, HostedOptimizerMixin):
            stepper = optimizer._stepper
            if isinstance(stepper.timing, WholeStepTiming) and (self.is_step or stepper.timing.has_loop):
                return stepper.timing.make_whole(stepper, self)
        return self.make()

    @abc.abstractmethod
    def make(self) -> torch.Tensor:
        """See RepeatableCall."""

    def state(self) -> _CallState:
        training = self._training
        return _CallState(
            random_states(),
            copy.deepcopy(training.scaler.state_dict()),
            [numbers_of(group) for group in training.optimizer.param_groups],
            ModelState.of(training.local_module, flatten([self._inputs, self._targets])[0]),
        )

    def put_back(self, state: _CallState) -> None:
        training = self._training
        state.model.check()
        set_random_states(state.random)
        if training.scaler.is_enabled():
            training.scaler.load_state_dict(state.scaler)
            training.scaler._per_optimizer_states.clear()
        for group, numbers in zip(training.optimizer.param_groups, state.groups, strict=True):
            for name, value in numbers.items():
                set_number(group, name, value)
        state.model.put_back()

    def finish(self) -> torch.Tensor:
        self._training.scaler.update()
        return self._loss


class TrainingStep(TrainingCall):
    """Passes and step."""

    is_step = True

    def make(self) -> torch.Tensor:
        training = self._training
        self._loss = training.backward(self._inputs, self._targets)
        training.scaler.unscale_(training.optimizer)
        if (max_norm := training._options.max_norm) is not None:
            training.norm = training.clip_grad_norm_(max_norm)
        training.scaler.step(training.optimizer)
        return self.finish()


class Evaluation(TrainingCall):
    """Forward passes."""

    @torch.no_grad()
    def make(self) -> torch.Tensor:
        training = self._training
        module, mean = training.module, training._parts.mean
        with training._autocast():
            if isinstance(module, Pipeline) and training._parts.is_summed_by_pipeline:
                return module.evaluate(self._inputs, self._targets, training._parts.loss)
            mean.begin(self._targets, training._device)
            if isinstance(module, Pipeline):
                module.evaluate(self._inputs, self._targets, mean)
            else:
                for part, target in training._micro_batches(self._inputs, self._targets):
                    mean(module(part), target)
        return mean.take(lambda factor: None)


@dataclass(frozen=True)
class _CallState:
    """``scaler``: its state_dict. ``groups``: the numbers of the optimizer's param_groups."""

    random: dict[str, Any]
    scaler: dict[str, Any]
    groups: list[dict[str, Any]]
    model: ModelState


class _MeanLoss:
    """Makes a mean over the micro-batches of all copies of the model of a loss that is known for one micro-batch.

    DDP and FSDP take the mean of gradients over ranks before it is known how many tokens count on all of them. So
    gradients are those of sum / ``_expected``, and ``take`` multiplies them by the rest of the way to sum / count.
    ``parts``: by how many a pipeline divides.
    """

    def __init__(self, function: LossFunction, mesh: Mesh, parts: int) -> None:
        self._function, self._parts = function, parts
        self._copies = mesh.gradient_group
        self._groups = [self._copies, *([mesh.group("pp")] if mesh.pp > 1 else [])]
        self._weight = 0.0  # of a micro-batch's sum in its backward pass: copies / expected
        self._expected = 0.0
        self._is_agreed = False  # that all copies have this number
        self._own: list[torch.Tensor] = []  # of each call: (sum, count)
        self._device = torch.device("cpu")

    def begin_anew(self) -> None:
        """A copy was started again, and does not know what the others have agreed on."""
        self._is_agreed = False

    def begin(self, targets: Any, device: torch.device) -> None:
        """Before the passes of a batch. All ranks call it."""
        if not self._is_agreed:
            elements = max(sum(one.numel() for one in flatten(targets)[0]), 1)
            told = torch.tensor([elements, self._expected, self._expected > 0], dtype=torch.float64, device=device)
            dist.all_reduce(told, group=self._copies)
            found, known, holders = told.tolist()
            # Copies that were not started again know the number of the first batch.
            self._expected, self._is_agreed = known / holders if holders else found, True
            self._weight = dist.get_world_size(self._copies) / self._expected
        self._own, self._device = [], device

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        """The loss of a micro-batch, for its backward pass."""
        found = self._function(output, target)
        total, count = found if isinstance(found, tuple) else (found, 1)
        own = [torch.as_tensor(one, device=self._device).detach().double() for one in (total, count)]
        self._own.append(torch.stack(own))
        return total * (self._weight * self._parts)

    def take(self, multiply: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """After the passes: the mean. ``multiply``: gradients, by a factor that makes them its own. All ranks call
        it."""
        # torch's schedules call it once more before their first step, with values that mean nothing.
        of_parts = self._own[-self._parts :] if len(self._groups) > 1 else self._own
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for own in of_parts:
            sums += own
        for group in self._groups:
            dist.all_reduce(sums, group=group)
        total, count = sums
        share = torch.where(count > 0, 1 / count.clamp(min=1e-300), 0.0)  # nothing counts: no gradients
        multiply(share * self._expected)
        mean: torch.Tensor = total * share
        return mean

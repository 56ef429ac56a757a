"""The class of hosted optimizers, as a script sees it: what they have beside a DistributedOptimizer. And which stepper
one gets.

The training thread calls.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from byteps_py.errors import UsageError
from byteps_py.system.log import logger
from byteps_py.tensor_codec import CHANGES, Codec
from byteps_py.tensors import NonFinite
from byteps_py.torch.collectives import context as contexts, nonfinite
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.group_history import history_of
from byteps_py.torch.collectives.parameter_owners import find_part
from byteps_py.torch.compression import Compression, CompressionChoice, compression_of
from byteps_py.torch.gradients.backward_passes import ReducedPasses
from byteps_py.torch.gradients.bucket import GradientOptions
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.gradients.hosted.agreement import members
from byteps_py.torch.gradients.hosted.delivery import ToOwner, claim
from byteps_py.torch.gradients.hosted.in_place import InPlaceTiming
from byteps_py.torch.gradients.hosted.replication import ShadowedSteps, check_machines
from byteps_py.torch.gradients.hosted.rules import HostedGroups, check_class
from byteps_py.torch.gradients.hosted.states import BucketStates
from byteps_py.torch.gradients.hosted.states_mode import AllHere, ModeChoice, StatesMode, WholeModel, choose
from byteps_py.torch.gradients.hosted.stepper import HostedStepper, NextStep, StepTiming
from byteps_py.torch.gradients.hosted.steps import SumSteps
from byteps_py.torch.gradients.hosted.timings import BackwardSteps, DelayedTiming, InBackwardTiming
from byteps_py.torch.gradients.hosted.whole_steps import WholeStepTiming
from byteps_py.torch.gradients.optimizer_mixin import DistributedOptimizerMixin
from byteps_py.torch.gradients.stepper import Names, WrappedOptimizer
from byteps_py.torch.operations.handles import kind_in_group
from byteps_py.torch.operations.reductions import Average, ReduceOp, Sum
from byteps_py.torch.optim import LAMB


def check_hosted(optimizer: torch.optim.Optimizer, op: ReduceOp, factor: float, has_groups: bool) -> None:
    """Raises UsageError for what ``hosted=True`` does not go together with. ``has_groups``: gradients that travel
    together are given."""
    check_class(optimizer)
    if op not in (Average, Sum):
        raise UsageError(f"hosted=True: a step takes the average or the sum of gradients, and op is {op.name.title()}")
    for is_given, what in (
        (factor != 1.0, "gradient_predivide_factor"),
        (has_groups, "num_groups or groups"),
    ):
        if is_given:
            raise UsageError(f"hosted=True does not go together with {what}")


def check_hosted_compression(
    compression: CompressionChoice,
    named: Sequence[tuple[str, torch.nn.Parameter]],
    mode: StatesMode | None,
    is_shadowed: bool,
) -> None:
    """Raises UsageError for what services can't step with."""
    chosen = [compression.of(name, param) for name, param in named]
    low_rank = next((each.low_rank for each in chosen if each.low_rank is not None), None)
    if low_rank is not None:
        raise UsageError(
            f"compression {low_rank} is not for hosted optimizers (hosted=, shadow=True, BYTEPS_SHADOW=1), whose "
            "services step with sums as they are: use hosted=False, or Compression.fp16 or bf16"
        )
    codecs = [each.codec for each in chosen if each.codec is not None]
    if not codecs:
        return
    kept = next((each for each in codecs if each.has_states), None)
    if is_shadowed and kept is not None:
        raise UsageError(
            f"compression {kept} is not for shadow=True and BYTEPS_SHADOW=1: what a machine has not sent yet has no "
            "copy on other machines, and a job that goes on from the copies would lack it. Leave the shadow out, or "
            "use a codec without error feedback and momentum, such as int8"
        )
    codec = next((each for each in codecs if each.needs_answers), codecs[0])
    if codec.needs_answers and mode is not StatesMode.MACHINE:
        raise UsageError(
            f"compression {codec} with a hosted optimizer needs hosted='machine': in other modes a sum goes to its "
            "owner only, and each machine needs it to know what is left to send. Use that, hosted=False, or another "
            "compression, such as int8"
        )
    if compression.warmup_steps:
        raise UsageError(
            f"compression {codec} with a warm-up is not for hosted optimizers, whose gradients are declared once: "
            "leave one of the two out"
        )


def parameter_codec(
    choice: Any, hosted: object, others: Mapping[str, bool], params: Mapping[str, torch.nn.Parameter]
) -> Codec | None:
    """The meaning of the argument ``parameter_compression``: the codec, or None. ``others``: what else is asked for,
    and does not go together with it. ``params``: by name. Raises UsageError."""
    chosen = compression_of(choice)
    if chosen is Compression.none:
        return None
    codec = chosen.codec
    if codec != CHANGES:
        raise UsageError(
            f"parameter_compression: what a step changes travels as int8, not as {codec or chosen.__name__}: give "
            "bps.Compression.int8. For 16 bits, let the model have parameters of bfloat16"
        )
    if hosted not in ("sharded", True):
        why = "with hosted='machine' no parameters travel" if hosted == "machine" else "it is for hosted='sharded'"
        raise UsageError(f"parameter_compression: {why}: give hosted='sharded', or leave it out")
    if wrong := [name for name, is_given in others.items() if is_given]:
        raise UsageError(
            f"parameter_compression does not go together with {', '.join(wrong)}, where ranks must have the masters: "
            "leave one of the two out"
        )
    for name, param in params.items():
        if param.dtype is not torch.float32:
            kind = str(param.dtype).removeprefix("torch.")
            raise UsageError(f"parameter_compression is for float32 parameters, and {name!r} is {kind}: leave it out")
    return codec


@dataclass(frozen=True, slots=True)
class HostedOptions:
    """The time at which services make the steps of a hosted optimizer, if other machines make them, too, and where
    its states are (``mode``; None: as states_mode.py chooses). See DistributedOptimizer.

    ``whole``: the model of which the ranks have parts. ``takes_all_at_once``: gradients are final in step() only.
    ``parameters``: the codec of what parameters change by."""

    delayed_update_after: int | None = None
    step_in_backward: bool = False
    shadow: bool = False
    mode: StatesMode | None = None
    whole: WholeModel = field(default_factory=AllHere)
    takes_all_at_once: bool = False
    parameters: Codec | None = None

    def check(
        self, optimizer: torch.optim.Optimizer, hosted: bool, nonfinite: NonFinite, is_subset: bool = False
    ) -> None:
        """Raises UsageError for what contradicts ``hosted``, the optimizer, BYTEPS_NONFINITE or one another.
        ``is_subset``: not all ranks share the optimizer."""
        after = self.delayed_update_after
        if self.shadow and is_subset and isinstance(self.whole, AllHere):
            raise UsageError(
                "shadow=True does not go together with process_set: a restarted job goes on from a step that all ranks "
                "make together, as those of one model do (parallelize_model with ParallelOptions(shadow=True)). Leave "
                "shadow out, and save checkpoints"
            )
        if after is not None:
            if self.shadow:
                raise UsageError(
                    "delayed_update_after does not go together with shadow=True: a restarted job would need the "
                    "parameters of two steps"
                )
            if not hosted:
                raise UsageError("delayed_update_after needs hosted=True: a step on the ranks is made at once")
            if isinstance(after, bool) or not isinstance(after, int) or after < 0:
                raise UsageError(
                    f"delayed_update_after is {after!r}: give the number of steps before it, from 0 up, or None"
                )
        if not self.step_in_backward:
            return
        if not hosted:
            raise UsageError("step_in_backward needs hosted=True: an optimizer on the ranks steps in step()")
        if after is not None:
            raise UsageError(
                "step_in_backward does not go together with delayed_update_after, which makes steps under the next "
                "passes: give one of them"
            )
        if isinstance(optimizer, LAMB):
            raise UsageError(
                "step_in_backward: a step of LAMB needs norms of whole parameters, so all sums first: leave "
                "step_in_backward out"
            )
        if nonfinite is not NonFinite.ALLOW:
            raise UsageError(
                f"step_in_backward does not go together with BYTEPS_NONFINITE={nonfinite.name.lower()}: parameters "
                "step before it is known whether all gradients are finite. Set it to allow, or leave step_in_backward "
                "out"
            )


class HostedOptimizerMixin(DistributedOptimizerMixin):
    """The base class that DistributedOptimizer puts before the wrapped optimizer's class with ``hosted=True``."""

    _stepper: HostedStepper
    #: A GradScaler sets ``grad_scale`` for step(), and calls it for gradients that are infinite, too.
    _step_supports_amp_scaling = True

    def flush(self) -> None:
        """Finish the step that ``delayed_update_after`` has delayed, if there is one: parameters are the newest after
        it. All ranks call it, or none. ``state_dict`` and ``bps.shutdown`` call it. Raises the errors of the step."""
        self._stepper.finish()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients of the next step. Call it on all ranks after backward() and before step().

        Returns the norm of the averages of all gradients, float64, before they are clipped. Gradients on the ranks stay
        as they are. Of a step that is delayed (``delayed_update_after``), the norm is that of the latest step whose
        norm is known, NaN if there is none. Raises as step() does, and UsageError with
        ``step_in_backward``.

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
        self._check("clip_grad_norm_")
        names = self._stepper.wrapped.names
        if isinstance(self._stepper.steps.whole, AllHere):
            _check_norms(
                ((names[param], param) for param in self._stepper.groups.params),
                "the norm for clipping is that of all parameters",
                "bps.parallel.parallelize_model with ParallelOptions(hosted=…) clips by the norm of the whole model",
            )
        return self._stepper.clip(max_norm)

    @property
    def shadow_extra(self) -> Any:
        """With ``shadow=True``: the object that travels with each step from now on, and comes back with
        ``bps.restore``: random states, the position of the data loader, a scheduler's state. Any object that can be
        pickled, small, each rank's own; step() pickles it as it is then. None for nothing.

        Raises UsageError without ``shadow=True``, with a RunState, which attaches its ``extra``, and for what can't be
        pickled or is too large.
        """
        return self._shadowed_steps.extra

    @shadow_extra.setter
    def shadow_extra(self, value: Any) -> None:
        steps = self._shadowed_steps
        if steps.loop is not None:
            raise UsageError("a RunState attaches to this optimizer's steps: give it the object in extra={…}")
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
        shadow = self._stepper.shadow
        if shadow is None:
            raise UsageError("shadow_extra belongs to DistributedOptimizer(…, shadow=True)")
        return shadow

    def state_dict(self) -> dict[str, Any]:
        """See torch.optim.Optimizer: of the form that the optimizer has without ``hosted``, whole on every rank. A
        parameter of 16 bits has "master_param" beside torch's states. All ranks call it together, because it gathers,
        unless there was no step since the beginning or since ``load_state_dict``. Finishes a delayed step. With
        ``step_in_backward``, raises GradientOrderError between backward() and step()."""
        packed = super().state_dict()
        packed["state"] = self._stepper.states.saved()
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See torch.optim.Optimizer. Takes the state_dict of a hosted optimizer or of one that is not, the same on all
        ranks. Discards gradients that were computed since the last step."""
        super().load_state_dict({**state_dict, "state": {}})
        saved = [place for group in state_dict["param_groups"] for place in group["params"]]
        given = state_dict["state"]
        self._stepper.load(
            {
                param: copy.deepcopy(given[place])
                for place, param in zip(saved, self._stepper.wrapped.params, strict=True)
                if place in given
            }
        )

    def _check_one_has_all(self) -> None:
        if self._stepper.states.are_spread:
            raise UsageError(
                "a hosted optimizer's states lie with all ranks, each a part, so that no rank can send them, and all "
                "have the same already. Call broadcast_optimizer_state() before the first step, or after the root's "
                "load_state_dict()"
            )

    def _is_lost(self) -> bool:
        return self._stepper.states.are_lost


def _chosen(context: Context, groups: HostedGroups, group: tuple[int, ...], is_shadowed: bool) -> ModeChoice:
    if (wanted := context.settings.hosted_states) != "auto":
        return ModeChoice(StatesMode(wanted), "BYTEPS_HOSTED_STATES says so")
    choice = choose(context.session, groups.states_bytes, context.settings.elastic, group, is_shadowed)
    if context.session.rank == members(context, group)[0]:
        logger.info("hosted=True takes hosted=%r: %s", choice.mode.value, choice.reason)
    return choice


def _check_norms(named: Iterable[tuple[str, torch.nn.Parameter]], why: str, remedy: str) -> None:
    """Raises UsageError if a parameter is a part of a larger one."""
    if (part := find_part(named)) is not None:
        name, ranks = part
        raise UsageError(
            f"hosted=True: {why}, and tensor.parallelize has cut {name!r}, of which ranks {ranks} have parts. {remedy}"
        )


def host(
    context: Context,
    optimizer: torch.optim.Optimizer,
    names: Names,
    passes: int,
    options: GradientOptions,
    hosting: HostedOptions,
) -> HostedOptimizerMixin:
    """The optimizer for services that make the steps of ``optimizer``, whose states they take over. Its ranks are those
    of ``options.group``, which all call it."""
    groups = HostedGroups(optimizer)
    named = [(name, param) for param, name in names.items() if param in groups.group_of]
    if isinstance(optimizer, LAMB):
        _check_norms(named, "a step of LAMB takes norms of whole parameters", "Take another optimizer")
    claim(named, groups)
    if options.members(context.session.size) == 1:  # nothing is sent, so nothing is rounded for it
        options = replace(options, compression=Compression.none)
    choice = ModeChoice(hosting.mode) if hosting.mode else _chosen(context, groups, options.group, hosting.shadow)
    delivery = ToOwner(context, groups.group_of, hosting.shadow, choice)
    reducer = GradientReducer(context, named, options, delivery=delivery)
    reducer.is_early = not hosting.takes_all_at_once
    wrapped = WrappedOptimizer(optimizer, names, ReducedPasses(reducer, passes))

    def take_new(new: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        claim(new, groups)
        groups.add()

    wrapped.on_new = take_new
    name = context.claim(f"{options.prefix}hosted.{min(names.values(), default='')}")
    shadow = None
    if hosting.shadow:
        whole_name = context.claim("hosted.parts of a model") if options.group else name
        shadow = ShadowedSteps(whole_name, options.group)
    states = BucketStates(context, groups, reducer.buckets, shadow, hosting.parameters)
    upcoming, timing = NextStep(name, options.group, shadow), StepTiming()
    if hosting.delayed_update_after is not None:
        timing = DelayedTiming(context, reducer, delivery, hosting.delayed_update_after)
    elif hosting.step_in_backward:
        timing = InBackwardTiming(context, reducer, BackwardSteps(context, delivery, states, upcoming))
    if context.settings.max_restarts and shadow is not None:
        timing = _in_place(context, timing, reducer, shadow, hosting)
    wrapped.hook()
    own: dict[Any, Mapping[str, Any]] = optimizer.state
    if taken := {param: copy.deepcopy(dict(state)) for param, state in own.items() if state}:
        states.load(taken)
    own.clear()
    steps = SumSteps(context, delivery, states, hosting.whole)
    return HostedOptimizerMixin.wrap(optimizer, HostedStepper(wrapped, reducer, steps, upcoming, timing))


def _in_place(
    context: Context, timing: StepTiming, reducer: GradientReducer, shadow: ShadowedSteps, hosting: HostedOptions
) -> StepTiming:
    """The timing of steps that outlast the loss of ranks. Otherwise all ranks are started again."""
    history = history_of(context)
    if dist.is_initialized() and history is None:
        if context.session.rank == 0:
            logger.warning(
                "after the loss of a rank all ranks are started again (--max-restarts): init_process_group() has "
                "another init_method than env://"
            )
        return timing
    if history is not None and not isinstance(hosting.whole, AllHere):
        return WholeStepTiming(reducer, shadow, history)
    return InPlaceTiming(timing, reducer, shadow, history)


def host_copies(
    optimizer: torch.optim.Optimizer,
    names: Names,
    ranks: Sequence[int],
    passes: int,
    hosting: HostedOptions,
    compression: CompressionChoice,
) -> HostedOptimizerMixin:
    """The optimizer for a model in parts, of whose parts here the global ``ranks`` have copies. Only these call it.
    Raises UsageError, and NotInitializedError before init()."""
    if isinstance(optimizer, DistributedOptimizerMixin):
        raise UsageError("the optimizer is a DistributedOptimizer already: give torch's")
    context = contexts.current()
    group = () if len(ranks) == context.session.size else tuple(sorted(ranks))
    hosting.check(optimizer, True, nonfinite.mode_of(context), bool(group))
    check_hosted(optimizer, Average, 1.0, has_groups=False)
    if hosting.shadow:
        check_machines(context)
    options = GradientOptions(compression, Average, group=group, prefix=f"{kind_in_group(group, 'Gradient')}.")
    return host(context, optimizer, names, passes, options, hosting)

"""``shard``: from a model and its optimizer to states, gradients and parameters that each have one owner."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from byteps_py.errors import MismatchError, UsageError
from byteps_py.parallel.gradient_scaling import decide_together
from byteps_py.parallel.mesh import Mesh
from byteps_py.parallel.sharding.gathering import SegmentGathering
from byteps_py.parallel.sharding.gradient_owners import GradientGroups, GradientOwners, MergeRules
from byteps_py.parallel.sharding.offload import OffloadedStates, SideStream
from byteps_py.parallel.sharding.segments import NamedParameter, SegmentMemory
from byteps_py.parallel.sharding.sharded_optimizer import ShardedOptimizer, ShardedParts, note_sharded, sharded_with
from byteps_py.parallel.sharding.strategy import Strategy, assign_owners
from byteps_py.torch.collectives import parameter_owners

#: Modules whose forward pass reads parameters of their submodules without calling these.
READ_SUBMODULES: tuple[type[nn.Module], ...] = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """The options of ``shard`` beside Paddle's strategy. Raises UsageError for a value that makes no sense."""

    #: The ranks; default: ``Mesh(tp=mp_degree, sharding=…, pp=…, dp=…, order="paddle")``.
    mesh: Mesh | None = None
    #: True: a segment is freed after its forward pass, and broadcast again for its backward pass. False: it stays until
    #: its backward pass is done. Same meaning as FSDP2's argument of this name.
    reshard_after_forward: bool = True
    #: The place where gradient merge accumulates. "owner": every backward pass reduces; gradients take Ψ/N elements of
    #: memory. "rank": the last backward pass of a step reduces; gradients take Ψ elements, and 1/k of the traffic.
    accumulate: Literal["owner", "rank"] = "owner"
    #: More classes of modules whose forward pass reads parameters of their submodules without calling these.
    whole_modules: tuple[type[nn.Module], ...] = ()
    #: Compare before each step whether some gradient is infinite or NaN, and let all ranks know (for a GradScaler).
    agrees_on_nonfinite: bool = True
    #: The communication buffer for gradients.
    fused_buffer_bytes: int = 16 << 20
    #: For offloaded states; default: a CUDA stream for CUDA parameters, none for others.
    side_stream: SideStream | None = None

    def __post_init__(self) -> None:
        if self.accumulate not in ("owner", "rank"):
            raise UsageError(f"accumulate={self.accumulate!r}: use 'owner' or 'rank'")
        if self.fused_buffer_bytes < 1024:
            raise UsageError(f"fused_buffer_bytes={self.fused_buffer_bytes}: use at least 1024")


def shard(
    model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy, options: ShardOptions | None = None
) -> ShardedOptimizer:
    """Give each parameter of ``model`` one owner among the ranks of its sharding group, which alone keeps its value,
    gradient and optimizer state. Returns the optimizer to use from now on; ``model`` is changed in place.

    As with Paddle's ``fleet.distributed_optimizer(optimizer, strategy)``, the optimizer is made first, as in a program
    for one rank. All ranks call this, after ``init_process_group``, with equal models; a rank's values count for the
    parameters that it owns (in the first copy of the model).

    Args:
        model: its parameters are dense and whole on this rank: not cut by FSDP2 or as DTensors. Layers of
            ``tensor.parallelize`` are fine, with ``mp_degree``.
        optimizer: of parameters of ``model``, and of any class whose ``step`` skips parameters without a gradient, as
            torch's do. One that needs whole parameters (LAMB, Adafactor, Muon) is right, too. It must have no states.
        strategy: degrees must multiply to the number of ranks.
        options: see ShardOptions.

    Raises UsageError on all ranks if the strategy does not fit, and on the rank concerned for a parameter that another
    sharded optimizer has or that can't be sharded; MismatchError if models or strategies differ.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = nn.Linear(4, 2)
    >>> optimizer = shard(model, torch.optim.AdamW(model.parameters(), lr=0.1), Strategy(sharding_degree=1))
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> float(optimizer.clip_grad_norm_(1.0)) > 1.0
    True
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    >>> dist.destroy_process_group()
    """
    chosen = options or ShardOptions()
    if not dist.is_initialized():
        raise UsageError(
            "sharding needs process groups: call torch.distributed.init_process_group() before; start one "
            "process alone with bpslaunch -np 1"
        )
    strategy.check_world_size(dist.get_world_size())
    mesh = chosen.mesh or Mesh(
        tp=strategy.mp_degree,
        sharding=strategy.sharding_degree,
        pp=strategy.pp_degree,
        dp=strategy.dp_degree,
        order="paddle",
    )
    _check_mesh(mesh, strategy)
    named = dict(model.named_parameters())
    _check_parameters(named, optimizer)
    _check_agreement(named, strategy, mesh)
    ranks, own = mesh.ranks("sharding"), mesh.rank("sharding")
    groups = _groups(mesh, ranks)
    broadcasts = mesh.group("sharding") if len(ranks) > 1 else None
    names = list(named)
    owners = assign_owners([one.numel() for one in named.values()], len(ranks))
    cuts = strategy.segments(names, [one.nbytes for one in named.values()])
    members = [NamedParameter(name, named[name], owner) for name, owner in zip(names, owners, strict=True)]
    for buffer in model.buffers():
        if groups.data is not None:
            dist.broadcast(buffer, mesh.ranks("dp", "sharding")[0], group=groups.data)
    memory = SegmentMemory([members[start:stop] for start, stop in cuts], own, ranks, broadcasts)
    if groups.copies is not None:
        for piece in (piece for segment in memory.segments for piece in segment.pieces):
            if piece.flat is not None and piece.numel:
                dist.broadcast(piece.flat, mesh.ranks("dp")[0], group=groups.copies)
    gathering = SegmentGathering(memory, chosen.reshard_after_forward)
    rules = MergeRules(
        strategy.gradient_merge_acc_step,
        strategy.pp_allreduce_in_optimize,
        chosen.accumulate == "rank",
        chosen.agrees_on_nonfinite,
    )
    gradients = GradientOwners(memory.segments, groups, rules, chosen.fused_buffer_bytes)
    offloaded = None
    if strategy.optimize_offload:
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        steps = [
            [one for one in each.members if one.owner == own and id(one.parameter) in held] for each in memory.segments
        ]
        device = members[0].parameter.device
        offloaded = OffloadedStates(optimizer, [each for each in steps if each], device, chosen.side_stream)
    pipeline = [mesh.group("pp")] if mesh.pp > 1 else []
    parts = ShardedParts(model, members, gathering, gradients, ranks, broadcasts, pipeline, offloaded)
    sharded = ShardedOptimizer(optimizer, parts)
    gathering.attach(model, (*READ_SUBMODULES, *chosen.whole_modules))
    model.register_state_dict_pre_hook(lambda *_: gathering.hold())
    model.register_state_dict_post_hook(lambda *_: gathering.release())
    model.register_load_state_dict_pre_hook(lambda *_: gathering.hold())
    model.register_load_state_dict_post_hook(lambda *_: gathering.release())
    note_sharded(named.values(), type(optimizer).__name__)
    parameter_owners.announce_averaging(gathering, "sharding.shard", named.values())
    decide_together(named.values(), [groups.data, *pipeline])
    # Names that DistributedDataParallel is to ignore. It reads them before all else.
    model._ddp_params_and_buffers_to_ignore = _NotForDDP()  # type: ignore[assignment]
    return sharded


class _NotForDDP:
    def __iter__(self) -> Iterator[str]:
        raise UsageError(
            "sharding.shard averages the gradients of this model already, and each rank holds only its own parameters: "
            "train it as it is, without DistributedDataParallel"
        )


def _check_mesh(mesh: Mesh, strategy: Strategy) -> None:
    sizes = {
        "sharding_degree": (strategy.sharding_degree, mesh.sharding),
        "dp_degree": (strategy.dp_degree, mesh.dp),
        "mp_degree": (strategy.mp_degree, mesh.tp),
        "pp_degree": (strategy.pp_degree, mesh.pp),
    }
    for name, (wanted, there) in sizes.items():
        if wanted != there:
            raise UsageError(f"{name}={wanted}, but the mesh has {there}: {mesh!r}")
    if mesh.cp > 1 or "sharding" not in mesh.layout.order:
        raise UsageError(f"{mesh!r}: sharding wants a mesh with order='paddle' and cp=1")


def _check_parameters(named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    if not named:
        raise UsageError("the model has no parameters to shard")
    for name, parameter in named.items():
        if isinstance(parameter, DTensor):
            raise UsageError(f"{name} is a DTensor: give shard() a model that FSDP2 and DTensors have not changed")
        if parameter.is_sparse or parameter.device.type == "meta" or isinstance(parameter, nn.UninitializedParameter):
            raise UsageError(f"{name} is sparse or has no values yet (meta device, lazy module): shard() needs values")
        if parameter.grad is not None:
            raise UsageError(f"{name} has a gradient: call shard() before the first backward pass")
        if (other := sharded_with(parameter)) is not None:
            raise UsageError(f"{name} is already sharded, with {other}: a parameter has one optimizer")
    parameter_owners.check_unowned(named.items(), "sharding.shard")
    known = {id(one) for one in named.values()}
    for group in optimizer.param_groups:
        for one in group["params"]:
            if id(one) not in known:
                raise UsageError(
                    f"the optimizer has a parameter of shape {tuple(one.shape)} that the model does not have: make it "
                    "of model.parameters()"
                )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("LBFGS needs all gradients on one rank, and a closure: it can't be sharded")
    if isinstance(optimizer, ShardedOptimizer):
        raise UsageError("this optimizer is sharded already")
    if any(not _is_fresh(state) for state in optimizer.state.values()):
        raise UsageError("the optimizer has states already: shard() it first, then load_state_dict()")


def _is_fresh(state: Mapping[str, Any]) -> bool:
    """True if the states are as the optimizer's constructor makes them, before the first step: Adagrad's makes some."""
    return not state or ("step" in state and float(state["step"]) == 0)


def _check_agreement(named: dict[str, nn.Parameter], strategy: Strategy, mesh: Mesh) -> None:
    """Raise MismatchError on all ranks of this rank's copies if models or strategies differ."""
    ranks = mesh.ranks("dp", "sharding")
    if len(ranks) == 1:
        return
    described = [(name, tuple(one.shape), str(one.dtype), one.requires_grad) for name, one in named.items()]
    digests = [hashlib.sha256(repr(each).encode()).digest()[:7] for each in (described, strategy)]
    device = next(iter(named.values())).device
    mine = torch.tensor([int.from_bytes(each, "big") for each in digests], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _ in ranks]
    dist.all_gather(gathered, mine, group=mesh.group("dp", "sharding"))
    told = [each.tolist() for each in gathered]
    for what, place in (("models (names, shapes, dtypes or frozen parameters)", 0), ("strategies", 1)):
        for rank, each in zip(ranks, told, strict=True):
            if each[place] != told[0][place]:
                raise MismatchError(
                    f"ranks {ranks[0]} and {rank} give shard() different {what}: give all ranks the same"
                )


def _groups(mesh: Mesh, ranks: Sequence[int]) -> GradientGroups:
    """Gradients have a sharding group of their own: broadcasts and reductions come in any order to each other."""
    reductions: dist.ProcessGroup | None = None
    world = dist.get_world_size()
    for each in sorted({mesh.layout.ranks(rank, ("sharding",)) for rank in range(world)}):
        if len(each) > 1:
            made = dist.new_group(list(each), group_desc="mesh_sharding")
            if each == tuple(ranks):
                reductions = made
    copies = mesh.group("dp") if mesh.dp > 1 else None
    data = mesh.group("dp", "sharding") if mesh.dp * mesh.sharding > 1 else None
    return GradientGroups(reductions, copies, data, ranks, mesh.dp * mesh.sharding)

"""DTensor and what is built on it: tensor, sequence and loss parallelism, meshes, checkpoints, functional collectives.

Against the same in one process; all values are such that sums are exact.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from backend.common import feature, rank, same, size, values
from backend.training import STEPS, Model, inputs, loss_of, reference, sgd


def _mesh(*shape: int, names: tuple[str, ...] = ("all",)) -> DeviceMesh:
    return init_device_mesh(torch.get_default_device().type, shape or (size(),), mesh_dim_names=names)


@feature
def dtensor_placements() -> None:
    mesh = _mesh()
    whole = values(1, 4 * size(), 6)
    for before, after in itertools.product((Shard(0), Shard(1), Replicate()), repeat=2):
        tensor = distribute_tensor(whole, mesh, [before])
        same(tensor.full_tensor(), whole)
        same(tensor.redistribute(placements=[after]).full_tensor(), whole)
    partial = DTensor.from_local(values(rank(), 2 * size(), 3), mesh, [Partial()])
    total = torch.stack([values(r, 2 * size(), 3) for r in range(size())]).sum(0)
    same(partial.full_tensor(), total)
    same(partial.redistribute(placements=[Shard(0)]).to_local(), total.chunk(size())[rank()])
    same(
        (distribute_tensor(whole, mesh, [Shard(0)]) @ distribute_tensor(whole.t(), mesh, [Shard(1)])).full_tensor(),
        whole @ whole.t(),
    )
    uneven = values(2, 2 * size() + 1, 3)
    same(distribute_tensor(uneven, mesh, [Shard(0)]).full_tensor(), uneven)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_(values(number, *param.shape) / 32 - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    found = []
    for param in model.parameters():
        assert param.grad is not None
        grad = param.grad
        found.append(grad.full_tensor() if isinstance(grad, DTensor) else grad)
    return found


def _close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)  # the norm is not exact


@feature
def tensor_parallel() -> None:
    x = values(5, 4, 8) / 8
    expected = Block()
    expected(x).sum().backward()
    model = parallelize_module(Block(), _mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    out = model(x)
    _close([out], [expected(x)])
    out.sum().backward()
    _close(_gradients(model), _gradients(expected))


@feature
def sequence_parallel() -> None:
    x = values(5, 2, 4 * size(), 8) / 8
    expected = Block()
    expected(x).sum().backward()
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    mesh = _mesh()
    model = parallelize_module(Block(), mesh, plan)
    model = parallelize_module(
        model, mesh, PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),))
    )
    out = model(x.chunk(size(), 1)[rank()])
    _close([DTensor.from_local(out, mesh, [Shard(1)]).full_tensor()], [expected(x)])
    DTensor.from_local(out, mesh, [Shard(1)]).sum().full_tensor().backward()
    _close(_gradients(model), _gradients(expected))


@feature
def loss_parallel_cross_entropy() -> None:
    mesh = _mesh()
    logits, targets = values(3, 6, 4 * size()) / 4, torch.arange(6) % (4 * size())
    plain = logits.clone().requires_grad_()
    expected = nn.functional.cross_entropy(plain, targets)
    expected.backward()
    sharded = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = nn.functional.cross_entropy(sharded, distribute_tensor(targets, mesh, [Replicate()]))
        loss.backward()
    _close([loss.full_tensor(), sharded.grad.full_tensor()], [expected.detach(), plain.grad])  # type: ignore[union-attr, list-item]


@feature
def two_dimensions() -> None:
    if size() < 4:
        return
    mesh = _mesh(2, size() // 2, names=("data", "tensor"))
    model, expected = Block(), Block()
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    replica = mesh["data"].get_local_rank()
    model(values(5 + replica, 4, 8) / 8).sum().backward()
    for r in range(2):
        (expected(values(5 + r, 4, 8) / 8).sum() / 2).backward()
    _close(_gradients(model), _gradients(expected))
    flat = mesh["data", "tensor"]._flatten("both")
    tensor = torch.full((2,), float(rank()))
    dist.all_reduce(tensor, group=flat.get_group())
    same(tensor, torch.full((2,), float(sum(range(size())))))


@feature
def three_dimensions() -> None:
    if size() < 4:
        return
    mesh = _mesh(2, size() // 2, 1, names=("pipe", "data", "tensor"))
    for name in ("pipe", "data", "tensor"):
        group = mesh[name].get_group()
        tensor = torch.full((2,), float(rank()))
        dist.all_reduce(tensor, group=group)
        same(tensor, torch.full((2,), float(sum(dist.get_process_group_ranks(group)))))
        whole = torch.empty(2 * dist.get_world_size(group))
        dist.all_gather_into_tensor(whole, torch.full((2,), float(rank())), group=group)
        same(whole, torch.tensor(dist.get_process_group_ranks(group), dtype=torch.float32).repeat_interleave(2))


def _folder() -> Path:
    """The same one on all ranks."""
    said = [tempfile.mkdtemp(prefix="byteps-test-") if rank() == 0 else None]
    dist.broadcast_object_list(said, 0)
    return Path(str(said[0]))


@feature
def checkpoints() -> None:
    folder = _folder()
    model = fully_shard(Model())
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, rank()).backward()
        optimizer.step()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    other = fully_shard(Model())
    loaded = {"model": get_model_state_dict(other)}
    dcp.load(loaded, checkpoint_id=folder)
    set_model_state_dict(other, loaded["model"])
    same([param.full_tensor() for param in other.parameters()], [*reference().parameters()])
    whole = Model()  # from sharded to not sharded
    plain = {"model": whole.state_dict()}
    dcp.load(plain, checkpoint_id=folder)
    whole.load_state_dict(plain["model"])
    same([*whole.parameters()], [*reference().parameters()])
    if size() >= 4:  # to another sharding
        mesh = _mesh(2, size() // 2, names=("replicate", "shard"))
        again = fully_shard(Model(), mesh=mesh)
        resharded = {"model": get_model_state_dict(again)}
        dcp.load(resharded, checkpoint_id=folder)
        set_model_state_dict(again, resharded["model"])
        same([param.full_tensor() for param in again.parameters()], [*reference().parameters()])
    dist.barrier()
    if rank() == 0:
        shutil.rmtree(folder)


@feature
def functional_collectives() -> None:
    world = dist.group.WORLD
    assert world is not None
    parts = [values(r, 2 * size(), 3) for r in range(size())]
    total = torch.stack(parts).sum(0)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        reduced = functional.all_reduce(x, "sum", world)
        mean = functional.all_reduce(x, "avg", world)
        gathered = functional.all_gather_tensor(x, 0, world)
        scattered = functional.reduce_scatter_tensor(x, "sum", 0, world)
        exchanged = functional.all_to_all_single(x, None, None, world)
        (coalesced,) = functional.all_reduce_coalesced([x * 2], "sum", world)
        one, two = functional.all_gather_into_tensor_coalesced([x, x + 1], world)
        (piece,) = functional.reduce_scatter_tensor_coalesced([x], "sum", [0], world)
        from_first = functional.broadcast(x, 0, world)
        return reduced, mean, gathered, scattered, exchanged, coalesced, one + 1, two, piece, from_first

    own = total.chunk(size())[rank()]
    swapped = torch.cat([part.chunk(size())[rank()] for part in parts])
    everything = torch.cat(parts)
    expected = [
        total, total / size(), everything, own, swapped, total * 2, everything + 1, everything + 1, own, parts[0],
    ]  # fmt: skip
    for run in (step, torch.compile(step, backend="eager"), torch.compile(step, backend="aot_eager", fullgraph=True)):
        same([tensor + 0 for tensor in run(parts[rank()])], expected)


@feature
def compiled_ddp() -> None:
    model = nn.parallel.DistributedDataParallel(Model())
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        (compiled(inputs(step, rank())).sum() / 8).backward()
        optimizer.step()
    same([*model.module.parameters()], [*reference().parameters()])

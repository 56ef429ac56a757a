"""The mesh of this job's ranks: a process group for each dimension, made in the same order on all ranks.

It stands on torch.distributed alone, so it works on the backend "byteps" as well as on gloo or NCCL. One thread.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from byteps_py.config.settings import Settings
from byteps_py.errors import BytePSError, UsageError
from byteps_py.parallel.mesh_layout import LLAMA_ORDER, REPLICATED, MeshLayout, span_warning


class Mesh:
    """The ranks as a mesh of four dimensions: tensor ("tp"), context ("cp"), pipeline ("pp") and data ("dp").

    All ranks construct it, with the same arguments, after ``init_process_group``. With NCCL, each calls
    ``torch.cuda.set_device`` before.

    Args:
        tp, cp, pp, dp: sizes; their product is the number of ranks. One may be -1: the rest. ``dp`` is the rest if it
            is not given, or 1 if another size is the rest.
        order: the dimensions from inner to outer; ranks are counted along the innermost first. Communication gets rarer
            and easier to hide outwards, so the default is that of Llama 3 (section 5.2). "paddle" is Paddle's: its mp
            is "tp", its sep is "cp", then "sharding", "pp" and "dp".
        device_type: of the tensors that the groups exchange: "cpu" or "cuda". Default: "cuda" if there is such a device
            and the backend is not gloo.
        sharding: only for orders with this name: data-parallel ranks that share optimizer states (ZeRO). They stand
            inside the pipeline dimension, and "dp" counts copies of these groups.

    Raises UsageError on all ranks if the sizes do not fit, or differ between ranks. A tensor-parallel group that spans
    machines is a warning on rank 0.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = Mesh(tp=1)
    >>> mesh
    Mesh(tp=1, cp=1, pp=1, dp=1; rank 0: tp 0, cp 0, pp 0, dp 0)
    >>> dist.get_world_size(mesh.group("dp", "cp"))
    1
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        tp: int = 1,
        cp: int = 1,
        pp: int = 1,
        dp: int | None = None,
        *,
        order: str | Sequence[str] = LLAMA_ORDER,
        device_type: str | None = None,
        sharding: int = 1,
    ) -> None:
        if not dist.is_initialized():
            raise UsageError(
                "a mesh needs process groups: call torch.distributed.init_process_group() before; start one "
                "process alone with bpslaunch -np 1"
            )
        self._own = dist.get_rank()
        sizes: dict[str, int | None] = {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "sharding": sharding}
        try:
            layout: MeshLayout | BytePSError = MeshLayout.of(dist.get_world_size(), sizes, order)
            machine = _own_machine(self._own)
        except BytePSError as error:
            layout, machine = error, 0
        #: Pure arithmetic about the ranks: see mesh_layout.py.
        self.layout, self._machines = _agree(layout, machine)
        #: For torch: with named dimensions, the outermost first.
        self.device_mesh: DeviceMesh = init_device_mesh(
            device_type or _device_type(), self.layout.sizes[::-1], mesh_dim_names=self.layout.order[::-1]
        )
        self._flat: dict[tuple[str, ...], DeviceMesh] = {}
        #: The ranks that hold the same parameters: gradients are summed over it. Context ranks are more copies.
        self.gradient_group: dist.ProcessGroup = self.group(*(name for name in REPLICATED if name in self.layout.order))
        if (group := self.layout.spanning("tp", self._machines)) and self._own == 0:
            warnings.warn(span_warning(group, self._machines), stacklevel=2)

    # ---- sizes -----------------------------------------------------------------------------------------------

    @property
    def tp(self) -> int:
        """The number of ranks that share each layer's weights."""
        return self.layout.size("tp")

    @property
    def cp(self) -> int:
        """The number of ranks that share each sequence."""
        return self.layout.size("cp")

    @property
    def pp(self) -> int:
        """The number of workers of a pipeline."""
        return self.layout.size("pp")

    @property
    def dp(self) -> int:
        """The number of ranks with different batches; with ``sharding``, of groups of such ranks."""
        return self.layout.size("dp")

    @property
    def sharding(self) -> int:
        """The number of data-parallel ranks of a "sharding" group; 1 in an order without it."""
        return self.layout.size("sharding")

    # ---- groups ----------------------------------------------------------------------------------------------

    def group(self, *names: str) -> dist.ProcessGroup:
        """The process group of this rank along one dimension, or along several: ``group("dp", "cp")``. The first call
        with several names makes a group, so all ranks call it; that of ``gradient_group`` is there already. Raises
        UsageError."""
        return self.submesh(*names, flat=True).get_group()

    def submesh(self, *names: str, flat: bool = False) -> DeviceMesh:
        """The part of ``device_mesh`` with this rank and these dimensions, the outermost first. For FSDP2:
        ``fully_shard(model, mesh=mesh.submesh("dp", "cp", flat=True))``; without ``flat`` that is HSDP, whose copies
        are along the outer dimension. With ``flat``, all ranks call it. Raises UsageError."""
        along = self.layout.checked(names)
        if not flat:
            return self.device_mesh[along]
        along = tuple(name for name in along if self.layout.size(name) > 1) or along[-1:]
        if len(along) == 1:
            return self.device_mesh[along]
        if along not in self._flat:
            self._flat[along] = self.device_mesh[along]._flatten("_".join(along))
        return self._flat[along]

    # ---- places ----------------------------------------------------------------------------------------------

    def rank(self, *names: str) -> int:
        """The coordinate of this rank along a dimension, or its place in the group along several. Raises UsageError."""
        return self.ranks(*names).index(self._own)

    def ranks(self, *names: str) -> tuple[int, ...]:
        """The global ranks of ``group(*names)``, in its order. Raises UsageError."""
        return self.layout.ranks(self._own, names)

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """The coordinates of a global rank (default: this one), from inner to outer. Raises UsageError."""
        return self.layout.coordinates(self._own if rank is None else rank)

    def describe(self) -> str:
        """A table of all ranks, and the place of this one. A mesh with thousands of ranks is cut."""
        return f"{self.layout.picture(self._machines)}\nrank {self._own}: {_text(self.coordinates(), ' ')}"

    def __repr__(self) -> str:
        sizes = dict(zip(self.layout.order, self.layout.sizes, strict=True))
        return f"Mesh({_text(sizes, '=')}; rank {self._own}: {_text(self.coordinates(), ' ')})"


def _agree(layout: MeshLayout | BytePSError, machine: int) -> tuple[MeshLayout, list[int]]:
    """The layout, and the machine of each rank. Raises UsageError on all ranks if one has an error in place of a
    layout, or if layouts differ. All ranks call it."""
    own = [0] if isinstance(layout, BytePSError) else [1, *_numbers(layout)]
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    mine = torch.tensor([machine, *own, *[0] * (11 - len(own))], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    told = [each.tolist() for each in gathered]
    if isinstance(layout, BytePSError):
        raise layout
    for rank, (_, is_right, *numbers) in enumerate(told):
        if not is_right:
            raise UsageError(f"rank {rank} has no mesh: its own error says why. Give all ranks the same sizes")
        if numbers != told[0][2:]:
            raise UsageError(
                f"rank 0 has the mesh {_of_numbers(told[0][2:])}, rank {rank} has {_of_numbers(numbers)} (from inner "
                "to outer): give all ranks the same sizes and the same order"
            )
    return layout, [each[0] for each in told]


_NAMES = ("", "tp", "cp", "pp", "dp", "sharding")


def _numbers(layout: MeshLayout) -> list[int]:
    """Ten: of names and sizes."""
    pairs = [(_NAMES.index(name), size) for name, size in zip(layout.order, layout.sizes, strict=True)]
    return [number for pair in [*pairs, *[(0, 0)] * (5 - len(pairs))] for number in pair]


def _of_numbers(numbers: Sequence[int]) -> MeshLayout:
    pairs = [(_NAMES[name], size) for name, size in zip(numbers[::2], numbers[1::2], strict=True) if name]
    return MeshLayout(tuple(name for name, _ in pairs), tuple(size for _, size in pairs))


def _own_machine(rank: int) -> int:
    """The number of this rank's machine: as the launcher says. LOCAL_WORLD_SIZE alone, which scripts set that start
    ranks themselves, means equally many on each machine. Raises ConfigurationError."""
    settings = Settings.from_env()
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if settings.num_workers == 1 and local.isdecimal() and int(local) > 0:
        return rank // int(local)
    return settings.worker_id


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() and dist.get_backend() != "gloo" else "cpu"


def _text(values: dict[str, int], sign: str) -> str:
    return ", ".join(f"{name}{sign}{value}" for name, value in values.items())

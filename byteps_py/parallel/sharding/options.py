"""What a caller of ``shard`` may choose beside Paddle's strategy. Any thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from byteps_py.errors import UsageError
from byteps_py.parallel.mesh.device_mesh import Mesh

if TYPE_CHECKING:
    from byteps_py.parallel.sharding.side_stream import SideStream

#: Modules whose forward pass reads parameters of their submodules without calling these.
READ_SUBMODULES: tuple[type[nn.Module], ...] = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """Raises UsageError for a value that makes no sense."""

    #: The ranks; default: ``Mesh(tp=mp_degree, sharding=…, pp=…, dp=…, order="paddle")``.
    mesh: Mesh | None = None
    #: True: a segment is freed after its forward pass, and broadcast again for its backward pass. False: it stays until
    #: its backward pass is done. Same meaning as FSDP2's argument of this name.
    reshard_after_forward: bool = True
    #: Where gradient merge accumulates. "owner": every backward pass reduces; gradients take Ψ/N elements of memory.
    #: "rank": the last backward pass of a step reduces; gradients take Ψ elements, and 1/k of the traffic.
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

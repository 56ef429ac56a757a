"""Jobs whose tensors travel between machines in another form: the sums of programs have codecs."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from byteps_py.tensor_codec import SCALED_BLOCK, Codec, CodecKind
from byteps_py.tensors import DType, Op, TensorSpec

from .cluster import Cluster
from .outages import OutageCluster
from .program import Name, Program

_INT8 = Codec(CodecKind.INT8)
_PARTITION_BYTES = 2 * _INT8.item_bytes
#: Below, at and beyond the ends of blocks.
_COUNTS = (1, 40, SCALED_BLOCK - 1, SCALED_BLOCK, SCALED_BLOCK + 1, 3 * SCALED_BLOCK + 17)


@dataclass(slots=True)
class CodedName(Name):
    """Most sums of floating numbers have a codec."""

    def make_spec(self, rng: random.Random, size: int, group: tuple[int, ...] | None = None) -> TensorSpec:
        spec = Name.make_spec(self, rng, size, group)
        if spec.op is not Op.SUM or spec.scatters or spec.dtype not in (DType.FLOAT32, DType.FLOAT16):
            return spec
        return replace(spec, shape=(rng.choice(_COUNTS),), codec=_INT8 if rng.random() < 0.8 else None)


class CodedProgram(Program):
    """See the module."""

    name_class = CodedName


class CodedCluster(Cluster):
    """Whose machines are there from start to end."""

    program_class = CodedProgram
    partition_bytes = _PARTITION_BYTES


class CodedOutageCluster(OutageCluster):
    """Beside an unreliable network, and with partitions smaller than a block, so that each has one."""

    program_class = CodedProgram

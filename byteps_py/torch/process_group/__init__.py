"""The backend "byteps" of torch.distributed: ``dist.init_process_group("byteps")``.

Programs for torch.distributed then use the communication service: DistributedDataParallel, FSDP2, tensor, sequence and
pipeline parallelism, DeviceMesh, distributed checkpoints.

    byteps_process_group ┬ reduction_collectives ┬ group_base ─ ProcessGroupOptions
                         └ transfer_collectives ─┘
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Self

from torch._C._distributed_c10d import Backend

from byteps_py.errors import UsageError
from byteps_py.torch.compression import Compression, Compressor, compression_of

NAME = "byteps"


class ProcessGroupOptions(Backend.Options):
    """The argument ``pg_options`` of ``init_process_group`` and ``new_group`` for the backend "byteps", the same on all
    members.

    timeout: of operations. compression: how sums and averages of float32, float16 and bfloat16, of
    BYTEPS_MIN_COMPRESS_BYTES or more, travel between machines: one of Compression with a codec, or a dictionary of
    BytePS. Raises UsageError for error feedback, momentum and thc, and for fp16 and bf16.

    >>> ProcessGroupOptions(compression=Compression.int8).compression.__name__
    '<int8>'
    """

    def __init__(self, timeout: timedelta = timedelta(minutes=30), compression: Any = Compression.none) -> None:
        super().__init__(NAME, timeout)
        chosen = compression_of(compression)
        if chosen.codec is not None and chosen.codec.has_states:
            raise UsageError(
                f"ProcessGroupOptions: compression {chosen.codec} keeps what was not sent of a tensor, and a group's "
                "tensors have no names by which to know them: use it with a DistributedOptimizer, ddp_comm_hook or "
                "parallel.fsdp.compress_gradients, or give one without error feedback and momentum"
            )
        if chosen.codec is None and chosen is not Compressor:
            raise UsageError(
                f"ProcessGroupOptions: compression {chosen.__name__} is a dtype: give the group tensors of that dtype"
            )
        #: One without a codec, or with one that keeps nothing.
        self.compression = chosen

    def __deepcopy__(self, memo: object) -> Self:
        return type(self)(self._timeout, self.compression)

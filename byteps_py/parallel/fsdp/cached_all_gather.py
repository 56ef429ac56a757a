"""The all-gather of one FSDP module: what this machine has gathered is kept until a piece of it changes.

FSDP2 calls ``allocate``, copies this rank's piece into its part of the output, and calls the object. This rank's piece
is compared, byte by byte, with the one that is kept, so a change is noticed however it was made: by an optimizer, by
``load_state_dict``, through ``.data``.

    in a forward pass    all ranks tell each other whether their pieces have changed; only those that have travel
    in a backward pass   nothing is said and nothing travels: what the forward pass has gathered is still there

A rank overwrites what is kept only after all ranks have said something about this gather. By then they have copied what
they needed of the last one, because FSDP2 copies a gather's output before it begins the module's next gather.

The thread that runs the model calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from byteps_py.errors import UnsupportedError, UsageError
from byteps_py.parallel.collectives import ALL_GATHER
from byteps_py.parallel.fsdp.gathered_memory import CHANGED, NOTHING_KEPT, SAME, GatheredMemory, are_same_bytes


class CachedAllGather:
    """For ``FSDPModule.set_custom_all_gather``. ``name``: of the module, for messages. ``memory_of``: the memory of a
    process group."""

    def __init__(self, name: str, memory_of: Callable[[dist.ProcessGroup], GatheredMemory]) -> None:
        self._name = name
        self._memory_of = memory_of
        self._memory: GatheredMemory | None = None
        self._group: dist.ProcessGroup | None = None  # over which the module is sharded
        self._place: torch.Tensor | None = None  # what is kept; None: this layer is not
        self._is_whole = False  # all ranks have gathered all pieces, and agree on them
        self.is_closed = False

    @property
    def kept_bytes(self) -> int:
        """Bytes of this module's parameters that this machine keeps."""
        return 0 if self._place is None else self._place.nbytes

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The output. Of one that is kept only this rank's part is ever touched. Raises UnsupportedError for a device
        other than the CPU."""
        if device.type != "cpu":
            raise UnsupportedError(
                f"cache_parameters: module {self._name!r} is gathered on {device}; so far only parameters on the CPU "
                "can be kept. Leave cache_parameters out"
            )
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gather, and let ``output_tensor`` be the memory of this machine. Returns a Work only where torch's own gather
        does the work: for a layer beyond ``max_bytes``, and for the smaller groups of ``reshard_after_forward=N``.

        Raises UsageError for a parameter that has changed between its forward and its backward pass.
        """
        if self._memory is None and not self.is_closed:
            self._memory, self._group = self._memory_of(group), group
            self._place = self._memory.take(output_tensor.nbytes)
        place, memory = self._place, self._memory
        if memory is None or place is None or group is not self._group or place.nbytes != output_tensor.nbytes:
            return getattr(dist, ALL_GATHER)(output_tensor, input_tensor, group=group, async_op=async_op)
        memory.check()
        piece = input_tensor.view(torch.uint8)
        own = place.chunk(group.size())[group.rank()]
        is_same = are_same_bytes(own, piece)
        if self._is_whole and torch._C._current_graph_task_id() != -1:  # a backward pass, as in FSDP2 itself
            if not is_same:
                raise UsageError(
                    f"cache_parameters: a parameter of module {self._name!r} has changed between its forward and its "
                    "backward pass; change parameters before the forward pass, or after the backward pass"
                )
        else:
            self._update(memory, place, piece, is_same)
        # FSDP2 goes on with the object that it gave, so what it copies to the parameters next is this memory.
        whole = place.view(output_tensor.dtype)
        output_tensor.set_(whole.untyped_storage(), whole.storage_offset(), whole.shape, whole.stride())
        return None

    def _update(self, memory: GatheredMemory, place: torch.Tensor, piece: torch.Tensor, is_same: bool) -> None:
        owners = memory.agree(NOTHING_KEPT if not self._is_whole else SAME if is_same else CHANGED)
        if owners:
            self._is_whole = False  # until the exchange has succeeded
            memory.exchange(place, piece, owners)
            self._is_whole = True

    def close(self) -> None:
        """Gather as torch does from now on."""
        self._memory = self._group = self._place = None
        self._is_whole, self.is_closed = False, True

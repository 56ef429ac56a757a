"""What torch.distributed asks of a group besides collectives: names, device types, the backend behind it, options.

A group is its own backend: torch looks for one per device type and asks it what it can do.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

NAME = "byteps"

if TYPE_CHECKING:
    # Its own annotations are not those of what torch itself calls, and differ between its versions.
    class _Group:
        def __init__(self, rank: int, size: int) -> None: ...
        def rank(self) -> int: ...
        def size(self) -> int: ...
else:
    _Group = dist.ProcessGroup
_DEVICES = ("cpu", "cuda")


class Options(Backend.Options):
    """Options of a group: only the timeout of its operations, 30 minutes by default."""

    def __init__(self, timeout: timedelta = timedelta(minutes=30)) -> None:
        super().__init__(NAME, timeout)

    def __deepcopy__(self, memo: object) -> Self:
        return type(self)(self._timeout)


class _DeviceTypes(list[torch.device]):
    """Of a group that torch does not know yet. It goes through them to find a backend, and if there are any it asks C++
    for the backend, which has none: the group itself is it."""

    def __bool__(self) -> bool:
        return False


class GroupMetadata(_Group):
    """The part of a group that says who it is."""

    def __init__(self, rank: int, size: int, options: Backend.Options) -> None:
        super().__init__(rank, size)
        self._name = self._description = ""
        self._options = options
        self._bound_device: torch.device | None = None
        self._is_split = False  # from another group

    # ---- names -----------------------------------------------------------------------------------------

    def name(self) -> str:
        return NAME

    def getBackendName(self) -> str:
        return NAME

    def _get_backend_name(self) -> str:
        return NAME

    @property
    def pg_name(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    def setGroupName(self, name: str) -> None:
        self._set_group_name(name)

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._set_group_desc(desc)

    def getGroupDesc(self) -> str:
        return self._description

    # ---- the backend behind it -------------------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        found = [torch.device(name) for name in _DEVICES if name == "cpu" or torch.cuda.is_available()]
        known: Any = dist.distributed_c10d._world.pg_map
        if self in known:
            return found
        # Before torch knows the group, it would look for the backend of each: this one has none but itself.
        return _DeviceTypes(found if self._is_split else ())

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _set_default_backend(self, backend_type: Any) -> None:
        """There is no other."""

    def _register_backend(self, *args: Any, **kwargs: Any) -> None:
        """There is no other."""

    @property
    def options(self) -> Backend.Options:
        return self._options

    @property
    def bound_device_id(self) -> torch.device | None:
        return self._bound_device

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        # A DeviceMesh would try to split a group that is bound to a device.
        if self.supports_splitting:
            self._bound_device = device

    #: Before torch 2.9, split_group() makes a group in C++ whose backend can't be written in Python.
    supports_splitting = hasattr(dist.ProcessGroup, "split_group")
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Nothing to connect: it is connected from the beginning."""

    def perform_nocolor_split(self, device: torch.device | None) -> None:
        """Other members make a group: this one has no part in that."""

    def _set_sequence_number_for_group(self) -> None:
        """Names, not numbers, match operations."""

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """There are no hooks to wait for."""

    def __repr__(self) -> str:
        return f"<byteps process group {self._name!r}: rank {self.rank()} of {self.size()}>"

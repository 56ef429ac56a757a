"""The interface of a group to torch.distributed beside collectives: names, device types, the backend, options. Any
thread.

A group is its own backend: torch looks for a backend for each device type and asks for its features.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

NAME = "byteps"

if TYPE_CHECKING:
    # torch's own annotations differ from what torch calls, and between its versions.
    class _Group:
        def __init__(self, rank: int, size: int) -> None: ...
        def rank(self) -> int: ...
        def size(self) -> int: ...
else:
    _Group = dist.ProcessGroup
_DEVICES = ("cpu", "cuda")


class Options(Backend.Options):
    """Options of a group. timeout: of its operations, 30 minutes by default."""

    def __init__(self, timeout: timedelta = timedelta(minutes=30)) -> None:
        super().__init__(NAME, timeout)

    def __deepcopy__(self, memo: object) -> Self:
        return type(self)(self._timeout)


class _DeviceTypes(list[torch.device]):
    """Device types of a group that torch does not know yet. If the list is true, torch asks C++ for the backend, which
    has none because the group itself is the backend. So the list is false, but torch can iterate over it."""

    def __bool__(self) -> bool:
        return False


class GroupMetadata(_Group):
    """The part of a group that answers torch's questions about it."""

    def __init__(self, rank: int, size: int, options: Backend.Options) -> None:
        super().__init__(rank, size)
        self._name = self._description = ""
        self._options = options
        self._bound_device: torch.device | None = None
        self._is_split = False  # from another group

    # ---- names -----------------------------------------------------------------------------------------

    def name(self) -> str:
        return NAME

    getBackendName = _get_backend_name = name  # noqa: N815

    @property
    def group_name(self) -> str:
        return self._name

    pg_name = group_name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc  # noqa: N815

    # ---- the backend -----------------------------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        found = [torch.device(name) for name in _DEVICES if name == "cpu" or torch.cuda.is_available()]
        known: Any = dist.distributed_c10d._world.pg_map
        if self in known:
            return found
        # Before torch knows the group, it would look for a backend for each type. The only backend is the group itself.
        return _DeviceTypes(found if self._is_split else ())

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _set_default_backend(self, backend_type: Any) -> None:
        """Without effect: the group is its only backend."""

    def _register_backend(self, *args: Any, **kwargs: Any) -> None:
        """Without effect: the group is its only backend."""

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
        """Without effect: a group is connected from the beginning."""

    def perform_nocolor_split(self, device: torch.device | None) -> None:
        """Without effect: members that are not in a split take no part in it."""

    def _set_sequence_number_for_group(self) -> None:
        """Without effect: operations are matched by name."""

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Without effect: there are no hooks to wait for."""

    def __repr__(self) -> str:
        return f"<byteps process group {self._name!r}: rank {self.rank()} of {self.size()}>"

"""torch's store of a world that may move: see torch_rendezvous.py. Any thread."""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import Store, TCPStore


class MeetingStore(Store):
    """The store of a world whose ranks may be started again: after the loss of a rank all move to another store, as
    rank 0, which serves it, may be lost, and as counts begin anew. Groups have this one."""

    def __init__(self, store: TCPStore) -> None:
        super().__init__()
        self._present: Any = store  # torch's annotations lack some methods

    def move(self, store: TCPStore) -> None:
        """Use ``store`` from now on."""
        self._present = store

    @property
    def host(self) -> Any:
        return self._present.host

    @property
    def port(self) -> Any:
        return self._present.port

    def set(self, *given: Any) -> Any:
        return self._present.set(*given)

    def get(self, *given: Any) -> Any:
        return self._present.get(*given)

    def add(self, *given: Any) -> Any:
        return self._present.add(*given)

    def append(self, *given: Any) -> Any:
        return self._present.append(*given)

    def check(self, *given: Any) -> Any:
        return self._present.check(*given)

    def wait(self, *given: Any) -> Any:
        return self._present.wait(*given)

    def compare_set(self, *given: Any) -> Any:
        return self._present.compare_set(*given)

    def multi_get(self, *given: Any) -> Any:
        return self._present.multi_get(*given)

    def multi_set(self, *given: Any) -> Any:
        return self._present.multi_set(*given)

    def has_extended_api(self) -> bool:
        return True

    def delete_key(self, *given: Any) -> Any:
        return self._present.delete_key(*given)

    def num_keys(self) -> Any:
        return self._present.num_keys()

    def clone(self) -> Any:
        return self._present.clone()

    def set_timeout(self, *given: Any) -> Any:
        super().set_timeout(*given)
        return self._present.set_timeout(*given)

    # torch calls these from C++ by other names.
    deleteKey, getNumKeys, compareSet = delete_key, num_keys, compare_set  # noqa: N815
    multiGet, multiSet, hasExtendedApi = multi_get, multi_set, has_extended_api  # noqa: N815

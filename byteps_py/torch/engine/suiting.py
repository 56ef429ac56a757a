"""Which sums the ranks of a machine add up among themselves, by how many ranks there are, and how large sums are. All
ranks of a machine answer alike.
"""

from __future__ import annotations

import os

#: Not those of this process alone.
CORES = os.sysconf("SC_NPROCESSORS_ONLN")
#: More look at each other's words, step by step, for longer than they copy.
_MOST_MEMBERS = 32
#: Where ranks share cores, what is smaller is faster through the service, or as fast: to be heard by all others wakes
#: more of them (3 ranks on 2 cores by name, 64 and 256 KB: 398 and 623 µs instead of 313 and 418; 1 and 16 MB: 814 and
#: 5,981 instead of 845 and 9,396).
_LEAST_BYTES_ON_SHARED_CORES = 1 << 20
_MOST_PER_CORE = 2  # 8 ranks on 2 cores, 16 MB: 33 ms instead of 27


def has_cores(members: int) -> bool:
    """Whether so many ranks have a core each."""
    return 1 < members <= min(CORES, _MOST_MEMBERS)


def may_share(members: int, nbytes: int | None = None) -> bool:
    """Whether so many ranks should add up large tensors, or one of ``nbytes``, in shares."""
    if has_cores(members):
        return True
    is_large = nbytes is None or nbytes >= _LEAST_BYTES_ON_SHARED_CORES
    return is_large and 1 < members <= min(_MOST_PER_CORE * CORES, _MOST_MEMBERS)

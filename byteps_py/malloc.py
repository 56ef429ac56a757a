"""Tuning of the process's allocator. Call once, before threads start.

libzmq allocates every large message on its own. glibc would serve each from a fresh mapping and give it back
at once, so that every page of every message is faulted in anew: the faults cost as much as moving the data.
"""

from __future__ import annotations

import ctypes

# From glibc's malloc.h; they never change.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc refuses more


def use_one_heap() -> bool:
    """One heap for all threads, not one for each: what threads of a library allocate and free in turn is used again.

    gRPC's threads, in a flood of TLS handshakes, make a scheduler grow by 12 MB so, and by 33 MB with a heap for each.
    False if the C library has no such knob (musl).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_ARENA_MAX, 1) == 1


def keep_freed_memory(retained_bytes: int) -> bool:
    """Serve allocations up to 32 MB from the heap, and keep up to ``retained_bytes`` of freed memory in it.

    One heap for all threads: a message is allocated by one thread and freed by another. False if the C library
    has no such knobs (musl); everything works, only slower.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    retained = min(retained_bytes, (1 << 31) - 1)  # the knobs are ints
    settings = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
        (_M_TRIM_THRESHOLD, retained),
        (_M_TOP_PAD, 16 << 20),
    )
    refused = [option for option, value in settings if mallopt(option, value) != 1]
    return not refused

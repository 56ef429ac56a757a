"""What local ranks that keep others waiting are doing: for the log of every machine.

Owned by the loop's thread. Nothing is asked of a rank's Python, which may be stuck: see stack_dump.py.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterable, Mapping

from byteps_py.system.loop import EventLoop
from byteps_py.system.stack_dump import SIGNAL
from byteps_py.wording import count_text
from byteps_py.worker.io.rank_connection import RankConnection

#: A process that runs writes its stacks within a millisecond; one that does not run at all never does.
_WRITING_S = 0.3
_MAX_BYTES = 8_000


class StackSampler:
    """``ranks``: by local rank, those that are here; ``describe(local rank, pid)``: ``rank 3 (process 47 on a)``;
    ``name_of(slot id)``: of its tensor; ``tell(local rank, text)``: what there is to say."""

    def __init__(
        self,
        loop: EventLoop,
        ranks: Mapping[int, RankConnection],
        describe: Callable[[int, int], str],
        name_of: Callable[[int], str],
        tell: Callable[[int, str], None],
    ) -> None:
        self._loop = loop
        self._ranks = ranks
        self._describe = describe
        self._name_of = name_of
        self._tell = tell

    def sample(self, local_ranks: Iterable[int]) -> None:
        """See to these of the local ranks."""
        for local_rank in local_ranks:
            rank = self._ranks.get(local_rank)
            if rank is None:
                self._tell(local_rank, "has not come to the communication service of its machine, or has left it")
            elif rank.stack_fd < 0:
                self._say(rank, "its Python stack can't be had")
            else:
                try:
                    os.ftruncate(rank.stack_fd, 0)
                    os.lseek(rank.stack_fd, 0, os.SEEK_SET)  # the rank's own position: the description is one
                except OSError:  # it is no file
                    self._say(rank, "its Python stack can't be had")
                    continue
                try:
                    signal.pidfd_send_signal(rank.pidfd, SIGNAL)
                except ProcessLookupError:
                    continue  # its end is about to be reported
                self._loop.call_later(_WRITING_S, functools.partial(self._read, rank))

    def _read(self, rank: RankConnection) -> None:
        if self._ranks.get(rank.local_rank) is not rank:
            return  # it has left meanwhile
        text = os.pread(rank.stack_fd, _MAX_BYTES, 0).decode(errors="replace").rstrip()
        self._say(rank, f"its Python stack:\n{text}" if text else "its process does not run: stopped, or starved")

    def _say(self, rank: RankConnection, what: str) -> None:
        who = self._describe(rank.local_rank, rank.pid)
        if rank.rounds:
            ago_s, name = self._loop.time() - rank.last_done_s, self._name_of(rank.last_slot)
            last = f"has got {count_text(rank.rounds, 'result')}, the last {ago_s:.1f} s ago ({name})"
        else:
            last = "has not got any result yet"
        note = f"{rank.note}\n" if rank.note else ""
        self._tell(rank.local_rank, f"{who} {last}; {note}{what}")

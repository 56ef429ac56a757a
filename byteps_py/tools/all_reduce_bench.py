"""Times all-reduces of this package beside gloo's, in the same ranks, in turns: the work of `bps bench`.

All ranks call ``AllReduceBench`` and its methods at the same places; only rank 0's answers are of use. Needs torch, and
that nothing has initialized torch.distributed. One thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from byteps_py.errors import CommunicationError

_LIMIT_S = 120.0
_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class AllReduceTimes:
    """Of tensors of ``nbytes``, float32. Seconds of the slowest rank, median; ``gloo_s`` None: gloo can't be used."""

    nbytes: int
    byteps_s: float
    gloo_s: float | None

    @property
    def over_gloo(self) -> float | None:
        """How many times longer this package takes than gloo."""
        return self.byteps_s / self.gloo_s if self.gloo_s else None


class AllReduceBench:
    """The job's ranks, with a group of each backend. Ends both at the end of the ``with`` block.

    ``gloo_error``: why gloo can't be used, on this rank; empty if it can, on all ranks.
    """

    torch_version: str = torch.__version__

    def __init__(self) -> None:
        dist.init_process_group("byteps", timeout=timedelta(seconds=_LIMIT_S))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._gloo: Any = None
        self.gloo_error = ""
        try:
            self._gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=_LIMIT_S))
        except RuntimeError as error:  # no address for the host's name, a firewall
            self.gloo_error = str(error).splitlines()[0]
        failed = torch.tensor([float(bool(self.gloo_error))], device="cpu")
        dist.all_reduce(failed)
        if failed.item() and not self.gloo_error:
            self.gloo_error = "it can't be used on another rank"

    def __enter__(self) -> AllReduceBench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            dist.destroy_process_group()
            import byteps_py as bps

            bps.shutdown()

    def measure(self, nbytes: int, repeats: int, turn_done: Callable[[], None] = lambda: None) -> AllReduceTimes:
        """Time tensors of this size, ``repeats`` times with each backend, by turns. ``turn_done``: called after each.

        Raises CommunicationError if a sum is wrong.
        """
        groups = {"byteps": dist.group.WORLD} if self.gloo_error else {"byteps": dist.group.WORLD, "gloo": self._gloo}
        times: dict[str, list[float]] = {name: [] for name in groups}
        tensor = torch.empty(max(1, nbytes // 4), device="cpu")
        for number in range(_WARM_UP + repeats):
            for name, group in groups.items():
                tensor.fill_(self.rank + 1.0)
                dist.barrier()
                began_s = time.perf_counter()
                dist.all_reduce(tensor, group=group)
                took_s = time.perf_counter() - began_s
                self._check(name, tensor)
                if number >= _WARM_UP:
                    times[name].append(took_s)
                    turn_done()
        typical = {name: self._slowest(each) for name, each in times.items()}
        return AllReduceTimes(tensor.nbytes, typical["byteps"], typical.get("gloo"))

    def carry(self, nbytes: int, repeats: int) -> int:
        """Sum tensors of this size with this package alone. Returns how many bytes were summed."""
        tensor = torch.ones(max(1, nbytes // 4), device="cpu")
        for _ in range(repeats):
            dist.all_reduce(tensor)
        return tensor.nbytes * repeats

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        expected = self.size * (self.size + 1) / 2
        if not torch.equal(tensor, torch.full_like(tensor, expected)):
            raise CommunicationError(f"rank {self.rank}: {name} has a wrong sum of {tensor.nbytes} bytes")

    @staticmethod
    def _slowest(times: list[float]) -> float:
        """The largest of all ranks' medians."""
        largest = torch.tensor([statistics.median(times)], dtype=torch.float64, device="cpu")
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest)

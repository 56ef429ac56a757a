"""The values of parameters that servers keep, and that machines change in their own time.

    give: change ─► servers: values += change ─► take: values, as they are then

Machines are the unit: the ranks of one machine give together, and the sum of their changes is what the machine gives.
Where all ranks are on one machine, their changes are summed, and no server keeps anything. The training thread calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from byteps_py.tensors import NO_BOUND, Op, TensorSpec
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import wire_dtype
from byteps_py.torch.collectives.slot_view import PieceView, TensorRequest
from byteps_py.torch.gradients.flat_copy import FlatCopy, Named


class SharedValues:
    """The values of some parameters. ``staleness``, ``quorum``: see TensorSpec; of a quorum, all machines if there are
    fewer."""

    def __init__(self, context: Context, name: str, staleness: int = NO_BOUND, quorum: int = 0) -> None:
        self._context, self._name, self._staleness, self._quorum = context, name, staleness, quorum
        self._copies: list[FlatCopy] = []
        self._begun: list[PieceView] = []  # whose first round has brought the values
        self._given: list[PieceView] = []
        self._is_sum = False  # what was given last
        self._number = 0  # of the start
        self._counts: list[torch.Tensor] = []  # of each copy: changes, and ranks that have finished
        self._own_counts: list[torch.Tensor] = []  # what this rank has added to them last

    @property
    def copies(self) -> list[FlatCopy]:
        """By dtype and device. Empty before ``start``."""
        return self._copies

    @property
    def is_alone(self) -> bool:
        """One rank trains. Raises NotInitializedError after a shutdown."""
        session = self._context.session
        session.check_open()
        return session.size == 1

    @property
    def changes(self) -> int:
        """How many changes of ranks the values contain since the start. Of a quorum."""
        return min((int(count[0]) for count in self._counts), default=0)

    @property
    def finished(self) -> int:
        """How many ranks were known to have finished when the values were taken. Of a quorum."""
        return min((int(count[1]) for count in self._counts), default=0)

    def start(self, copies: Sequence[FlatCopy]) -> None:
        """From the next exchange on, these values, which are the same on all ranks. All ranks call it."""
        self._copies = list(copies)
        self._counts = [copy.change.new_zeros(2) for copy in self._copies] if self._quorum else []
        self._begun = []
        self._number = self._context.number_of_next(self._name)

    def start_from(self, named: Sequence[Named]) -> None:
        """From the next exchange on, the values of ``named``, as they are now. All ranks call it."""
        alike: dict[tuple[object, ...], list[Named]] = {}
        for name, param in named:
            alike.setdefault((param.dtype, param.device), []).append((name, param))
        self.start([FlatCopy.of(part) for part in alike.values()])

    def restart(self) -> None:
        """Begin anew with the next ``start``. All ranks call it."""
        self._copies, self._counts = [], []

    def give(self, is_last: bool = False) -> None:
        """Send each copy's ``change``. ``is_last``: this rank has finished, of a quorum; to be said once."""
        changes = [copy.change for copy in self._copies]
        self._own_counts = [count.new_tensor([1, is_last]) for count in self._counts]
        if self.is_alone:
            return
        self._is_sum = self._context.session.num_machines == 1
        requests = [self._request(index, copy) for index, copy in enumerate(self._copies)]
        self._given = self._context.slot_views(requests)
        if not self._is_sum and self._given != self._begun:  # also after join(), or in another job
            values = [copy.values.detach() for copy in self._copies]
            for count in self._counts:
                count.zero_()
            self._contribute(values, self._counts)
            self._fetch(values, self._counts)
            self._begun = self._given
        self._contribute(changes, self._own_counts)

    def take(self) -> None:
        """Wait for the values with the change that was given last. ``change`` is not needed any more."""
        values, changes = [copy.values.detach() for copy in self._copies], [copy.change for copy in self._copies]
        if not (self.is_alone or self._is_sum):
            self._fetch(values, self._counts)
            return
        if not self.is_alone:
            self._fetch(changes, self._own_counts)
        torch._foreach_add_([*values, *self._counts], [*changes, *self._own_counts])

    def _contribute(self, given: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]) -> None:
        for index, view in enumerate(self._given):
            view.contribute([given[index], *counts[index : index + 1]])

    def _fetch(self, taken: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]) -> None:
        for index, view in enumerate(self._given):
            view.wait()
            view.fetch([taken[index], *counts[index : index + 1]])

    def _request(self, index: int, copy: FlatCopy) -> TensorRequest:
        name, dtype = f"{self._name}.{self._number}.{index}", copy.change.dtype
        shapes = ((copy.change.numel(),), *((2,) for _ in self._counts[index : index + 1]))
        wire, shape = wire_dtype(dtype, name), (sum(size for (size,) in shapes),)
        if self._is_sum:
            spec = TensorSpec(name, wire, shape)
        else:
            quorum = min(self._quorum, self._context.session.num_machines)
            spec = TensorSpec(name, wire, shape, Op.ACCUMULATE, staleness=self._staleness, quorum=quorum)
        return TensorRequest(spec, dtype, shapes, copy.change.device)

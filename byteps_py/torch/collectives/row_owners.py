"""Sums of the rows of a table of which each rank has touched a few: which rank adds which row, and whether that is
worth its messages. Pure; any thread. ``torch/gradients/sparse_bucket.py`` says how rows travel.

A row that several ranks have touched is added by one of them, its owner, in rank order; every rank gets the sum from
the owner. With M machines, and t ranks that have touched a row, on several machines, of which s are on the owner's:

    gather     every rank's row to every other machine                     t · (M - 1) rows
    row-wise   to the owner's machine, and one sum to every other machine   (t - s) + (M - 1) rows

The owner is on the machine of the most ranks that have touched the row, and among these a hash of the row decides, so
that rows that all ranks touch, as the frequent words of a language, are spread evenly. A row that one rank has touched
travels as in a gather. So the row-wise way never moves more values of one dtype than a gather. Sums are not taken on
each machine first: added in rank order, ((a + b) + c) + d, they have other bits than (a + b) + (c + d).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from byteps_py.errors import MismatchError
from byteps_py.torch.collectives.integer_averages import is_summed_wider, mean, summands

Positions = npt.NDArray[np.int64]

#: A round of messages costs about as much as so many bytes more on each machine's link: half a millisecond, in which
#: 1 Gbit/s carries them. A gather takes two rounds less than the row-wise way, or one if the indices are known.
ROUND_BYTES = 64 << 10
_HASH = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class RowBytes:
    """The bytes of one row's values: ``given`` by a rank, and of a ``sum``."""

    given: int
    sum: int


def can_pay(counts: Sequence[int], machines: Sequence[int], nbytes: RowBytes) -> bool:
    """True if the row-wise way could save bytes that are worth its messages. counts: rows that each rank has touched.
    machines: of each rank."""
    others = len(set(machines)) - 1
    most_saved = sum(counts) * nbytes.given * others - max(counts, default=0) * nbytes.sum * others
    return others > 0 and most_saved > 2 * ROUND_BYTES * (others + 1)


def numbered(indices: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The number of each row. indices: [dimension, row]. shape: of the sparse dimensions.

    >>> numbered(torch.tensor([[0, 1], [2, 0]]), (2, 3)).tolist()
    [2, 3]
    """
    numbers = (
        torch.zeros_like(indices[0])
        if len(indices)
        else torch.zeros(indices.shape[1], dtype=torch.int64, device=indices.device)
    )
    for index, length in zip(indices, shape, strict=True):
        numbers = numbers * length + index
    return numbers


def indices_of(numbers: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The indices, [dimension, row], of rows with these numbers: the inverse of ``numbered``."""
    found: list[torch.Tensor] = []
    for length in reversed(shape):
        found.append(numbers % length)
        numbers = numbers.div(length, rounding_mode="floor")
    return torch.stack(found[::-1]) if found else numbers.new_empty((0, len(numbers)))


def number_dtype(shape: Sequence[int]) -> torch.dtype:
    """The dtype in which numbers of rows travel. shape: of the sparse dimensions."""
    return torch.int32 if math.prod(shape) <= 1 << 31 else torch.int64


def check_numbers(what: str, rank: int, numbers: Positions, shape: Sequence[int]) -> None:
    """Raises MismatchError if ``numbers``, of another rank, are not ascending, or not of rows of a table of
    ``shape``."""
    if not len(numbers):
        return
    if not (np.all(numbers[1:] > numbers[:-1]) and numbers[0] >= 0 and numbers[-1] < math.prod(shape)):
        raise MismatchError(
            f"{what}: rank {rank} has rows that are not in order, or not of a shape {list(shape)}; give the same shape "
            "on every rank"
        )


class RowOwners:
    """The owner of each row. The same on all members, as far as it does not name this one.

    touched: for each member, in rank order, the numbers of the rows that it has touched, ascending. machines: of each
    member. own: this member's position.
    """

    def __init__(self, touched: Sequence[Positions], machines: Sequence[int], own: int) -> None:
        self._own = own
        #: The numbers of all rows that any member has touched, ascending. For each member, where its rows are there.
        self.rows, self.places = merge(touched)
        self._machines: Positions = np.unique(np.asarray(machines), return_inverse=True)[1]  # from 0 on
        #: The owner of each of ``rows``.
        self._owners = _owners(self.rows, self.places, self._machines)
        self._members = len(touched)
        self._mine = np.flatnonzero(self._owners == own)

    @property
    def counts(self) -> list[int]:
        """The number of rows that each member owns."""
        return np.bincount(self._owners, minlength=self._members).tolist()  # type: ignore[no-any-return]

    def given_to(self, owner: int) -> Positions:
        """Which of the rows that this member has touched, by position there, ``owner`` adds."""
        return np.flatnonzero(self._owners[self.places[self._own]] == owner)

    def taken_from(self, member: int) -> Positions:
        """Which of the rows that this member adds, by position among them, ``member`` has touched, in the order in
        which ``member`` gives them."""
        places = self.places[member]
        found: Positions = np.searchsorted(self._mine, places[self._owners[places] == self._own])
        return found

    @property
    def places_of_sums(self) -> Positions:
        """For each of ``rows``, where its sum lies if the sums of all owners come one after the other, in rank
        order."""
        found = np.empty(len(self.rows), np.int64)
        found[np.argsort(self._owners, kind="stable")] = np.arange(len(self.rows))
        return found

    def saved(self, nbytes: RowBytes) -> int:
        """The bytes that fewer travel between machines than in a gather."""
        others = len(set(self._machines.tolist())) - 1
        gathered = pushed = 0
        for member, places in enumerate(self.places):
            gathered += len(places) * others
            pushed += int(np.count_nonzero(self._machines[self._owners[places]] != self._machines[member]))
        return (gathered - pushed) * nbytes.given - len(self.rows) * others * nbytes.sum

    def pays(self, nbytes: RowBytes) -> bool:
        """True if that is worth a round of messages."""
        return self.saved(nbytes) > ROUND_BYTES * len(set(self._machines.tolist()))


def _owners(rows: Positions, places: Sequence[Positions], machines: Positions) -> Positions:
    """The owner of each row. places: of those that each rank has touched."""
    every = np.concatenate(places)
    order = np.argsort(every, kind="stable")  # touches by row, and of each row by rank
    place_of_touch = every[order]
    ranks = np.repeat(np.arange(len(places)), [len(each) for each in places])[order]
    if len(np.unique(machines)) == len(machines):
        is_able = np.ones(len(ranks), bool)
    else:
        is_able = _on_busiest_machines(machines[ranks], place_of_touch, len(rows))
    able_places, able_ranks = place_of_touch[is_able], ranks[is_able]
    able_counts = np.bincount(able_places, minlength=len(rows))
    first = np.cumsum(able_counts) - able_counts
    chosen = (rows.astype(np.uint64) * _HASH) >> np.uint64(33)
    owners: Positions = able_ranks[first + (chosen % np.maximum(able_counts, 1).astype(np.uint64)).astype(np.int64)]
    return owners


def _on_busiest_machines(machines: Positions, place_of_touch: Positions, count: int) -> npt.NDArray[np.bool_]:
    """For each touch, whether no machine has more ranks that have touched this row. count: of rows."""
    # How many ranks of its machine have touched the row, for each touch.
    keys = place_of_touch * (int(machines.max(initial=0)) + 1) + machines
    _, which, counts = np.unique(keys, return_inverse=True, return_counts=True)
    on_machine = counts[which]
    most = np.zeros(count, np.int64)
    np.maximum.at(most, place_of_touch, on_machine)
    is_busiest: npt.NDArray[np.bool_] = on_machine == most[place_of_touch]
    return is_busiest


def merge(touched: Sequence[Positions]) -> tuple[Positions, list[Positions]]:
    """(the rows that any member has touched, ascending; for each member, where its rows are among them)."""
    every = np.concatenate([np.asarray(each, np.int64) for each in touched])
    rows, places = np.unique(every, return_inverse=True)
    ends = np.cumsum([len(each) for each in touched]).tolist()
    return rows, [places[end - len(each) : end] for end, each in zip(ends, touched, strict=True)]


def add_in_order(places: Sequence[Positions], values: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """The sums of ``count`` rows. values: the rows of each member. places: for each member, where its rows belong.

    ``coalesce`` of a sparse tensor does not add in any order that one could name: its sort keeps no order of equal
    indices, and how it changes that order depends on the processor.
    """
    first = values[0]
    sums = torch.zeros((count, *first.shape[1:]), dtype=first.dtype, device=first.device)
    for at, rows in zip(places, values, strict=True):
        if len(rows):
            sums.index_add_(0, torch.from_numpy(at).to(first.device), rows)
    return sums


@dataclass(frozen=True, slots=True)
class RowMeans:
    """How rows are combined. divisor: of averages; 0 for sums. rounding: of averages of integers, see ``mean``."""

    divisor: int = 0
    rounding: str = "floor"

    def combine(self, places: Sequence[Positions], values: Sequence[torch.Tensor], count: int) -> torch.Tensor:
        """See add_in_order. Of the dtype of ``values``; rounded once, from float32 if that has 16 bits."""
        dtype = values[0].dtype
        if self.divisor and is_summed_wider(dtype):
            sums = add_in_order(places, [summands(rows) for rows in values], count)
            return mean(sums, self.divisor, dtype, self.rounding)
        exact = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        sums = add_in_order(places, [rows.to(exact) for rows in values], count)
        return (sums / self.divisor if self.divisor else sums).to(dtype)


def table_of(shape: Sequence[int], *facts: object) -> int:
    """A number that differs, most likely, if ranks have different tables or rows."""
    return zlib.crc32(repr((tuple(shape), *facts)).encode())

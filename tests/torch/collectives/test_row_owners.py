"""Who adds which row of a table: every row once, in rank order, and never more bytes than a gather moves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from byteps_py.errors import MismatchError
from byteps_py.torch.collectives.row_owners import (
    ROUND_BYTES,
    RowBytes,
    RowOwners,
    add_in_order,
    can_pay,
    check_numbers,
    indices_of,
    number_dtype,
    numbered,
)

MACHINES = ([0, 1, 2, 3], [0, 0, 1, 1], [0, 0, 0, 1, 2, 2], [0, 0])


def draw(machines, seed: int, table: int = 400, most: int = 300) -> list[np.ndarray]:
    """Rows of each rank: few of them have many of the touches; one rank has none."""
    generator = np.random.default_rng(seed)
    drawn = [generator.zipf(1.2, generator.integers(1, most)) % table for _ in machines]
    drawn[seed % len(drawn)] = np.empty(0, np.int64)
    return [np.unique(each) for each in drawn]


@pytest.mark.parametrize("machines", MACHINES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_owners_add_every_row_once_with_the_bits_of_a_gather(machines, seed) -> None:
    touched = draw(machines, seed)
    values = [torch.randn(len(rows), 3, generator=torch.Generator().manual_seed(seed + 1)) for rows in touched]
    everyone = [RowOwners(touched, machines, own) for own in range(len(machines))]
    parts = []
    for own, owners in enumerate(everyone):
        taken = [owners.taken_from(member) for member in range(len(machines))]
        given = [values[member][everyone[member].given_to(own)] for member in range(len(machines))]
        assert [len(rows) for rows in taken] == [len(rows) for rows in given]
        parts.append(add_in_order(taken, given, owners.counts[own]))
    found = torch.cat(parts)[everyone[0].places_of_sums]

    expected = torch.zeros(400, 3)
    for rows, mine in zip(touched, values, strict=True):
        expected[rows] += mine
    assert everyone[0].rows.tolist() == sorted({*np.concatenate(touched).tolist()})
    assert torch.equal(found, expected[everyone[0].rows])


@pytest.mark.parametrize("machines", MACHINES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_bytes_are_counted_and_never_more_than_those_of_a_gather(machines, seed) -> None:
    touched = draw(machines, seed)
    everyone = [RowOwners(touched, machines, own) for own in range(len(machines))]
    others = len(set(machines)) - 1
    sent = sum(len(rows) for rows in everyone[0].rows[None]) * others
    for own, owners in enumerate(everyone):
        assert owners.counts == everyone[0].counts
        for owner, machine in enumerate(machines):
            sent += len(owners.given_to(owner)) * (machine != machines[own])
    gathered = sum(map(len, touched)) * others
    assert everyone[0].saved(RowBytes(12, 12)) == 12 * (gathered - sent) >= 0


def test_an_owner_has_touched_its_row_on_a_machine_of_the_most_ranks_that_have() -> None:
    touched = [np.array(rows) for rows in ([0, 1, 2], [0, 3], [0, 1, 2], [1, 2, 3])]
    owners = RowOwners(touched, [0, 0, 1, 1], 0)._owners.tolist()
    assert owners[0] in (0, 1)  # two of machine 0, one of machine 1
    assert owners[1] in (2, 3)
    assert owners[2] in (2, 3)
    assert owners[3] in (1, 3)


def test_rows_that_all_ranks_touch_are_spread_evenly() -> None:
    counts = RowOwners([np.arange(4000)] * 4, [0, 1, 2, 3], 0).counts
    assert min(counts) > 900


def test_few_rows_or_few_in_common_are_not_worth_the_messages() -> None:
    row = RowBytes(256, 256)
    apart = [np.arange(i, 40_000, 4) for i in range(4)]
    alike = [np.arange(10_000)] * 4
    machines = [0, 1, 2, 3]
    assert not can_pay([100] * 4, machines, row)
    assert can_pay([10_000] * 4, machines, row)
    assert not can_pay([10_000] * 4, [0] * 4, row)  # no network between them
    assert not RowOwners(alike[:2], [0, 1], 0).pays(row)  # two machines: either way a row travels twice
    assert RowOwners(apart, machines, 0).saved(row) == 0
    assert not RowOwners(apart, machines, 0).pays(row)
    assert RowOwners(alike, machines, 0).pays(row)
    assert not RowOwners(alike, machines, 0).pays(RowBytes(2, 4))
    few = ROUND_BYTES // 256
    assert not RowOwners([np.arange(few // 2)] * 4, machines, 0).pays(row)


def test_numbers_of_rows() -> None:
    shape = (3, 4, 5)
    indices = torch.stack([torch.randint(0, length, (50,)) for length in shape])
    assert torch.equal(indices_of(numbered(indices, shape), shape), indices)
    assert numbered(torch.empty(0, 1, dtype=torch.int64), ()).tolist() == [0]  # one element, no sparse dimension
    assert number_dtype((1 << 31,)) is torch.int32
    assert number_dtype((1 << 31, 2)) is torch.int64


@pytest.mark.parametrize("numbers", [[1, 1], [2, 1], [-1, 2], [5, 12]])
def test_numbers_of_another_rank_are_checked(numbers) -> None:
    check_numbers("the gradient", 1, np.array([0, 5, 11]), (3, 4))
    with pytest.raises(MismatchError, match=r"the gradient: rank 1 has rows that are not in order, or not of a shape"):
        check_numbers("the gradient", 1, np.array(numbers), (3, 4))

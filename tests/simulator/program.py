"""Random programs for the ranks.

A program is a list of steps that all ranks go through, each at its own pace and in its own order; only within a
step does the order differ. What a rank gives, and so every result, follows from the seed alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import ClassVar, Self

from byteps_py.tensors import Op, TensorSpec

from .pieces import Pieces
from .uses import DTYPES, Use

PARTITION_BYTES = 64
_OPS = (Op.SUM, Op.SUM, Op.SUM, Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT, Op.BROADCAST)
_COUNTS = (0, 1, 2, 15, 16, 17, 40, 64, 100)


@dataclass(slots=True)
class Name:
    """What it is for, until all have joined. ``group``: its ranks; empty for all. ``op``: GATHER or EXCHANGE if it is
    one, for nobody votes on that; else it may become anything else. ``spec``, ``pieces``: of its last use, if that may
    be repeated."""

    name: str
    group: tuple[int, ...]
    op: Op | None
    spec: TensorSpec | None = None
    pieces: Pieces | None = None

    @classmethod
    def make(cls, rng: random.Random, name: str, size: int) -> Name:
        """Of most names all ranks."""
        group = () if rng.random() < 0.6 else tuple(sorted(rng.sample(range(size), rng.randint(1, size))))
        return cls(name, group, rng.choice((Op.GATHER, Op.EXCHANGE)) if rng.random() < 0.35 else None)

    def make_spec(self, rng: random.Random, size: int, group: tuple[int, ...] | None = None) -> TensorSpec:
        group = self.group if group is None else group
        op, dtype, count = rng.choice(_OPS), rng.choice(DTYPES), rng.choice(_COUNTS)
        scatters = op.is_reduction and rng.random() < 0.25
        shape = (count,) if count % 2 else (count // 2, 2) if scatters else (2, count // 2)
        root = rng.choice(group or range(size)) if op is Op.BROADCAST else -1
        averages = op is Op.SUM and rng.random() < 0.3
        return TensorSpec(self.name, dtype, shape, op, averages, root, group=group, scatters=scatters)


@dataclass(slots=True)
class Program:
    """``steps``: the uses of each step. ``barriers``: after which steps all ranks meet. ``joins``: how many steps each
    rank goes through before it joins, from one join to the next."""

    size: int
    steps: list[list[Use]] = field(default_factory=list)
    barriers: set[int] = field(default_factory=set)
    joins: list[list[int]] = field(default_factory=list)
    uses: int = 0
    name_class: ClassVar[type[Name]] = Name

    @classmethod
    def make(cls, rng: random.Random, size: int) -> Self:
        program = cls(size)
        count = rng.randint(1, 5)
        # A name is one group's for good, or until all have joined: ranks outside don't know what they interfere with.
        names = [cls.name_class.make(rng, f"t{i}", size) for i in range(count)]
        program.add_steps(rng, names)
        for _ in range(rng.choice((0, 0, 1, 2))):
            program._add_uneven(rng, names)
            names = [cls.name_class.make(rng, f"t{i}", size) for i in range(count)]
        if program.joins:
            program.add_steps(rng, names)
        return program

    def _add_uneven(self, rng: random.Random, names: list[Name]) -> None:
        """Steps which some ranks go through and others don't, and a join at the end."""
        first = len(self.steps)
        counts = [rng.randint(0, 4) for _ in range(self.size)]
        self.joins.append([first + count for count in counts])
        for name in names:
            name.spec = None
        for step in range(max(counts)):
            self.steps.append([])
            for name in rng.sample(names, rng.randint(1, len(names))):
                members = name.group or range(self.size)
                here = [rank for rank in members if counts[rank] > step]
                if not here:
                    continue
                if name.op is not None:
                    self._add_direct(rng, name, here)
                    continue
                spec = name.spec
                if spec is None or rng.random() < 0.25:
                    spec = name.make_spec(rng, self.size)
                is_unsupported = spec.needs_all and len(here) < len(members)
                if is_unsupported and not _is_for_all(spec, len(members)):
                    continue  # rounds of those who get nothing may be over without the others
                self._add(name, dict.fromkeys(here, spec), is_unsupported=is_unsupported)
                name.spec = None if is_unsupported else spec
            self._add_barrier(rng)

    def add_steps(self, rng: random.Random, names: list[Name]) -> None:
        """Steps which all go through."""
        for name in names:
            name.spec = None
        for _ in range(rng.randint(1, 5)):
            self.steps.append([])
            for name in rng.sample(names, rng.randint(1, len(names))):
                if name.op is not None:
                    self._add_direct(rng, name, list(name.group or range(self.size)))
                else:
                    self._add_reduction(rng, name)
            self._add_barrier(rng)

    def _add_barrier(self, rng: random.Random) -> None:
        if rng.random() < 0.2:
            self.barriers.add(len(self.steps) - 1)

    def _add(self, name: Name, specs: dict[int, TensorSpec], **facts: object) -> None:
        by_rank = tuple(specs.get(rank) for rank in range(self.size))
        self.steps[-1].append(Use(self.uses, name.name, by_rank, **facts))  # type: ignore[arg-type]
        self.uses += 1

    def _add_direct(self, rng: random.Random, name: Name, here: list[int]) -> None:
        """A gather or an exchange."""
        members = name.group or range(self.size)
        has_absent = len(here) < len(members)
        pieces = name.pieces
        if pieces is None or has_absent or rng.random() < 0.5:
            pieces = Pieces.make(rng, name.op or Op.GATHER, len(members), has_absent)
        specs = {rank: pieces.spec(name.name, name.group, position) for position, rank in enumerate(members)}
        self._add(name, {rank: specs[rank] for rank in here}, is_unsupported=has_absent, pieces=pieces)
        name.pieces = None if has_absent else pieces

    def _add_reduction(self, rng: random.Random, name: Name) -> None:
        """Or a broadcast."""
        members = name.group or range(self.size)
        known, name.spec = name.spec, None
        spec = known if known is not None and rng.random() < 0.75 else name.make_spec(rng, self.size)
        kind = rng.random()
        first = None
        specs = dict.fromkeys(members, spec)
        # An empty result's round may be over where it is handed over: nobody waits there for those who disagree.
        if kind < 0.12 and len(members) > 1 and (known is None or _is_for_all(known, len(members))):
            if kind < 0.04 and len(members) > 2:
                # About the group: one rank leaves others out, but not all that say something else; so neither group
                # is complete, and nobody can go on.
                odd, *others = rng.sample(members, rng.randint(2, len(members) - 1))
                specs[odd] = name.make_spec(rng, self.size, tuple(sorted((odd, *others))))
            else:
                for rank in rng.sample(members, rng.randint(1, len(members) - 1)):
                    specs[rank] = name.make_spec(rng, self.size)
        elif kind < 0.2:
            first = name.make_spec(rng, self.size)
        is_mismatch = len({each.signature() for each in specs.values()}) > 1
        if not is_mismatch:
            name.spec = specs[members[0]]
        self._add(name, specs, first=first, is_mismatch=is_mismatch)


def _is_for_all(spec: TensorSpec, members: int) -> bool:
    """Everybody gets something."""
    return bool(spec.nbytes) and not (spec.scatters and spec.shape[0] < members)

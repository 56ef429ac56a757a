"""Jobs whose tensors travel between machines in another form: the sums of programs have codecs."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

import numpy as np

from byteps_py import codecs
from byteps_py.codecs import Coding, Draw
from byteps_py.tensor_codec import SCALED_BLOCK, Codec, CodecKind
from byteps_py.tensors import DType, Op, TensorSpec, key_of

from .cluster import Cluster
from .codecs import INT8, Floats
from .outages import OutageCluster
from .program import Name, Program
from .uses import Use, are_on_one_machine

_PARTITION_BYTES = 2 * INT8.item_bytes
#: Below, at and beyond the ends of blocks.
_COUNTS = (1, 40, SCALED_BLOCK - 1, SCALED_BLOCK, SCALED_BLOCK + 1, 3 * SCALED_BLOCK + 17)
#: Those whose sums depend on the rounds before, or on the round.
_WITH_PAST = (
    replace(Codec.randomk(0.2, seed=1, error_feedback=True), drawn=3),
    Codec(CodecKind.INT8, error_feedback=True, momentum=0.5),
    Codec(CodecKind.THC, error_feedback=True),
    Codec(CodecKind.ONEBIT_SCALED, error_feedback=True),
    Codec(CodecKind.DITHERING_LINEAR, 7, drawn=5),
    Codec.topk(0.05, error_feedback=True),
)


@dataclass(slots=True)
class CodedName(Name):
    """Most sums of floating numbers have a codec. ``kept``: of a name that is always the same sum."""

    kept: TensorSpec | None = None
    is_kept: bool | None = None

    def make_spec(self, rng: random.Random, size: int, group: tuple[int, ...] | None = None) -> TensorSpec:
        if self.is_kept is None:
            self.is_kept = rng.random() < 0.4
            if self.is_kept:
                shape, codec = (rng.choice(_COUNTS),), rng.choice(_WITH_PAST)
                scatters = shape[0] == _COUNTS[-1] and not codec.is_thc
                self.kept = TensorSpec(
                    self.name, DType.FLOAT32, shape, group=self.group, codec=codec, scatters=scatters
                )
        if self.kept is not None:
            return self.kept if group is None else replace(self.kept, group=group)
        spec = Name.make_spec(self, rng, size, group)
        if spec.op is not Op.SUM or spec.dtype not in (DType.FLOAT32, DType.FLOAT16):
            return spec
        if spec.scatters:
            return replace(spec, shape=(7 * spec.count,), codec=INT8)
        return replace(spec, shape=(rng.choice(_COUNTS),), codec=INT8 if rng.random() < 0.8 else None)


class CodedProgram(Program):
    """See the module."""

    name_class = CodedName


@dataclass(slots=True)
class Past:
    """What the machines keep of a tensor with a codec, by first rank: error, momentum, and what is agreed on."""

    spec: TensorSpec
    round: int = 0
    states: dict[int, Floats] = field(default_factory=dict)

    def result(self, use: Use, local_sizes: list[int]) -> bytes:
        """Of the next round: machines and a server, one after the other."""
        self.round += 1
        spec, codec, count = self.spec, self.spec.codec, self.spec.count
        assert codec is not None
        if spec.scatters:
            return self._pieces(use, codec, local_sizes)
        nbytes, blocks, key = codec.coded_nbytes(count), -(-count // codec.block), key_of(self.spec.name)
        firsts = np.cumsum([0, *local_sizes]).tolist()
        machines = [range(first, end) for first, end in itertools.pairwise(firsts)]
        members = spec.members(firsts[-1])
        taking_part = sum(any(rank in members for rank in each) for each in machines)
        codings, given = [], []
        for ranks in machines:
            inputs = [use.contribution(rank).copy() for rank in ranks if use.specs[rank] is not None]
            if inputs:
                state = self.states.setdefault(ranks[0], np.zeros(2 * count + blocks, np.float32)).ctypes.data
                error, moments = state * codec.error_feedback, (state + 4 * count) * (codec.momentum > 0)
                draw, agreed = Draw(key, codec.drawn + self.round, 0, ranks[0]), state + 8 * count
                coding = Coding(codec, spec.dtype, count, error, moments, draw, agreed, taking_part)
                given.append(np.zeros(nbytes, np.uint8))
                codecs.encode(coding, [each.ctypes.data for each in inputs], given[-1].ctypes.data)
                codings.append(coding)
        answer, result = np.zeros(nbytes, np.uint8), np.zeros(count, np.float32)
        sources = [each.ctypes.data for each in given]
        codecs.add(codec, sources, [answer.ctypes.data], nbytes, Draw(key, codec.drawn + self.round))
        for coding, source in zip(codings, sources, strict=True):
            codecs.decode(coding, answer.ctypes.data, [result.ctypes.data], 1, source)
        return result.tobytes()

    def _pieces(self, use: Use, codec: Codec, local_sizes: list[int]) -> bytes:
        """The same of a scattered sum: machines, and for each piece its owner's, one after the other."""
        spec, count, key = self.spec, self.spec.count, key_of(self.spec.name)
        firsts = np.cumsum([0, *local_sizes]).tolist()
        members, result = spec.members(firsts[-1]), np.zeros(count, np.float32)
        for position in range(len(members)):
            first, length = spec.piece(position, len(members))
            block = spec.sent_piece(position, len(members), codec)[0] // codec.item_bytes
            sources = []
            for begin, end in itertools.pairwise(firsts):
                inputs = [use.contribution(rank).copy() for rank in range(begin, end) if use.specs[rank] is not None]
                if inputs:
                    state = self.states.setdefault(begin, np.zeros(2 * count, np.float32)).ctypes.data + 4 * first
                    error, moments = state * codec.error_feedback, (state + 4 * count) * (codec.momentum > 0)
                    draw = Draw(key, codec.drawn + self.round, block, begin)
                    coding = Coding(codec, spec.dtype, length, error, moments, draw)
                    sources.append(np.zeros(codec.coded_nbytes(length), np.uint8))
                    places = [each.ctypes.data + 4 * first for each in inputs]
                    codecs.encode(coding, places, sources[-1].ctypes.data)
            coding = Coding(codec, spec.dtype, length, draw=Draw(key, codec.drawn + self.round, block))
            codecs.add_up(coding, [each.ctypes.data for each in sources], [result[first:].ctypes.data], 1)
        return result.tobytes()


def results_with_past(program: Program, local_sizes: list[int]) -> dict[int, bytes]:
    """The results of uses that have one, in the order of the program. What is declared anew has no past."""
    pasts: dict[str, Past] = {}
    found = {}
    for use in (use for step in program.steps for use in step):
        spec = next(spec for spec in use.specs if spec is not None)
        is_over = use.is_mismatch or use.is_unsupported
        if is_over or (use.name in pasts and not pasts[use.name].spec.agrees_with(spec)):
            pasts.pop(use.name, None)
        if is_over or spec.codec not in _WITH_PAST:
            continue
        if not are_on_one_machine(spec.members(sum(local_sizes)), local_sizes):
            found[use.id] = pasts.setdefault(use.name, Past(spec)).result(use, local_sizes)
    return found


class CodedCluster(Cluster):
    """Whose machines are there from start to end."""

    program_class = CodedProgram
    partition_bytes = _PARTITION_BYTES

    def _results(self) -> dict[int, bytes]:
        return Cluster._results(self) | results_with_past(self.program, self.local_sizes)


class CodedOutageCluster(OutageCluster):
    """Beside an unreliable network, and with partitions smaller than a block, so that each has one."""

    program_class = CodedProgram

    def _results(self) -> dict[int, bytes]:
        return OutageCluster._results(self) | results_with_past(self.program, self.local_sizes)

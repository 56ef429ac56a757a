"""Records of tensors in files, one pair of files for each rank: ``rank00003.jsonl`` and ``rank00003.data``.

The first line of the .jsonl file is a header: the format, the rank, its coordinates in the mesh and the mesh's sizes.
Each other line describes one tensor: when it was computed (step, micro-batch, phase), by which module and operation,
its dtype, shape, digest and figures, and how the mesh's ranks hold it. The .data file has the tensors' bytes, one after
another, if the run keeps values.

Needs no torch. One thread writes a file.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from byteps_py.errors import UsageError

FORMAT = "byteps_py numerics 1"
#: The phases of a step, in order.
FORWARD, BACKWARD, ACCUMULATION, REDUCTION, UPDATE = PHASES = (
    "forward",
    "backward",
    "accumulation",
    "reduction",
    "update",
)
#: Kinds of placement along one dimension of the mesh.
REPLICATED, SHARD, HEAD_TAIL, PARTIAL, SEPARATE = KINDS = ("replicated", "shard", "head-tail", "partial", "separate")


class NamedMesh(Protocol):
    """The part of torch's DeviceMesh that RankLayout needs."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def get_coordinate(self) -> Sequence[int] | None: ...


@dataclass(frozen=True, slots=True)
class RankLayout:
    """A rank's place in the mesh.

    Args:
        rank: the rank in the job.
        coordinates: its coordinate in each dimension of the mesh.
        sizes: the size of each dimension.
        data: dimensions whose ranks take different samples; their activations are separate tensors.

    Raises UsageError if a coordinate is outside its dimension.

    >>> RankLayout(5, {"dp": 1, "tp": 1}, {"dp": 2, "tp": 4}).coordinates
    {'dp': 1, 'tp': 1}
    """

    rank: int = 0
    coordinates: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    data: tuple[str, ...] = ("dp",)

    def __post_init__(self) -> None:
        if set(self.coordinates) != set(self.sizes):
            raise UsageError(
                f"coordinates of {', '.join(sorted(self.coordinates)) or 'no dimension'}, but sizes of "
                f"{', '.join(sorted(self.sizes)) or 'no dimension'}: give both for each dimension of the mesh"
            )
        for name, size in self.sizes.items():
            if not 0 <= self.coordinates[name] < size:
                raise UsageError(
                    f"coordinate {self.coordinates[name]} of rank {self.rank} in dimension {name}, which has size "
                    f"{size}: it must be from 0 to {size - 1}"
                )

    @classmethod
    def of(cls, mesh: NamedMesh, rank: int, data: tuple[str, ...] = ("dp",)) -> RankLayout:
        """The layout of this rank in a Mesh, or a DeviceMesh with names. Raises UsageError if the mesh has no names, or
        the rank is not in it."""
        mesh = getattr(mesh, "device_mesh", mesh)  # of a byteps_py.parallel.Mesh
        names, coordinate = mesh.mesh_dim_names, mesh.get_coordinate()
        if names is None:
            raise UsageError("the mesh has no names: give init_device_mesh mesh_dim_names=('dp', 'tp'), for example")
        if coordinate is None:
            raise UsageError(f"rank {rank} is not in the mesh of shape {tuple(mesh.shape)}: record on its ranks only")
        return cls(
            rank, dict(zip(names, coordinate, strict=True)), dict(zip(names, tuple(mesh.shape), strict=True)), data
        )


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """How the ranks along one dimension of the mesh hold a tensor. Made by ``sharded``, ``head_tail``, ``partial`` and
    ``separate``; without one, each rank has the whole tensor (replicated).

    Args:
        kind: "replicated", "shard", "head-tail", "partial" or "separate".
        dim: the dimension of the tensor that is cut, negative from its end.
        spans: this rank's part of that dimension, as [start, stop) pairs; none: consecutive chunks in rank order.
    """

    kind: str = REPLICATED
    dim: int = 0
    spans: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"placement {self.kind!r}: it must be one of {', '.join(KINDS)}")


def sharded(dim: int, spans: Sequence[tuple[int, int]] | None = None) -> TensorPlacement:
    """Each rank has a part of dimension ``dim``: the next chunk in rank order, or the ``spans`` of the whole."""
    return TensorPlacement(SHARD, dim, None if spans is None else tuple((int(a), int(b)) for a, b in spans))


def head_tail(dim: int) -> TensorPlacement:
    """Context parallelism: of 2·cp equal chunks of dimension ``dim``, rank i has chunks i and 2·cp - 1 - i."""
    return TensorPlacement(HEAD_TAIL, dim)


def partial() -> TensorPlacement:
    """The tensor is the sum of the ranks' tensors, in rank order."""
    return TensorPlacement(PARTIAL)


def separate() -> TensorPlacement:
    """Each rank has a tensor of its own, for its own samples: it is compared with the reference's of this
    coordinate."""
    return TensorPlacement(SEPARATE)


@dataclass(frozen=True, slots=True)
class RecordRule:
    """Describes the tensors whose names match. Later rules override earlier ones, dimension by dimension.

    Args:
        module: a pattern of module names (fnmatch).
        tensor: a pattern of "output", "grad_output", "grad_input" (with ".0", ".1", … if there are several), or of a
            parameter's own name, such as "weight".
        phases: the phases in which the rule holds.
        placements: for each dimension of the mesh, in the order in which the tensor was cut.
        operation: the operation that computed the tensor, for messages.
        over: the dimension of the mesh over which that operation communicates.
    """

    module: str = "*"
    tensor: str = "*"
    phases: tuple[str, ...] = PHASES
    placements: Mapping[str, TensorPlacement] = field(default_factory=dict)
    operation: str = ""
    over: str = ""

    def __post_init__(self) -> None:
        for phase in self.phases:
            if phase not in PHASES:
                raise UsageError(f"phase {phase!r} in a rule: it must be one of {', '.join(PHASES)}")

    def matches(self, phase: str, module: str, tensor: str) -> bool:
        """Whether the rule describes this tensor."""
        return phase in self.phases and fnmatchcase(module, self.module) and fnmatchcase(tensor, self.tensor)


_OF_PARAMETERS = (ACCUMULATION, REDUCTION, UPDATE)


def tensor_parallel_rules(
    plan: Mapping[str, str], dimension: str = "tp", sequence_dim: int | None = None
) -> list[RecordRule]:
    """Rules for linear layers of tensor parallelism.

    Args:
        plan: patterns of module names (fnmatch) to "column" or "row"; the first match counts.
        dimension: of the mesh.
        sequence_dim: with sequence parallelism, the tensors' dimension along which activations between the layers are
            cut, such as 1.

    A column-parallel layer cuts its weight and output; the gradient of its input is summed over the ranks. A
    row-parallel layer cuts its input and the columns of its weight; its output is summed (Megatron-LM, section 3). With
    sequence parallelism, the sums are reduce-scatters, and gradients of other parameters are partial sums until they
    are reduced. Modules between a column and a row layer need rules of their own. Raises UsageError for another style.

    >>> [rule.operation for rule in tensor_parallel_rules({"*.wo": "row"}) if rule.operation]
    ['row-parallel all-reduce over tp']
    """
    rules: list[RecordRule] = []
    activations = (FORWARD, BACKWARD)
    cut, whole, summed = {dimension: sharded(-1)}, {dimension: TensorPlacement()}, {dimension: TensorPlacement()}
    outside, collective = whole, "all-reduce"
    if sequence_dim is not None:
        outside, collective, summed = {dimension: sharded(sequence_dim)}, "reduce-scatter", {dimension: partial()}
        rules = [
            RecordRule(phases=activations, placements=outside),
            RecordRule(phases=(ACCUMULATION,), placements=summed),
        ]
    for pattern, style in reversed(list(plan.items())):
        operation = f"{style}-parallel {collective} over {dimension}"
        if style == "column":
            rules += [
                RecordRule(pattern, "output*", activations, cut),
                RecordRule(pattern, "grad_output*", activations, cut),
                RecordRule(pattern, "grad_input*", activations, outside, operation, dimension),
                RecordRule(pattern, "weight", _OF_PARAMETERS, {dimension: sharded(0)}),
                RecordRule(pattern, "bias", _OF_PARAMETERS, {dimension: sharded(0)}),
            ]
        elif style == "row":
            rules += [
                RecordRule(pattern, "output*", activations, outside, operation, dimension),
                RecordRule(pattern, "grad_output*", activations, outside),
                RecordRule(pattern, "grad_input*", activations, cut),
                RecordRule(pattern, "weight", _OF_PARAMETERS, {dimension: sharded(1)}),
                RecordRule(pattern, "bias", (ACCUMULATION,), summed),
                RecordRule(pattern, "bias", (REDUCTION, UPDATE), whole),
            ]
        else:
            raise UsageError(f"style {style!r} of {pattern!r} in the plan: it must be 'column' or 'row'")
    return rules


def context_parallel_rules(dimension: str = "cp", dim: int = 1) -> list[RecordRule]:
    """Rules for context parallelism: activations are cut along the sequence (dimension ``dim``) in head–tail chunks
    (Llama 3, section 4), and gradients of parameters are partial sums until they are reduced."""
    return [
        RecordRule(phases=(FORWARD, BACKWARD), placements={dimension: head_tail(dim)}),
        RecordRule(phases=(ACCUMULATION,), placements={dimension: partial()}),
    ]


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One line of a rank's file. ``occurrence`` counts equal keys of a micro-batch: a module may be called twice."""

    step: int
    micro_batch: int | None
    phase: str
    module: str
    tensor: str
    occurrence: int
    coordinates: Mapping[str, int]
    dtype: str
    shape: tuple[int, ...]
    digest: str
    minimum: float | None
    maximum: float | None
    norm: float | None
    placements: Mapping[str, TensorPlacement]
    operation: str = ""
    over: str = ""
    offset: int | None = None  # in the .data file; none: the values were not kept
    nbytes: int = 0

    def as_json(self) -> dict[str, Any]:
        """As it is written."""
        return {
            **dataclasses.asdict(self),
            "placements": {name: dataclasses.asdict(placement) for name, placement in self.placements.items()},
        }

    @classmethod
    def of_json(cls, entry: Mapping[str, Any]) -> TensorRecord:
        """As it is read. Raises KeyError, TypeError or ValueError if something is missing or of a wrong type."""
        placements = {
            str(name): TensorPlacement(
                str(value["kind"]),
                int(value["dim"]),
                None if value["spans"] is None else tuple((int(a), int(b)) for a, b in value["spans"]),
            )
            for name, value in entry["placements"].items()
        }
        record = cls(
            **{
                **entry,
                "placements": placements,
                "shape": tuple(int(size) for size in entry["shape"]),
                "coordinates": {str(name): int(value) for name, value in entry["coordinates"].items()},
            }
        )
        numbers = (record.step, record.occurrence, record.nbytes, record.micro_batch or 0, record.offset or 0)
        if not all(isinstance(number, int) and number >= 0 for number in numbers) or min(record.shape, default=0) < 0:
            raise ValueError("a number that must be an integer of at least 0 is not")
        if record.phase not in PHASES or not all(
            isinstance(text, str) for text in (record.module, record.tensor, record.digest, record.dtype)
        ):
            raise ValueError(f"phase {record.phase!r} is unknown, or a name is not text")
        return record


@dataclass(frozen=True, slots=True)
class RankRecords:
    """All that one rank has recorded."""

    layout: RankLayout
    records: Sequence[TensorRecord]
    data: Path

    def bytes_of(self, record: TensorRecord) -> bytes | None:
        """The values of a tensor, or None if they were not kept. Raises UsageError if the .data file is too short."""
        if record.offset is None:
            return None
        with self.data.open("rb") as file:
            file.seek(record.offset)
            found = file.read(record.nbytes)
        if len(found) < record.nbytes:
            raise UsageError(
                f"{self.data}: {len(found)} of {record.nbytes} bytes of {record.module} {record.tensor}: the file was "
                "cut; record the run again"
            )
        return found


class RecordWriter:
    """Writes one rank's files. Raises UsageError if the folder can't be written."""

    def __init__(self, folder: Path, layout: RankLayout) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lines = (folder / f"rank{layout.rank:05}.jsonl").open("w", encoding="utf-8")
            self._data = (folder / f"rank{layout.rank:05}.data").open("wb")
        except OSError as error:
            raise UsageError(f"{folder}: {error.strerror}: give a folder that can be written") from error
        self._offset = 0
        header = {
            "format": FORMAT,
            "rank": layout.rank,
            "coordinates": dict(layout.coordinates),
            "sizes": dict(layout.sizes),
        }
        self._lines.write(json.dumps(header) + "\n")

    def write(self, record: TensorRecord, data: bytes | memoryview | None) -> None:
        """Append a record, and the tensor's bytes if they are given."""
        if data is not None:
            self._data.write(data)
            record = dataclasses.replace(record, offset=self._offset, nbytes=len(data))
            self._offset += len(data)
        self._lines.write(json.dumps(record.as_json(), allow_nan=False) + "\n")

    def flush(self) -> None:
        """Values first: a line in the file has its bytes."""
        self._data.flush()
        self._lines.flush()

    def close(self) -> None:
        """Write what is left. May be called again."""
        if not self._lines.closed:
            self.flush()
        self._data.close()
        self._lines.close()


def read_run(folder: Path) -> list[RankRecords]:
    """The records of all ranks, in rank order.

    A last line without an end, and the tensors whose values are not all there, are left out: their rank was killed
    while it wrote. Raises UsageError if a file is missing or damaged.
    """
    paths = sorted(folder.glob("rank*.jsonl"))
    if not paths:
        raise UsageError(f"{folder}: no records there (rank00000.jsonl, …): give the folder of a Recorder")
    found = sorted((_read_rank(path) for path in paths), key=lambda one: one.layout.rank)
    sizes = dict(found[0].layout.sizes)
    for one in found:
        if dict(one.layout.sizes) != sizes:
            raise UsageError(
                f"{folder}: rank {found[0].layout.rank} has a mesh of {sizes}, rank {one.layout.rank} of "
                f"{dict(one.layout.sizes)}: the files are of different runs; record into an empty folder"
            )
    wanted = math.prod(sizes.values())
    places = {tuple(sorted(one.layout.coordinates.items())) for one in found}
    if len(found) != wanted or len(places) != wanted:
        raise UsageError(
            f"{folder}: files of {len(found)} ranks with {len(places)} coordinates, but the mesh {sizes} has {wanted} "
            "ranks: collect the files of all ranks in one folder"
        )
    return found


def _read_rank(path: Path) -> RankRecords:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: it can't be read ({error}): record the run again") from error
    complete = lines[:-1]  # the last one is empty, or was cut
    number = 0
    try:
        header = json.loads(complete[0])
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']!r}, this version reads {FORMAT!r}")
        layout = RankLayout(int(header["rank"]), header["coordinates"], header["sizes"])
        records = []
        data = path.with_suffix(".data")
        size = data.stat().st_size if data.exists() else 0
        for line in complete[1:]:
            number += 1
            record = TensorRecord.of_json(json.loads(line))
            if record.offset is not None and record.offset + record.nbytes > size:
                break
            records.append(record)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UsageError(
            f"{path}: line {number + 1} is not a record ({type(error).__name__}: {error}): record the run again"
        ) from error
    return RankRecords(layout, records, data)


def described(rules: Iterable[RecordRule], phase: str, module: str, tensor: str) -> RecordRule:
    """All rules that match, merged into one."""
    placements: dict[str, TensorPlacement] = {}
    operation = over = ""
    for rule in rules:
        if rule.matches(phase, module, tensor):
            placements.update(rule.placements)
            if rule.operation:
                operation, over = rule.operation, rule.over
    return RecordRule(module, tensor, (phase,), placements, operation, over)

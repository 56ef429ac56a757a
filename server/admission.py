"""The contributions that a server accepts: what one must satisfy, in what those of one round must agree, and how many
partitions may begin. Pure.

Decisions come back as sentences: the refusal, the log and the error on the ranks say the same. AdmissionLimit belongs
to one thread; any thread may call the functions.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import NamedTuple

from byteps_py.errors import UsageError
from byteps_py.tensor_codec import Codec
from byteps_py.tensors import NO_BOUND, DType, Op
from byteps_py.wire.data_link import Header, Kind


@functools.lru_cache(256)
def codec_of(code: int) -> Codec | None:
    """The codec that a header states; None for none. Raises ValueError or UsageError if it does not exist."""
    return Codec.from_code(code) if code else None


class Facts(NamedTuple):
    """The facts that all contributions to one round of a partition must agree on. ``offset``, ``length``: in bytes;
    ``machines``: how many contribute, 0 for all; ``codec``: see Header."""

    round: int
    op: Op
    dtype: DType
    length: int
    offset: int
    root: int
    machines: int
    codec: int = 0

    @classmethod
    def of(cls, header: Header) -> Facts:
        """The facts that a header states."""
        return cls(
            header.round, header.op, header.dtype, header.length, header.offset, header.root, header.machines,
            header.codec,
        )  # fmt: skip

    def __str__(self) -> str:
        root = f" from machine {self.root}" if self.op is Op.BROADCAST else ""
        group = f" among {self.machines} machines" if self.machines else ""
        codec = codec_of(self.codec)
        coded = f" compressed to {codec}" if codec is not None else ""
        return (
            f"round {self.round}, {self.op.name.lower()} of {self.dtype.name.lower()}{coded}{root}{group}, "
            f"{self.length} bytes at offset {self.offset}"
        )


def difference(gave: list[tuple[int, Facts]]) -> str:
    """One sentence: which facts differ, and the facts that each group of machines gave."""
    views: dict[Facts, list[int]] = {}
    for machine, facts in gave:
        views.setdefault(facts, []).append(machine)
    names = [name for i, name in enumerate(Facts._fields) if len({facts[i] for facts in views}) > 1]
    said = "; ".join(
        f"machine{'s' if len(machines) > 1 else ''} {', '.join(map(str, machines))} gave {facts}"
        for facts, machines in views.items()
    )
    return f"machines disagree about {' and '.join(names)}: {said}"


def not_a_member_reason(header: Header, partition: object) -> str:
    """Why a machine's contribution is refused when all machines that take part in the round are known already."""
    return f"machine {header.sender} is not among the machines that take part in round {header.round} of {partition}"


def missing_root_reason(header: Header, machines: Collection[int]) -> str:
    """Why ``machines``, which are all that take part, can't complete the round of ``header``; empty if they can."""
    if header.op is not Op.BROADCAST or header.root in machines:
        return ""
    who = ", ".join(map(str, sorted(machines)))
    return (
        f"partition {header.index} of tensor key {header.key:#018x}: machine {header.root}, the root of the broadcast "
        f"in round {header.round}, is not among the machines that take part, which are {who}"
    )


def stale_epoch_reason(header: Header, since_epoch: int) -> str:
    """Why a contribution is too old: the present machines work together since ``since_epoch``; empty if it is not."""
    if header.epoch >= max(since_epoch, 1):
        return ""
    return (
        f"the other machines have gone on without this one: its contribution is of epoch {header.epoch}, and the job's "
        f"machines have changed in epoch {since_epoch}"
    )


def objection(header: Header, nbytes: int, num_machines: int, partition_bytes: int) -> str:
    """Why a contribution with ``nbytes`` of payload can't be used, whatever other machines give; empty if it can."""
    what = f"partition {header.index} of tensor key {header.key:#018x} from machine {header.sender}"
    if header.sender >= num_machines:
        return f"{what}: machines of this job are numbered 0 to {num_machines - 1}"
    if header.machines == 1:
        return f"{what}: its header says that only one machine contributes, which needs no server"
    if header.machines > num_machines:
        return f"{what}: its header says that {header.machines} machines contribute, but the job has {num_machines}"
    try:
        codec = codec_of(header.codec)
    except (ValueError, UsageError) as error:
        return f"{what}: its compression is unknown: {error}"
    # A block is not cut, however small partitions are to be.
    accumulates = header.op is Op.ACCUMULATE
    block = 0 if codec is None else 4 * codec.block if accumulates else codec.item_bytes
    most = max(partition_bytes, block)
    if not 0 < header.length <= most:
        return f"{what}: its length is {header.length} bytes, but a partition has 1 to {most}"
    is_change = accumulates and header.dtype is DType.FLOAT32 and not (codec and (codec.draws or codec.is_thc))
    if codec is not None and (not (header.op is Op.SUM or is_change) or codec.error_feedback):
        return f"{what}: its compression, {codec}, is not one of a sum on a server"
    if header.is_coded and (not accumulates or codec is None or header.round == 1):
        return f"{what}: its payload can't be the code of a change"
    if codec is not None and codec.is_thc and not codec.levels(header.machines or num_machines):
        return f"{what}: {header.machines or num_machines} machines are too many for its compression, {codec}"
    if (header.op is Op.ACCUMULATE) != bool(header.staleness) or (header.staleness and header.machines):
        return f"{what}: an accumulate is for all machines and has a staleness, and nothing else has one"
    if header.quorum and header.staleness != NO_BOUND:
        return f"{what}: a quorum is for an accumulate without a bound"
    size = header.dtype.itemsize if codec is None or accumulates else codec.item_bytes
    if header.length % size or header.offset % size:
        is_element = codec is None or accumulates
        unit = f"{size}, the size of {header.dtype.name.lower() if is_element else f'a block of {codec}'}"
        return f"{what}: its length, {header.length}, and its offset, {header.offset}, must be multiples of {unit}"
    is_pull = header.kind is Kind.PULL
    is_pass = header.kind is Kind.PASS
    if is_pass and header.op is Op.BROADCAST:
        return f"{what}: every machine takes part in a broadcast, so none can pass"
    if header.op is Op.BROADCAST:
        if header.root >= num_machines:
            return f"{what}: the broadcast's root is machine {header.root}, but the last machine is {num_machines - 1}"
        if is_pull == (header.sender == header.root):
            return f"{what}: in a broadcast, machine {header.root}, the root, pushes and the others pull"
    elif is_pull:
        return f"{what}: only the result of a broadcast can be pulled, not that of a {header.op.name.lower()}"
    expected = 0 if is_pull or is_pass else header.payload_nbytes
    if nbytes != expected:
        return f"{what}: its header announces {expected} bytes of payload, but {nbytes} arrived"
    return ""


class AdmissionLimit:
    """How many partitions may exist that have not been summed for the first time.

    A server does not know in advance which tensors there are. It learns of a tensor from the first machine that
    contributes, and keeps the contribution until all machines have. Without a limit, a machine that invents keys or
    indices would fill the server's memory.
    """

    #: Far more than the tensors of any model. Each takes 1.8 KB, beside its contributions.
    most_keys = 1 << 16
    #: Of all keys together: 16 GB in the smallest partitions.
    most_partitions = 1 << 19

    def __init__(self) -> None:
        self._by_key: dict[int, int] = {}
        self._partitions = 0

    def objection(self, key: int) -> str:
        """Why no other partition of ``key`` may begin; empty if one may."""
        if len(self._by_key) >= self.most_keys and key not in self._by_key:
            what = f"{self.most_keys} other tensors"
        elif self._partitions >= self.most_partitions:
            what = f"{self.most_partitions} partitions"
        else:
            return ""
        return f"tensor key {key:#018x}: this server already holds {what} that wait for their first sum"

    def begun(self, key: int) -> None:
        """A partition of ``key`` has its first contribution."""
        self._by_key[key] = self._by_key.get(key, 0) + 1
        self._partitions += 1

    def ended(self, key: int) -> None:
        """A partition of ``key`` was summed for the first time, or is forgotten."""
        self._partitions -= 1
        self._by_key[key] -= 1
        if not self._by_key[key]:
            del self._by_key[key]

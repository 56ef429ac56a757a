"""The shared memory of one communication service: its ranks' slots, its contributions, its answers.

With one rank, the rank's inputs are the contributions, unless these are coded. With several, the machine's sums lie in
an arena that only the summation service of this machine maps as well (also where one of them alone is in a group: its
input is copied there). Owned by the loop's thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable

from byteps_py.runtime import Runtime
from byteps_py.system.shm import Arena, Block
from byteps_py.tensors import Op, TensorSpec
from byteps_py.wire.data_link import Header, RoundName, name_of
from byteps_py.worker.core.tensor import Part, RankSlot, Tensor
from byteps_py.worker.core.topology import Topology
from byteps_py.worker.io.rank_connection import RankConnection


class SlotMemory:
    """``machines``, ``local_size``: as the topology says; they decide what needs memory of its own. ``elsewhere``:
    see Arena. ``ranks``: the global rank of the machine's first, and the number of ranks of the job."""

    slot_class: type[RankSlot] = RankSlot

    def __init__(
        self,
        runtime: Runtime,
        machines: int,
        local_size: int,
        elsewhere: Callable[[Callable[[], None]], None] | None = None,
        ranks: tuple[int, int] = (0, 0),
    ) -> None:
        self.chunk_bytes = runtime.thresholds.chunk
        self._first_rank, self._size = ranks
        self._local_size = local_size
        self.machines = machines
        self._inputs_are_contributions = machines > 1 and local_size == 1
        self._ranks = [runtime.arena(elsewhere=elsewhere) for _ in range(local_size)]
        #: What a summation service on this machine maps.
        self.machine = self._ranks[0] if self._inputs_are_contributions else runtime.arena(elsewhere=elsewhere)
        self.slots: dict[int, RankSlot] = {}  # by id
        #: Calls what gives memory back, once nothing is being sent from there to other machines: they may have asked
        #: twice for what they have by now.
        self.when_left: Callable[[Callable[[], None]], None] = lambda then: then()
        #: By server, round and place: a partition may come back to a server, and be answered there in another block.
        self._abandoned: dict[tuple[int, RoundName, tuple[int, int]], Block] = {}
        self._next_slot_id = 1

    def arena_of(self, local_rank: int) -> Arena:
        return self._ranks[local_rank]

    @property
    def arenas(self) -> list[Arena]:
        """All of them: what is sent to other machines lies in these."""
        return list(dict.fromkeys((*self._ranks, self.machine)))

    def new_slot(self, rank: RankConnection, spec: TensorSpec) -> RankSlot:
        """A rank's memory for a tensor: inputs that must outlive their round have two, used in turn, and a
        result beside them; else one block is input and result."""
        slot_id, self._next_slot_id = self._next_slot_id, self._next_slot_id + 1
        if spec.op.bypasses_servers:
            inputs: tuple[Block, ...] = (rank.allocate(spec.nbytes), rank.allocate(spec.nbytes))
            result = rank.allocate(spec.shape[1])
        elif spec.ownership and spec.op is Op.BROADCAST:  # owners' services write there
            result = rank.allocate(spec.nbytes)
            inputs = (result,)
        elif spec.ownership:  # the sum goes to its owner's service
            lends_input = self._inputs_are_contributions and spec.codec is None
            inputs = tuple(rank.allocate(spec.nbytes) for _ in range(1 + lends_input))
            result = inputs[0]
        elif spec.scatters:
            lends_input = self._inputs_are_contributions and len(spec.group) != 1 and spec.codec is None
            inputs = tuple(rank.allocate(spec.nbytes) for _ in range(1 + lends_input))
            result = rank.allocate(spec.result_nbytes(self._first_rank + rank.local_rank, self._size))
        elif self._inputs_are_contributions and len(spec.group) != 1 and spec.codec is None:
            inputs = (rank.allocate(spec.nbytes), rank.allocate(spec.nbytes))
            result = rank.allocate(spec.nbytes)
        else:
            result = rank.allocate(spec.nbytes)
            inputs = (result,)
        slot = self.slots[slot_id] = self.slot_class(slot_id, rank.local_rank, spec, inputs, result)
        if (nbytes := self._coded_state_nbytes(rank.local_rank, spec)) > 0:
            slot.coded_state = rank.allocate(nbytes)
            ctypes.memset(slot.coded_state.address, 0, nbytes)
        return slot

    def _coded_state_nbytes(self, local_rank: int, spec: TensorSpec) -> int:
        """Of what a rank has in its memory for all of its machine."""
        if spec.codec is None or not spec.codec.has_states:
            return 0
        here = range(self._first_rank, self._first_rank + self._local_size)
        members = spec.members(self._size)
        there = [rank for rank in members if rank in here]
        is_first = bool(there) and there[0] == self._first_rank + local_rank
        return sum(spec.codec.state_nbytes(spec.count)) if is_first and len(there) < len(members) else 0

    def equip(self, tensor: Tensor, topology: Topology, owned_bytes: int = 0) -> None:
        """Give an agreed tensor what it needs beside its slots. ``owned_bytes``: of partitions with owners, this
        machine's."""
        tensor.machines = topology.machines_in(tensor.spec)
        tensor.first_rank = topology.first_rank
        nbytes = tensor.spec.nbytes
        if tensor.spec.op is Op.BROADCAST and tensor.spec.ownership:
            nbytes = 0 if tensor.is_alone else owned_bytes
            if nbytes:
                tensor.contributions = (self.machine.allocate(nbytes), self.machine.allocate(nbytes))
            return
        if tensor.spec.op is Op.BROADCAST:
            root = topology.local_rank_of(tensor.spec.root)
            tensor.root_slot = next((slot for slot in tensor.slots if slot.local_rank == root), None)
            tensor.root_machine = topology.machine_of(tensor.spec.root)
        has_own = not self._inputs_are_contributions or tensor.codec is not None
        if not tensor.is_alone and has_own and tensor.contributes:
            nbytes = tensor.spec.sent_nbytes
            if tensor.spec.scatters:
                members = len(tensor.spec.members(topology.size))
                nbytes = sum(tensor.spec.sent_piece(members - 1, members, tensor.codec))
            elif tensor.spec.op is Op.ACCUMULATE and tensor.codec is not None:  # values, and codes of changes
                nbytes += tensor.codec.coded_nbytes(tensor.spec.count)
            tensor.contributions = (self.machine.allocate(nbytes), self.machine.allocate(nbytes))

    def give_answer_block(self, part: Part) -> Block:
        part.answer = self.machine.allocate(part.length)
        return part.answer

    def abandon_answer_block(self, part: Part, server: int) -> None:
        """The partition has moved: the answer is not read, but the server of this machine may yet write it."""
        if part.answer is not None:
            name = (part.tensor.key, part.tensor.generation, part.index, part.tensor.round)
            self._abandoned[server, name, (part.answer.segment, part.answer.offset)] = part.answer
            part.answer = None

    def take_abandoned(self, header: Header, server: int) -> bool:
        """This server has written such an answer. False if it is none."""
        block = self._abandoned.pop((server, name_of(header), header.answer_place), None)
        if block is not None:
            self.machine.free(block)
        return block is not None

    def free_abandoned(self, server: int) -> None:
        """This server has ended, and writes no answers any more."""
        for key in [key for key in self._abandoned if key[0] == server]:
            self.machine.free(self._abandoned.pop(key))

    def release(self) -> None:
        """Nothing is allocated any more. The memory itself goes with its last user: a kernel, a message."""
        for arena in self.arenas:
            arena.close_descriptors()

    def take_answer_block(self, part: Part) -> None:
        """The answer was delivered: its memory is free. Bounded, like the bytes in flight, by the credit."""
        if part.answer is not None:
            self.machine.free(part.answer)
            part.answer = None

    def name_of(self, slot_id: int) -> str:
        """Of a slot's tensor, for messages."""
        slot = self.slots.get(slot_id)
        return repr(slot.spec.name) if slot is not None else "of a tensor that is void by now"

    def free_slot(self, slot: RankSlot) -> None:
        del self.slots[slot.id]
        states = () if slot.coded_state is None else (slot.coded_state,)
        self._free(self._ranks[slot.local_rank], dict.fromkeys((*slot.inputs, slot.result, *states)))

    def free_states(self, local_rank: int, blocks: Iterable[Block]) -> None:
        """What a rank's optimizer has kept is needed no more."""
        for block in blocks:
            self._ranks[local_rank].free(block)

    def free_contributions(self, tensor: Tensor) -> None:
        self._free(self.machine, tensor.contributions)
        tensor.contributions = ()

    def _free(self, arena: Arena, blocks: Iterable[Block]) -> None:
        def free() -> None:
            for block in blocks:
                arena.free(block)

        self.when_left(free)

    def view_of(self, local_rank: int, block: Block, offset: int, length: int) -> memoryview:
        """Bytes of a block of a local rank."""
        start = block.offset + offset
        return self._ranks[local_rank].segments[block.segment].view[start : start + length]

    def view(self, block: Block, offset: int, length: int) -> memoryview:
        """Bytes of a block of ``machine``."""
        start = block.offset + offset
        return self.machine.segments[block.segment].view[start : start + length]

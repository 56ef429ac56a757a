"""Shared memory for answers of a summation service of this machine that has lost a partition."""

from __future__ import annotations

from typing import Any, cast

from support.worker_core import slot, tensor

from byteps_py.runtime import Runtime
from byteps_py.system.shm import Block
from byteps_py.wire.data_link import Header, Kind
from byteps_py.worker.core.tensor import Part
from byteps_py.worker.io.slot_memory import SlotMemory

HERE, THERE = 3, 4


def answer(part: Part, round_: int, block: Block) -> Header:
    header = Header(Kind.ANSWER, 0, key=part.tensor.key, generation=1, index=part.index, round=round_)
    header.answer_segment, header.answer_offset = block.segment, block.offset
    return header


def test_what_an_ended_server_may_have_written_is_free() -> None:
    memory = SlotMemory(Runtime(loop=cast(Any, None)), 2, 2)
    made = tensor([slot(0), slot(1)])
    parts = [Part(made, index, 0, 4096, HERE) for index in range(2)]
    blocks = [memory.give_answer_block(part) for part in parts]
    memory.abandon_answer_block(parts[0], HERE)
    memory.abandon_answer_block(parts[1], THERE)
    memory.free_abandoned(HERE)
    assert not memory.take_abandoned(answer(parts[0], made.round, blocks[0]), HERE)
    assert memory.give_answer_block(parts[0]) == blocks[0]
    assert memory.take_abandoned(answer(parts[1], made.round, blocks[1]), THERE)
    memory.release()


def test_a_partition_that_comes_back_in_the_same_round_is_answered_in_another_block() -> None:
    memory = SlotMemory(Runtime(loop=cast(Any, None)), 2, 2)
    made = tensor([slot(0), slot(1)])
    part = Part(made, 0, 0, 4096, HERE)
    before = [memory.give_answer_block(part)]
    memory.abandon_answer_block(part, HERE)
    before.append(memory.give_answer_block(part))
    memory.abandon_answer_block(part, HERE)
    now = memory.give_answer_block(part)
    assert len({block.offset for block in (*before, now)}) == 3
    assert not memory.take_abandoned(answer(part, made.round, now), HERE)
    assert memory.take_abandoned(answer(part, made.round, before[0]), HERE)
    assert not memory.take_abandoned(answer(part, made.round, before[0]), HERE)
    memory.free_abandoned(HERE)
    assert {memory.machine.allocate(4096).offset for _ in before} == {block.offset for block in before}
    memory.release()

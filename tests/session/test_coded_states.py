"""What machines keep for codecs: which tensors go on with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from byteps_py.errors import UsageError
from byteps_py.session import CodedState, Slot
from byteps_py.session.service.remote_states import CodedStates
from byteps_py.tensor_codec import Codec, CodecKind
from byteps_py.tensors import DType, TensorSpec

CODEC = Codec(CodecKind.INT8, error_feedback=True)
SPEC = TensorSpec("w", DType.FLOAT32, (2,), codec=CODEC)
STATE = CodedState((2,), DType.FLOAT32, CODEC, b"12345678")
OTHERS = {
    "shape": replace(SPEC, shape=(1, 2)),
    "dtype": replace(SPEC, dtype=DType.FLOAT16),
    "codec": replace(SPEC, codec=replace(CODEC, momentum=0.5)),
    "name": replace(SPEC, name="v"),
}


def slot_of(spec: TensorSpec, data: bytes = bytes(8)) -> Slot:
    return Slot(spec, (), memoryview(b""), coded_state=memoryview(bytearray(data)))


def test_a_tensor_goes_on_once_it_is_declared() -> None:
    states, slot = CodedStates(), slot_of(SPEC)
    states.put({"w": STATE}, [])
    assert states.take([]) == {"w": STATE}
    states.declared(slot)
    assert bytes(slot.coded_state or b"") == STATE.data
    assert states.take([slot]) == {"w": STATE}
    assert states.take([]) == {}


@pytest.mark.parametrize("what", OTHERS)
def test_another_tensor_begins_with_zeros(what: str, caplog: pytest.LogCaptureFixture) -> None:
    states, slot = CodedStates(), slot_of(OTHERS[what])
    states.put({"w": STATE}, [])
    states.declared(slot)
    assert bytes(slot.coded_state or b"1") == bytes(8)
    assert ("'w' begins with errors and momentum of zeros" in caplog.text) == (what != "name")
    states.declared(slot_of(SPEC))  # unless it is another tensor, its name has nothing left
    assert states.take([]) == {}


def test_what_is_loaded_replaces_all() -> None:
    states, slots = CodedStates(), [slot_of(SPEC, b"87654321"), slot_of(OTHERS["name"], b"87654321")]
    states.put({"w": STATE}, slots)
    assert [bytes(slot.coded_state or b"") for slot in slots] == [STATE.data, bytes(8)]


def test_codecs_draw_on() -> None:
    """On all ranks: also on those that do not have the rest."""
    spec = replace(SPEC, codec=Codec.randomk(0.1, seed=1))
    assert spec.codec is not None
    drawn = CodedState((2,), DType.FLOAT32, replace(spec.codec, drawn=7), b"")
    states, slot = CodedStates(), Slot(spec, (), memoryview(b""))
    states.put({"w": drawn}, [])
    assert states.drawn(spec) == 7
    assert states.drawn(replace(spec, shape=(3,))) == states.drawn(SPEC) == 0
    states.declared(slot)
    slot.round = slot.done_round = 2
    assert states.take([slot]) == {"w": replace(drawn, codec=replace(spec.codec, drawn=9))}
    states.put({"w": drawn}, [slot])  # the tensor is declared already
    assert slot.drawn == 7
    assert states.take([]) == {}


def test_not_while_a_round_is_under_way() -> None:
    states = CodedStates()
    for change in ({"round": 1}, {"begun_bytes": 4}):
        slot = slot_of(SPEC, b"87654321")
        for name, value in change.items():
            setattr(slot, name, value)
        with pytest.raises(UsageError, match=r"'w' is on its way, .* between two steps"):
            states.take([slot])
        with pytest.raises(UsageError, match="'w' is on its way"):
            states.put({"w": STATE}, [slot])
        assert states.take([]) == {}
        assert bytes(slot.coded_state or b"") == b"87654321"

"""Words and numbers that nobody in his right mind gives: each is an error of ours, and nothing else happens."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
from support.strangers import local

from byteps_py.config import launchers
from byteps_py.config.settings import Settings
from byteps_py.config.variables import VARIABLES, Variable
from byteps_py.errors import ConfigurationError, ProtocolError, UsageError
from byteps_py.runtime import Runtime
from byteps_py.system.channel import MAX_MESSAGE, Listener
from byteps_py.system.loop import EventLoop
from byteps_py.tensors import MAX_NAME_BYTES, DType, Op, TensorSpec
from byteps_py.wire import rank_link as protocol
from byteps_py.worker.ranks import rank_server

GARBAGE = [
    "x", "-1", "1e999", "nan", "0x10", "²", "1" * 5000, "\udcff", "\x00\x01", "☃", "1;rm", "true", "2(x999999999)",
]  # fmt: skip
NUMBERS = [variable for variable in VARIABLES if variable.kind is not str]


@pytest.mark.parametrize("variable", NUMBERS, ids=lambda variable: variable.field)
def test_garbage_in_a_variable_names_it_and_what_it_takes(variable: Variable) -> None:
    for text in GARBAGE:
        if (variable.kind is bool and text == "true") or (variable.low is None and text in ("-1", "nan", "1e999")):
            continue
        with pytest.raises(ConfigurationError) as caught:
            Settings.from_env({variable.names[0]: text})
        assert any(name in str(caught.value) for name in variable.names)
        assert len(str(caught.value)) < 1000


def test_a_short_limit_of_waiting_alone_brings_an_earlier_warning() -> None:
    assert Settings.from_env({"BYTEPS_STALL_LIMIT_S": "20"}).stall_warn_s == 10
    assert Settings.from_env({"BYTEPS_STALL_LIMIT_S": "60"}).stall_warn_s == 60
    assert Settings.from_env({"BYTEPS_STALL_LIMIT_S": "0"}).stall_warn_s == 60
    with pytest.raises(ConfigurationError, match="BYTEPS_STALL_WARN_S=30"):
        Settings.from_env({"BYTEPS_STALL_LIMIT_S": "20", "BYTEPS_STALL_WARN_S": "30"})


@pytest.mark.parametrize("text", GARBAGE)
def test_garbage_in_a_launchers_variables(text: str) -> None:
    for environ in (
        {"OMPI_COMM_WORLD_SIZE": text, "OMPI_COMM_WORLD_RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": text},
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "0"},
        {"GROUP_WORLD_SIZE": text, "GROUP_RANK": text},
        {"SLURM_STEP_TASKS_PER_NODE": f"{text},{text}", "SLURM_NODEID": text},
        {"SLURM_STEP_TASKS_PER_NODE": "2(x999999999)," * 1000, "SLURM_NODEID": "70000"},
    ):
        with contextlib.suppress(ConfigurationError):
            Settings.from_env(environ)
    assert launchers.scheduler({"MASTER_ADDR": "host", "MASTER_PORT": text}) in (None, ("host", 2))


@pytest.mark.parametrize(
    ("shape", "op"),
    [((1 << 62, 4), Op.SUM), ((1 << 70,), Op.MAX), ((3, 1 << 60), Op.GATHER), ((1 << 49, 0), Op.EXCHANGE)],
)
def test_shapes_that_overflow_are_refused_before_memory_is_asked_for(shape: tuple[int, ...], op: Op) -> None:
    dtype = DType.UINT8 if op.bypasses_servers else DType.FLOAT32
    with pytest.raises(UsageError, match="is larger than any machine's memory"):
        TensorSpec("w", dtype, shape, op)


def test_names_and_declarations_beyond_all_bounds() -> None:
    good = protocol.SpecFields.of(TensorSpec("w", DType.FLOAT32, (3, 4)))
    assert good.spec().shape == (3, 4)
    for name, value in (
        ("name", "n" * (MAX_NAME_BYTES + 1)), ("name", ""), ("dtype", 77), ("shape", (1 << 62, 9)), ("op", 99),
        ("root", 1), ("group", (3, 3)), ("terms", "t" * 1000), ("nonfinite", 9), ("scatters", True),
    ):  # fmt: skip
        changed: dict[str, Any] = {name: value}
        fields = dataclasses.replace(good, shape=() if name == "scatters" else good.shape)
        with pytest.raises(ProtocolError, match="malformed declaration"):
            dataclasses.replace(fields, **changed).spec()


@pytest.mark.parametrize("value", [-(1 << 31) - 1, 1 << 31, 1 << 80])
def test_a_priority_that_no_message_can_hold(value: int) -> None:
    spec = TensorSpec("w", DType.FLOAT32, (3, 4), priority=value)
    with pytest.raises(UsageError, match="can't be sent"):
        protocol.encode(protocol.Declare.of(1, [spec]))


@pytest.mark.parametrize("text", [b"[" * 150_000, b'{"a":' * 30_000, b"", b"nul", b"1", b"\xff"])
def test_local_messages_that_are_malformed(text: bytes) -> None:
    for code in (1, 2, 7, 13, 24, 31, 32, 38):
        with pytest.raises(ProtocolError, match="malformed local message"):
            protocol.decode(bytes((code,)) + text)


def test_whoever_says_nonsense_to_a_communication_service_is_told_and_sent_away() -> None:
    loop = EventLoop()
    listener = Listener("byteps-test-nonsense")
    reception = rank_server.RankServer(Runtime(loop=loop), listener, 2, lambda sentence: None, lambda: None)

    def hello(**changes: int) -> bytes:
        return protocol.encode(dataclasses.replace(protocol.Hello.of(0, 2, 1, 0), **changes))

    said = {
        hello(version=protocol.VERSION + 1): "are different versions",
        hello(version=9)[:5] + b"another version's": "are different versions",
        hello(local_rank=2): "a rank came as local rank 2 of 2",
        hello(local_rank=-1): "a rank came as local rank -1 of 2",
        hello(local_size=3): "BYTEPS_LOCAL_RANK, BYTEPS_LOCAL_SIZE must say the same to both",
        hello() + b"0": "malformed local message Hello",
        hello()[:-1]: "malformed local message Hello",
        b"\x01": "malformed local message Hello",
        protocol.encode(protocol.Ready(((1, 1, 1),))): "did not send a Hello first",
        b"\xff": "unknown kind of local message",
        b"\x01" + b"[" * 100_000: "are different versions",
        b"\x02" + b"x" * (MAX_MESSAGE - 1): "malformed local message Declare",
    }
    socks = [local(listener.name, message) for message in said]
    loop.call_later(0.5, loop.stop)
    loop.run()
    for sock, text in zip(socks, said.values(), strict=True):
        with sock:
            answer = sock.recv(1 << 16)
            message = protocol.decode(answer)
            assert isinstance(message, protocol.Fatal)
            assert text in message.message
            assert sock.recv(10) == b""
    assert reception.ranks_here == 0
    reception.close()
    loop.close()

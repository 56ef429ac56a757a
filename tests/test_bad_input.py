"""Words and numbers that nobody in his right mind gives: each is an error of ours, and nothing else happens."""

from __future__ import annotations

import contextlib
import json

import pytest
from support.strangers import local

from byteps_py import launchers
from byteps_py import rank_protocol as protocol
from byteps_py.channel import MAX_MESSAGE, Listener
from byteps_py.errors import ConfigurationError, ProtocolError, UsageError
from byteps_py.loop import EventLoop
from byteps_py.runtime import Runtime
from byteps_py.settings import Settings
from byteps_py.tensors import MAX_NAME_BYTES, DType, Op, TensorSpec
from byteps_py.variables import VARIABLES, Variable
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
    dtype = DType.UINT8 if op.is_direct else DType.FLOAT32
    with pytest.raises(UsageError, match="is larger than any machine's memory"):
        TensorSpec("w", dtype, shape, op)


def test_names_and_declarations_beyond_all_bounds() -> None:
    good = protocol.spec_to_json(TensorSpec("w", DType.FLOAT32, (3, 4)))
    assert protocol.spec_from_json(good).shape == (3, 4)
    for place, value in (
        (0, "n" * (MAX_NAME_BYTES + 1)), (0, ""), (1, 77), (1, "float"), (2, [-1]), (2, [1 << 62, 9]), (2, ["x"]),
        (2, [1e400]), (2, 7), (3, 99), (5, [1]), (7, [3, 3]), (7, None), (9, "t" * 1000),
    ):  # fmt: skip
        with pytest.raises(ProtocolError):
            protocol.spec_from_json([*good[:place], value, *good[place + 1 :]])
    with pytest.raises(ProtocolError):
        protocol.spec_from_json(good[:-1])


@pytest.mark.parametrize(
    "text", [b"[" * 150_000, b'{"a":' * 30_000, b"", b"nul", b"[]", b"1", b"\xff", b'"' + b"9" * 5000]
)
def test_local_messages_that_are_no_objects(text: bytes) -> None:
    with pytest.raises(ProtocolError):
        protocol.fields_of(b"\x01" + text)


def test_whoever_says_nonsense_to_a_communication_service_is_told_and_sent_away() -> None:
    loop = EventLoop()
    listener = Listener("byteps-test-nonsense")
    reception = rank_server.RankServer(Runtime(loop=loop), listener, 2, lambda sentence: None, lambda: None)

    def hello(**changes: object) -> bytes:
        fields = {"version": protocol.VERSION, "local_rank": 0, "local_size": 2, "pid": 1, "synced_in": 0, **changes}
        return protocol.pack(protocol.RankMessageKind.HELLO, **fields)

    said = {
        hello(version=protocol.VERSION + 1): "are different versions",
        hello(version=None): "are different versions",
        hello(local_rank=2): "a rank came as local rank 2 of 2",
        hello(local_rank=-1): "a rank came as local rank -1 of 2",
        hello(local_rank="0"): "a rank came as local rank 0 of 2",
        hello(local_rank=0.5): "a rank came as local rank 0.5 of 2",
        hello(synced_in=-1): "no group has the number -1",
        hello(synced_in=1 << 32): "no group has the number 4294967296",
        hello(synced_in="7"): "no group has the number '7'",
        hello(local_size=3): "BYTEPS_LOCAL_RANK, BYTEPS_LOCAL_SIZE must say the same to both",
        protocol.pack_record(protocol.RankMessageKind.READY, 1, 1, 1): "did not say HELLO first",
        b"\xff": "unknown kind of local message",
        b"\x01" + b"[" * 100_000: "malformed local message",
        b"\x01" + b"x" * (MAX_MESSAGE - 1): "malformed local message",
    }
    socks = [local(listener.name, message) for message in said]
    loop.call_later(0.5, loop.stop)
    loop.run()
    for sock, text in zip(socks, said.values(), strict=True):
        with sock:
            answer = sock.recv(1 << 16)
            assert answer[0] == protocol.RankMessageKind.FATAL
            assert text in json.loads(answer[1:])["message"]
            assert sock.recv(10) == b""
    assert reception.ranks_here == 0
    reception.close()
    loop.close()

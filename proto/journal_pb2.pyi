from byteps_py.proto import control_pb2 as _control_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JournalHeader(_message.Message):
    __slots__ = ("version", "config")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    version: int
    config: str
    def __init__(self, version: _Optional[int] = ..., config: _Optional[str] = ...) -> None: ...

class JournalFrame(_message.Message):
    __slots__ = ("header", "records", "snapshot")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    header: JournalHeader
    records: _containers.RepeatedCompositeFieldContainer[JournalRecord]
    snapshot: bytes
    def __init__(self, header: _Optional[_Union[JournalHeader, _Mapping]] = ..., records: _Optional[_Iterable[_Union[JournalRecord, _Mapping]]] = ..., snapshot: _Optional[bytes] = ...) -> None: ...

class JournalRecord(_message.Message):
    __slots__ = ("at_s", "link", "check", "register", "message", "lost", "ended", "tick", "stop", "restart", "admitting", "contradiction", "links_changed", "scale", "beyond_epoch")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    TICK_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    ADMITTING_FIELD_NUMBER: _ClassVar[int]
    CONTRADICTION_FIELD_NUMBER: _ClassVar[int]
    LINKS_CHANGED_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    BEYOND_EPOCH_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    link: int
    check: int
    register: _control_pb2.Register
    message: _control_pb2.MemberMessage
    lost: str
    ended: bool
    tick: bool
    stop: str
    restart: bool
    admitting: bool
    contradiction: str
    links_changed: LinkRates
    scale: _control_pb2.ScaleRequest
    beyond_epoch: int
    def __init__(self, at_s: _Optional[float] = ..., link: _Optional[int] = ..., check: _Optional[int] = ..., register: _Optional[_Union[_control_pb2.Register, _Mapping]] = ..., message: _Optional[_Union[_control_pb2.MemberMessage, _Mapping]] = ..., lost: _Optional[str] = ..., ended: bool = ..., tick: bool = ..., stop: _Optional[str] = ..., restart: bool = ..., admitting: bool = ..., contradiction: _Optional[str] = ..., links_changed: _Optional[_Union[LinkRates, _Mapping]] = ..., scale: _Optional[_Union[_control_pb2.ScaleRequest, _Mapping]] = ..., beyond_epoch: _Optional[int] = ...) -> None: ...

class LinkRates(_message.Message):
    __slots__ = ("mbit", "why")
    class MbitEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MBIT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    mbit: _containers.ScalarMap[int, float]
    why: str
    def __init__(self, mbit: _Optional[_Mapping[int, float]] = ..., why: _Optional[str] = ...) -> None: ...

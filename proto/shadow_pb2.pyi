from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ShadowQuery(_message.Message):
    __slots__ = ("hold_s",)
    HOLD_S_FIELD_NUMBER: _ClassVar[int]
    hold_s: float
    def __init__(self, hold_s: _Optional[float] = ...) -> None: ...

class ShadowRead(_message.Message):
    __slots__ = ("run", "key", "index", "step", "state", "start", "stop")
    RUN_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    run: int
    key: int
    index: int
    step: int
    state: int
    start: int
    stop: int
    def __init__(self, run: _Optional[int] = ..., key: _Optional[int] = ..., index: _Optional[int] = ..., step: _Optional[int] = ..., state: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class AttachedRead(_message.Message):
    __slots__ = ("run", "step", "rank", "start", "stop")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    run: int
    step: int
    rank: int
    start: int
    stop: int
    def __init__(self, run: _Optional[int] = ..., step: _Optional[int] = ..., rank: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class ShadowChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

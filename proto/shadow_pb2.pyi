from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ShadowPart(_message.Message):
    __slots__ = ("run", "name", "first", "count", "step_kind", "step")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    STEP_KIND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run: int
    name: str
    first: int
    count: int
    step_kind: int
    step: int
    def __init__(self, run: _Optional[int] = ..., name: _Optional[str] = ..., first: _Optional[int] = ..., count: _Optional[int] = ..., step_kind: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class ShadowStep(_message.Message):
    __slots__ = ("run", "step", "before", "durable", "divisor", "segments", "whole")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    DIVISOR_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    run: int
    step: int
    before: int
    durable: int
    divisor: int
    segments: _containers.RepeatedCompositeFieldContainer[ShadowSegment]
    whole: bool
    def __init__(self, run: _Optional[int] = ..., step: _Optional[int] = ..., before: _Optional[int] = ..., durable: _Optional[int] = ..., divisor: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[ShadowSegment, _Mapping]]] = ..., whole: bool = ...) -> None: ...

class ShadowSegment(_message.Message):
    __slots__ = ("start", "stop", "scalars")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SCALARS_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    scalars: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ..., scalars: _Optional[_Iterable[float]] = ...) -> None: ...

class ShadowRecord(_message.Message):
    __slots__ = ("run", "step", "durable", "rank", "size", "common", "whole", "attached_bytes")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    COMMON_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    run: int
    step: int
    durable: int
    rank: int
    size: int
    common: bytes
    whole: bool
    attached_bytes: int
    def __init__(self, run: _Optional[int] = ..., step: _Optional[int] = ..., durable: _Optional[int] = ..., rank: _Optional[int] = ..., size: _Optional[int] = ..., common: _Optional[bytes] = ..., whole: bool = ..., attached_bytes: _Optional[int] = ...) -> None: ...

class ShadowQuery(_message.Message):
    __slots__ = ("hold_s",)
    HOLD_S_FIELD_NUMBER: _ClassVar[int]
    hold_s: float
    def __init__(self, hold_s: _Optional[float] = ...) -> None: ...

class ShadowDescription(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[HeldRun]
    def __init__(self, runs: _Optional[_Iterable[_Union[HeldRun, _Mapping]]] = ...) -> None: ...

class HeldRun(_message.Message):
    __slots__ = ("run", "durable", "age_s", "parts", "records")
    RUN_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    run: int
    durable: int
    age_s: float
    parts: _containers.RepeatedCompositeFieldContainer[HeldPart]
    records: _containers.RepeatedCompositeFieldContainer[ShadowRecord]
    def __init__(self, run: _Optional[int] = ..., durable: _Optional[int] = ..., age_s: _Optional[float] = ..., parts: _Optional[_Iterable[_Union[HeldPart, _Mapping]]] = ..., records: _Optional[_Iterable[_Union[ShadowRecord, _Mapping]]] = ...) -> None: ...

class HeldPart(_message.Message):
    __slots__ = ("key", "index", "part", "steps")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    key: int
    index: int
    part: ShadowPart
    steps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[int] = ..., index: _Optional[int] = ..., part: _Optional[_Union[ShadowPart, _Mapping]] = ..., steps: _Optional[_Iterable[int]] = ...) -> None: ...

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

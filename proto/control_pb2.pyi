from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_COMMUNICATION: _ClassVar[Role]
    ROLE_SUMMATION: _ClassVar[Role]

class MachineKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MACHINE_KIND_UNSPECIFIED: _ClassVar[MachineKind]
    MACHINE_KIND_GPU: _ClassVar[MachineKind]
    MACHINE_KIND_CPU: _ClassVar[MachineKind]
ROLE_UNSPECIFIED: Role
ROLE_COMMUNICATION: Role
ROLE_SUMMATION: Role
MACHINE_KIND_UNSPECIFIED: MachineKind
MACHINE_KIND_GPU: MachineKind
MACHINE_KIND_CPU: MachineKind

class MemberMessage(_message.Message):
    __slots__ = ("number", "received", "register", "heartbeat", "declare", "arrive", "leave", "report", "ranks_shut_down", "measured", "join", "idle", "stack_report", "drain", "applied", "unreachable", "ready", "shutdown_confirmed", "reform", "gathered", "keep_states", "answer", "probed")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DECLARE_FIELD_NUMBER: _ClassVar[int]
    ARRIVE_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    RANKS_SHUT_DOWN_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    STACK_REPORT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    REFORM_FIELD_NUMBER: _ClassVar[int]
    GATHERED_FIELD_NUMBER: _ClassVar[int]
    KEEP_STATES_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    PROBED_FIELD_NUMBER: _ClassVar[int]
    number: int
    received: int
    register: Register
    heartbeat: Heartbeat
    declare: Declare
    arrive: Arrive
    leave: Leave
    report: Report
    ranks_shut_down: RanksShutDown
    measured: Measured
    join: Join
    idle: Idle
    stack_report: StackReport
    drain: Drain
    applied: Applied
    unreachable: Unreachable
    ready: Ready
    shutdown_confirmed: RanksShutDown
    reform: Reform
    gathered: Gathered
    keep_states: KeepStates
    answer: Answer
    probed: Probed
    def __init__(self, number: _Optional[int] = ..., received: _Optional[int] = ..., register: _Optional[_Union[Register, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., declare: _Optional[_Union[Declare, _Mapping]] = ..., arrive: _Optional[_Union[Arrive, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., ranks_shut_down: _Optional[_Union[RanksShutDown, _Mapping]] = ..., measured: _Optional[_Union[Measured, _Mapping]] = ..., join: _Optional[_Union[Join, _Mapping]] = ..., idle: _Optional[_Union[Idle, _Mapping]] = ..., stack_report: _Optional[_Union[StackReport, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., applied: _Optional[_Union[Applied, _Mapping]] = ..., unreachable: _Optional[_Union[Unreachable, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., shutdown_confirmed: _Optional[_Union[RanksShutDown, _Mapping]] = ..., reform: _Optional[_Union[Reform, _Mapping]] = ..., gathered: _Optional[_Union[Gathered, _Mapping]] = ..., keep_states: _Optional[_Union[KeepStates, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., probed: _Optional[_Union[Probed, _Mapping]] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("protocol", "job", "role", "kind", "machine_id", "machine_index", "address", "local_address", "local_size", "num_workers", "num_servers", "partition_bytes", "host", "pid", "link_mbit", "token", "received", "member_id", "epoch", "elastic", "memory_bytes", "relay_address")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MACHINE_ID_FIELD_NUMBER: _ClassVar[int]
    MACHINE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_SERVERS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LINK_MBIT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ELASTIC_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    RELAY_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    job: str
    role: Role
    kind: MachineKind
    machine_id: str
    machine_index: int
    address: str
    local_address: str
    local_size: int
    num_workers: int
    num_servers: int
    partition_bytes: int
    host: str
    pid: int
    link_mbit: float
    token: bytes
    received: int
    member_id: int
    epoch: int
    elastic: bool
    memory_bytes: int
    relay_address: str
    def __init__(self, protocol: _Optional[int] = ..., job: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., kind: _Optional[_Union[MachineKind, str]] = ..., machine_id: _Optional[str] = ..., machine_index: _Optional[int] = ..., address: _Optional[str] = ..., local_address: _Optional[str] = ..., local_size: _Optional[int] = ..., num_workers: _Optional[int] = ..., num_servers: _Optional[int] = ..., partition_bytes: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., link_mbit: _Optional[float] = ..., token: _Optional[bytes] = ..., received: _Optional[int] = ..., member_id: _Optional[int] = ..., epoch: _Optional[int] = ..., elastic: bool = ..., memory_bytes: _Optional[int] = ..., relay_address: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("statistics", "waiting", "ranks", "servers", "shadow", "steps", "calls", "progress", "links", "spans", "pairs", "rates", "bare")
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    BARE_FIELD_NUMBER: _ClassVar[int]
    statistics: Statistics
    waiting: _containers.RepeatedCompositeFieldContainer[Waiting]
    ranks: _containers.RepeatedCompositeFieldContainer[RankPace]
    servers: _containers.RepeatedCompositeFieldContainer[ServerPace]
    shadow: ShadowProtection
    steps: _containers.RepeatedCompositeFieldContainer[RankSteps]
    calls: _containers.RepeatedCompositeFieldContainer[UnnamedCall]
    progress: _containers.RepeatedCompositeFieldContainer[RankProgress]
    links: _containers.RepeatedCompositeFieldContainer[LinkUsage]
    spans: _containers.RepeatedCompositeFieldContainer[RankSpans]
    pairs: _containers.RepeatedCompositeFieldContainer[PairUsage]
    rates: InterfaceRates
    bare: bool
    def __init__(self, statistics: _Optional[_Union[Statistics, _Mapping]] = ..., waiting: _Optional[_Iterable[_Union[Waiting, _Mapping]]] = ..., ranks: _Optional[_Iterable[_Union[RankPace, _Mapping]]] = ..., servers: _Optional[_Iterable[_Union[ServerPace, _Mapping]]] = ..., shadow: _Optional[_Union[ShadowProtection, _Mapping]] = ..., steps: _Optional[_Iterable[_Union[RankSteps, _Mapping]]] = ..., calls: _Optional[_Iterable[_Union[UnnamedCall, _Mapping]]] = ..., progress: _Optional[_Iterable[_Union[RankProgress, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[LinkUsage, _Mapping]]] = ..., spans: _Optional[_Iterable[_Union[RankSpans, _Mapping]]] = ..., pairs: _Optional[_Iterable[_Union[PairUsage, _Mapping]]] = ..., rates: _Optional[_Union[InterfaceRates, _Mapping]] = ..., bare: bool = ...) -> None: ...

class RankSpans(_message.Message):
    __slots__ = ("rank", "elapsed_s", "own_s", "parts", "stage")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    OWN_S_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    elapsed_s: float
    own_s: float
    parts: _containers.RepeatedCompositeFieldContainer[SpanPart]
    stage: int
    def __init__(self, rank: _Optional[int] = ..., elapsed_s: _Optional[float] = ..., own_s: _Optional[float] = ..., parts: _Optional[_Iterable[_Union[SpanPart, _Mapping]]] = ..., stage: _Optional[int] = ...) -> None: ...

class SpanPart(_message.Message):
    __slots__ = ("kind", "count", "own_s", "squares_s2")
    KIND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    OWN_S_FIELD_NUMBER: _ClassVar[int]
    SQUARES_S2_FIELD_NUMBER: _ClassVar[int]
    kind: int
    count: int
    own_s: float
    squares_s2: float
    def __init__(self, kind: _Optional[int] = ..., count: _Optional[int] = ..., own_s: _Optional[float] = ..., squares_s2: _Optional[float] = ...) -> None: ...

class RankProgress(_message.Message):
    __slots__ = ("rank", "steps", "step_s", "last_step_at_s", "tokens", "samples", "exposed_s", "result_bytes", "recoveries", "tokens_per_s", "exposed_share")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_AT_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    RESULT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECOVERIES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_SHARE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    steps: int
    step_s: float
    last_step_at_s: float
    tokens: int
    samples: int
    exposed_s: float
    result_bytes: int
    recoveries: int
    tokens_per_s: float
    exposed_share: float
    def __init__(self, rank: _Optional[int] = ..., steps: _Optional[int] = ..., step_s: _Optional[float] = ..., last_step_at_s: _Optional[float] = ..., tokens: _Optional[int] = ..., samples: _Optional[int] = ..., exposed_s: _Optional[float] = ..., result_bytes: _Optional[int] = ..., recoveries: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., exposed_share: _Optional[float] = ...) -> None: ...

class LinkUsage(_message.Message):
    __slots__ = ("peer", "bytes", "busy_s", "unread_s")
    PEER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    UNREAD_S_FIELD_NUMBER: _ClassVar[int]
    peer: int
    bytes: int
    busy_s: float
    unread_s: float
    def __init__(self, peer: _Optional[int] = ..., bytes: _Optional[int] = ..., busy_s: _Optional[float] = ..., unread_s: _Optional[float] = ...) -> None: ...

class InterfaceRates(_message.Message):
    __slots__ = ("sent_bytes", "sent_s", "received_bytes", "received_s")
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_S_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_S_FIELD_NUMBER: _ClassVar[int]
    sent_bytes: int
    sent_s: float
    received_bytes: int
    received_s: float
    def __init__(self, sent_bytes: _Optional[int] = ..., sent_s: _Optional[float] = ..., received_bytes: _Optional[int] = ..., received_s: _Optional[float] = ...) -> None: ...

class PairUsage(_message.Message):
    __slots__ = ("machine_index", "bytes", "busy_s", "unread_s", "relayed_bytes", "relayed_busy_s")
    MACHINE_INDEX_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    UNREAD_S_FIELD_NUMBER: _ClassVar[int]
    RELAYED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RELAYED_BUSY_S_FIELD_NUMBER: _ClassVar[int]
    machine_index: int
    bytes: int
    busy_s: float
    unread_s: float
    relayed_bytes: int
    relayed_busy_s: float
    def __init__(self, machine_index: _Optional[int] = ..., bytes: _Optional[int] = ..., busy_s: _Optional[float] = ..., unread_s: _Optional[float] = ..., relayed_bytes: _Optional[int] = ..., relayed_busy_s: _Optional[float] = ...) -> None: ...

class UnnamedCall(_message.Message):
    __slots__ = ("name", "rank", "rounds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    rank: int
    rounds: int
    def __init__(self, name: _Optional[str] = ..., rank: _Optional[int] = ..., rounds: _Optional[int] = ...) -> None: ...

class ShadowProtection(_message.Message):
    __slots__ = ("step", "survives")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SURVIVES_FIELD_NUMBER: _ClassVar[int]
    step: int
    survives: str
    def __init__(self, step: _Optional[int] = ..., survives: _Optional[str] = ...) -> None: ...

class RankSteps(_message.Message):
    __slots__ = ("rank", "sequence", "steps", "optimizers")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZERS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    sequence: str
    steps: int
    optimizers: int
    def __init__(self, rank: _Optional[int] = ..., sequence: _Optional[str] = ..., steps: _Optional[int] = ..., optimizers: _Optional[int] = ...) -> None: ...

class RankPace(_message.Message):
    __slots__ = ("rank", "step_s", "wait_s", "pid", "last_step_s", "last_wait_s", "row_step_s", "row_waited")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_S_FIELD_NUMBER: _ClassVar[int]
    LAST_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    ROW_STEP_S_FIELD_NUMBER: _ClassVar[int]
    ROW_WAITED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    step_s: float
    wait_s: float
    pid: int
    last_step_s: float
    last_wait_s: float
    row_step_s: float
    row_waited: float
    def __init__(self, rank: _Optional[int] = ..., step_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., pid: _Optional[int] = ..., last_step_s: _Optional[float] = ..., last_wait_s: _Optional[float] = ..., row_step_s: _Optional[float] = ..., row_waited: _Optional[float] = ...) -> None: ...

class ServerPace(_message.Message):
    __slots__ = ("member_id", "answer_s", "ratio", "awaited", "row_answer_s", "row_ratio")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ANSWER_S_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    ROW_ANSWER_S_FIELD_NUMBER: _ClassVar[int]
    ROW_RATIO_FIELD_NUMBER: _ClassVar[int]
    member_id: int
    answer_s: float
    ratio: float
    awaited: float
    row_answer_s: float
    row_ratio: float
    def __init__(self, member_id: _Optional[int] = ..., answer_s: _Optional[float] = ..., ratio: _Optional[float] = ..., awaited: _Optional[float] = ..., row_answer_s: _Optional[float] = ..., row_ratio: _Optional[float] = ...) -> None: ...

class Statistics(_message.Message):
    __slots__ = ("bytes_received", "bytes_sent", "bytes_local", "rounds", "bytes_summed", "cpu_s", "resident_bytes", "bytes_in_flight", "credit_bytes", "queued", "repetitions", "bytes_relayed", "shadow_steps", "shadow_waiting_bytes")
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_LOCAL_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_SUMMED_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    REPETITIONS_FIELD_NUMBER: _ClassVar[int]
    BYTES_RELAYED_FIELD_NUMBER: _ClassVar[int]
    SHADOW_STEPS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_WAITING_BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes_received: int
    bytes_sent: int
    bytes_local: int
    rounds: int
    bytes_summed: int
    cpu_s: float
    resident_bytes: int
    bytes_in_flight: int
    credit_bytes: int
    queued: int
    repetitions: int
    bytes_relayed: int
    shadow_steps: int
    shadow_waiting_bytes: int
    def __init__(self, bytes_received: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., bytes_local: _Optional[int] = ..., rounds: _Optional[int] = ..., bytes_summed: _Optional[int] = ..., cpu_s: _Optional[float] = ..., resident_bytes: _Optional[int] = ..., bytes_in_flight: _Optional[int] = ..., credit_bytes: _Optional[int] = ..., queued: _Optional[int] = ..., repetitions: _Optional[int] = ..., bytes_relayed: _Optional[int] = ..., shadow_steps: _Optional[int] = ..., shadow_waiting_bytes: _Optional[int] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("name", "round", "ready_ranks", "age_s", "group")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    READY_RANKS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    name: str
    round: int
    ready_ranks: _containers.RepeatedScalarFieldContainer[int]
    age_s: float
    group: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., round: _Optional[int] = ..., ready_ranks: _Optional[_Iterable[int]] = ..., age_s: _Optional[float] = ..., group: _Optional[_Iterable[int]] = ...) -> None: ...

class Declare(_message.Message):
    __slots__ = ("ballots",)
    BALLOTS_FIELD_NUMBER: _ClassVar[int]
    ballots: _containers.RepeatedCompositeFieldContainer[Ballot]
    def __init__(self, ballots: _Optional[_Iterable[_Union[Ballot, _Mapping]]] = ...) -> None: ...

class Ballot(_message.Message):
    __slots__ = ("name", "generation", "votes", "rounds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    generation: int
    votes: _containers.RepeatedCompositeFieldContainer[Vote]
    rounds: int
    def __init__(self, name: _Optional[str] = ..., generation: _Optional[int] = ..., votes: _Optional[_Iterable[_Union[Vote, _Mapping]]] = ..., rounds: _Optional[int] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("ranks", "spec")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    spec: bytes
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., spec: _Optional[bytes] = ...) -> None: ...

class Arrive(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("error", "message")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    error: str
    message: str
    def __init__(self, error: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Reform(_message.Message):
    __slots__ = ("reason", "planned")
    REASON_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    reason: str
    planned: bool
    def __init__(self, reason: _Optional[str] = ..., planned: bool = ...) -> None: ...

class Gathered(_message.Message):
    __slots__ = ("ranks", "others", "epoch", "newcomers", "synced_in", "shut_down")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEWCOMERS_FIELD_NUMBER: _ClassVar[int]
    SYNCED_IN_FIELD_NUMBER: _ClassVar[int]
    SHUT_DOWN_FIELD_NUMBER: _ClassVar[int]
    ranks: int
    others: bool
    epoch: int
    newcomers: bool
    synced_in: int
    shut_down: int
    def __init__(self, ranks: _Optional[int] = ..., others: bool = ..., epoch: _Optional[int] = ..., newcomers: bool = ..., synced_in: _Optional[int] = ..., shut_down: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Applied(_message.Message):
    __slots__ = ("epoch", "moved")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    moved: int
    def __init__(self, epoch: _Optional[int] = ..., moved: _Optional[int] = ...) -> None: ...

class Unreachable(_message.Message):
    __slots__ = ("member_id", "reason", "is_sure")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_SURE_FIELD_NUMBER: _ClassVar[int]
    member_id: int
    reason: str
    is_sure: bool
    def __init__(self, member_id: _Optional[int] = ..., reason: _Optional[str] = ..., is_sure: bool = ...) -> None: ...

class Still(_message.Message):
    __slots__ = ("member_id",)
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    member_id: int
    def __init__(self, member_id: _Optional[int] = ...) -> None: ...

class StackReport(_message.Message):
    __slots__ = ("rank", "text")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    text: str
    def __init__(self, rank: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class RanksShutDown(_message.Message):
    __slots__ = ("ranks", "epoch")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    epoch: int
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., epoch: _Optional[int] = ...) -> None: ...

class KeepStates(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("rank", "last")
    RANK_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    rank: int
    last: _containers.RepeatedCompositeFieldContainer[LastRound]
    def __init__(self, rank: _Optional[int] = ..., last: _Optional[_Iterable[_Union[LastRound, _Mapping]]] = ...) -> None: ...

class LastRound(_message.Message):
    __slots__ = ("name", "generation", "round")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    name: str
    generation: int
    round: int
    def __init__(self, name: _Optional[str] = ..., generation: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class Idle(_message.Message):
    __slots__ = ("direct_round",)
    DIRECT_ROUND_FIELD_NUMBER: _ClassVar[int]
    direct_round: int
    def __init__(self, direct_round: _Optional[int] = ...) -> None: ...

class Measured(_message.Message):
    __slots__ = ("turn", "mbit")
    TURN_FIELD_NUMBER: _ClassVar[int]
    MBIT_FIELD_NUMBER: _ClassVar[int]
    turn: int
    mbit: float
    def __init__(self, turn: _Optional[int] = ..., mbit: _Optional[float] = ...) -> None: ...

class Probed(_message.Message):
    __slots__ = ("number", "mbit")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MBIT_FIELD_NUMBER: _ClassVar[int]
    number: int
    mbit: float
    def __init__(self, number: _Optional[int] = ..., mbit: _Optional[float] = ...) -> None: ...

class SchedulerMessage(_message.Message):
    __slots__ = ("number", "received", "packed", "welcome", "refused", "membership", "verdicts", "reopen", "release", "stalled", "failure", "stop", "measure", "joined", "all_joined", "stack_report", "hosts", "still", "slow", "dismissed", "ask", "relays", "probe", "change")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    REOPEN_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    ALL_JOINED_FIELD_NUMBER: _ClassVar[int]
    STACK_REPORT_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    STILL_FIELD_NUMBER: _ClassVar[int]
    SLOW_FIELD_NUMBER: _ClassVar[int]
    DISMISSED_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    number: int
    received: int
    packed: bytes
    welcome: Welcome
    refused: Refused
    membership: Membership
    verdicts: Verdicts
    reopen: Reopen
    release: Release
    stalled: Stalled
    failure: Failure
    stop: Stop
    measure: Measure
    joined: Join
    all_joined: AllJoined
    stack_report: StackReport
    hosts: Hosts
    still: Still
    slow: Slow
    dismissed: Dismissed
    ask: Ask
    relays: Relays
    probe: Probe
    change: MembershipChange
    def __init__(self, number: _Optional[int] = ..., received: _Optional[int] = ..., packed: _Optional[bytes] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., membership: _Optional[_Union[Membership, _Mapping]] = ..., verdicts: _Optional[_Union[Verdicts, _Mapping]] = ..., reopen: _Optional[_Union[Reopen, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., stalled: _Optional[_Union[Stalled, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., measure: _Optional[_Union[Measure, _Mapping]] = ..., joined: _Optional[_Union[Join, _Mapping]] = ..., all_joined: _Optional[_Union[AllJoined, _Mapping]] = ..., stack_report: _Optional[_Union[StackReport, _Mapping]] = ..., hosts: _Optional[_Union[Hosts, _Mapping]] = ..., still: _Optional[_Union[Still, _Mapping]] = ..., slow: _Optional[_Union[Slow, _Mapping]] = ..., dismissed: _Optional[_Union[Dismissed, _Mapping]] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ..., relays: _Optional[_Union[Relays, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., change: _Optional[_Union[MembershipChange, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("member_id",)
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    member_id: int
    def __init__(self, member_id: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("error", "message", "later", "unknown", "replaced")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LATER_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    error: str
    message: str
    later: bool
    unknown: bool
    replaced: bool
    def __init__(self, error: _Optional[str] = ..., message: _Optional[str] = ..., later: bool = ..., unknown: bool = ..., replaced: bool = ...) -> None: ...

class Measure(_message.Message):
    __slots__ = ("turn", "address")
    TURN_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    turn: int
    address: str
    def __init__(self, turn: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("number", "addresses", "known_mbit", "usual_mbit")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    KNOWN_MBIT_FIELD_NUMBER: _ClassVar[int]
    USUAL_MBIT_FIELD_NUMBER: _ClassVar[int]
    number: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    known_mbit: float
    usual_mbit: float
    def __init__(self, number: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., known_mbit: _Optional[float] = ..., usual_mbit: _Optional[float] = ...) -> None: ...

class Membership(_message.Message):
    __slots__ = ("epoch", "workers", "servers", "partition_bytes", "workers_since", "reason", "continued", "under_way")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_SINCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CONTINUED_FIELD_NUMBER: _ClassVar[int]
    UNDER_WAY_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    workers: _containers.RepeatedCompositeFieldContainer[Member]
    servers: _containers.RepeatedCompositeFieldContainer[Member]
    partition_bytes: int
    workers_since: int
    reason: str
    continued: bool
    under_way: bool
    def __init__(self, epoch: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., servers: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., partition_bytes: _Optional[int] = ..., workers_since: _Optional[int] = ..., reason: _Optional[str] = ..., continued: bool = ..., under_way: bool = ...) -> None: ...

class MembershipChange(_message.Message):
    __slots__ = ("since", "facts", "workers", "servers")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    since: int
    facts: Membership
    workers: MemberChanges
    servers: MemberChanges
    def __init__(self, since: _Optional[int] = ..., facts: _Optional[_Union[Membership, _Mapping]] = ..., workers: _Optional[_Union[MemberChanges, _Mapping]] = ..., servers: _Optional[_Union[MemberChanges, _Mapping]] = ...) -> None: ...

class MemberChanges(_message.Message):
    __slots__ = ("runs", "weights", "link_mbit")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    LINK_MBIT_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[MemberRun]
    weights: _containers.RepeatedScalarFieldContainer[int]
    link_mbit: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, runs: _Optional[_Iterable[_Union[MemberRun, _Mapping]]] = ..., weights: _Optional[_Iterable[int]] = ..., link_mbit: _Optional[_Iterable[float]] = ...) -> None: ...

class MemberRun(_message.Message):
    __slots__ = ("first", "count", "added")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    added: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ..., added: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("member_id", "role", "kind", "machine_id", "machine_index", "address", "local_address", "local_size", "first_rank", "host", "pid", "weight", "link_mbit", "memory_bytes")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MACHINE_ID_FIELD_NUMBER: _ClassVar[int]
    MACHINE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_SIZE_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    LINK_MBIT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    member_id: int
    role: Role
    kind: MachineKind
    machine_id: str
    machine_index: int
    address: str
    local_address: str
    local_size: int
    first_rank: int
    host: str
    pid: int
    weight: int
    link_mbit: float
    memory_bytes: int
    def __init__(self, member_id: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., kind: _Optional[_Union[MachineKind, str]] = ..., machine_id: _Optional[str] = ..., machine_index: _Optional[int] = ..., address: _Optional[str] = ..., local_address: _Optional[str] = ..., local_size: _Optional[int] = ..., first_rank: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., weight: _Optional[int] = ..., link_mbit: _Optional[float] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class Verdicts(_message.Message):
    __slots__ = ("verdicts",)
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    verdicts: _containers.RepeatedCompositeFieldContainer[Verdict]
    def __init__(self, verdicts: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("name", "generation", "spec", "error", "late", "rounds", "unsupported")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    UNSUPPORTED_FIELD_NUMBER: _ClassVar[int]
    name: str
    generation: int
    spec: bytes
    error: str
    late: _containers.RepeatedScalarFieldContainer[int]
    rounds: int
    unsupported: bool
    def __init__(self, name: _Optional[str] = ..., generation: _Optional[int] = ..., spec: _Optional[bytes] = ..., error: _Optional[str] = ..., late: _Optional[_Iterable[int]] = ..., rounds: _Optional[int] = ..., unsupported: bool = ...) -> None: ...

class Reopen(_message.Message):
    __slots__ = ("name", "generation", "rounds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    generation: int
    rounds: int
    def __init__(self, name: _Optional[str] = ..., generation: _Optional[int] = ..., rounds: _Optional[int] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class AllJoined(_message.Message):
    __slots__ = ("last", "direct_round")
    LAST_FIELD_NUMBER: _ClassVar[int]
    DIRECT_ROUND_FIELD_NUMBER: _ClassVar[int]
    last: int
    direct_round: int
    def __init__(self, last: _Optional[int] = ..., direct_round: _Optional[int] = ...) -> None: ...

class Stalled(_message.Message):
    __slots__ = ("message", "missing", "tensor")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    message: str
    missing: _containers.RepeatedScalarFieldContainer[int]
    tensor: str
    def __init__(self, message: _Optional[str] = ..., missing: _Optional[_Iterable[int]] = ..., tensor: _Optional[str] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("error", "message", "orderly", "ranks", "group_only")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ORDERLY_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    GROUP_ONLY_FIELD_NUMBER: _ClassVar[int]
    error: str
    message: str
    orderly: bool
    ranks: _containers.RepeatedScalarFieldContainer[int]
    group_only: bool
    def __init__(self, error: _Optional[str] = ..., message: _Optional[str] = ..., orderly: bool = ..., ranks: _Optional[_Iterable[int]] = ..., group_only: bool = ...) -> None: ...

class Hosts(_message.Message):
    __slots__ = ("added", "removed")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    added: bool
    removed: bool
    def __init__(self, added: bool = ..., removed: bool = ...) -> None: ...

class Slow(_message.Message):
    __slots__ = ("message", "unserved")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    UNSERVED_FIELD_NUMBER: _ClassVar[int]
    message: str
    unserved: bool
    def __init__(self, message: _Optional[str] = ..., unserved: bool = ...) -> None: ...

class Relays(_message.Message):
    __slots__ = ("relays",)
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    relays: _containers.RepeatedCompositeFieldContainer[Relay]
    def __init__(self, relays: _Optional[_Iterable[_Union[Relay, _Mapping]]] = ...) -> None: ...

class Relay(_message.Message):
    __slots__ = ("first_machine", "second_machine", "address")
    FIRST_MACHINE_FIELD_NUMBER: _ClassVar[int]
    SECOND_MACHINE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    first_machine: int
    second_machine: int
    address: str
    def __init__(self, first_machine: _Optional[int] = ..., second_machine: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class Dismissed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Stop(_message.Message):
    __slots__ = ("reason", "keep_states")
    REASON_FIELD_NUMBER: _ClassVar[int]
    KEEP_STATES_FIELD_NUMBER: _ClassVar[int]
    reason: str
    keep_states: bool
    def __init__(self, reason: _Optional[str] = ..., keep_states: bool = ...) -> None: ...

class CollectRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("request", "recordings", "ends_trace")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RECORDINGS_FIELD_NUMBER: _ClassVar[int]
    ENDS_TRACE_FIELD_NUMBER: _ClassVar[int]
    request: int
    recordings: bool
    ends_trace: bool
    def __init__(self, request: _Optional[int] = ..., recordings: bool = ..., ends_trace: bool = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("request", "who", "recording", "error", "is_last", "received_ns", "sent_ns", "offset_ns", "error_ns", "member", "ranks")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_NS_FIELD_NUMBER: _ClassVar[int]
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_NS_FIELD_NUMBER: _ClassVar[int]
    ERROR_NS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    request: int
    who: str
    recording: bytes
    error: str
    is_last: bool
    received_ns: int
    sent_ns: int
    offset_ns: int
    error_ns: int
    member: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request: _Optional[int] = ..., who: _Optional[str] = ..., recording: _Optional[bytes] = ..., error: _Optional[str] = ..., is_last: bool = ..., received_ns: _Optional[int] = ..., sent_ns: _Optional[int] = ..., offset_ns: _Optional[int] = ..., error_ns: _Optional[int] = ..., member: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("state", "reason", "epoch", "members", "tensors", "tensor_bytes", "replicated_bytes", "sharded_bytes", "hosted_remarks", "partition_bytes", "num_workers", "num_servers", "stalled", "slow", "restarts", "shadow", "missing_workers", "awaited", "journal")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[StatusReply.State]
        STATE_FORMING: _ClassVar[StatusReply.State]
        STATE_RUNNING: _ClassVar[StatusReply.State]
        STATE_FAILED: _ClassVar[StatusReply.State]
        STATE_ENDED: _ClassVar[StatusReply.State]
    STATE_UNSPECIFIED: StatusReply.State
    STATE_FORMING: StatusReply.State
    STATE_RUNNING: StatusReply.State
    STATE_FAILED: StatusReply.State
    STATE_ENDED: StatusReply.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPLICATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOSTED_REMARKS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_SERVERS_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    SLOW_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    MISSING_WORKERS_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    state: StatusReply.State
    reason: str
    epoch: int
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    tensors: int
    tensor_bytes: int
    replicated_bytes: int
    sharded_bytes: int
    hosted_remarks: _containers.RepeatedScalarFieldContainer[str]
    partition_bytes: int
    num_workers: int
    num_servers: int
    stalled: _containers.RepeatedScalarFieldContainer[str]
    slow: _containers.RepeatedScalarFieldContainer[str]
    restarts: int
    shadow: ShadowProtection
    missing_workers: _containers.RepeatedScalarFieldContainer[int]
    awaited: _containers.RepeatedCompositeFieldContainer[AwaitedRank]
    journal: str
    def __init__(self, state: _Optional[_Union[StatusReply.State, str]] = ..., reason: _Optional[str] = ..., epoch: _Optional[int] = ..., members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., tensors: _Optional[int] = ..., tensor_bytes: _Optional[int] = ..., replicated_bytes: _Optional[int] = ..., sharded_bytes: _Optional[int] = ..., hosted_remarks: _Optional[_Iterable[str]] = ..., partition_bytes: _Optional[int] = ..., num_workers: _Optional[int] = ..., num_servers: _Optional[int] = ..., stalled: _Optional[_Iterable[str]] = ..., slow: _Optional[_Iterable[str]] = ..., restarts: _Optional[int] = ..., shadow: _Optional[_Union[ShadowProtection, _Mapping]] = ..., missing_workers: _Optional[_Iterable[int]] = ..., awaited: _Optional[_Iterable[_Union[AwaitedRank, _Mapping]]] = ..., journal: _Optional[str] = ...) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("member", "alive", "heartbeat_age_s", "statistics", "doubt", "left", "progress")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    DOUBT_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    member: Member
    alive: bool
    heartbeat_age_s: float
    statistics: Statistics
    doubt: str
    left: bool
    progress: _containers.RepeatedCompositeFieldContainer[RankProgress]
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., alive: bool = ..., heartbeat_age_s: _Optional[float] = ..., statistics: _Optional[_Union[Statistics, _Mapping]] = ..., doubt: _Optional[str] = ..., left: bool = ..., progress: _Optional[_Iterable[_Union[RankProgress, _Mapping]]] = ...) -> None: ...

class AwaitedRank(_message.Message):
    __slots__ = ("rank", "age_s")
    RANK_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    rank: int
    age_s: float
    def __init__(self, rank: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class StopReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("servers", "addresses")
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    servers: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, servers: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class ScaleReply(_message.Message):
    __slots__ = ("error", "servers")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    error: str
    servers: int
    def __init__(self, error: _Optional[str] = ..., servers: _Optional[int] = ...) -> None: ...

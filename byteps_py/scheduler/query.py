"""Requests to a running scheduler from outside its job: `bps status`, `stop` and `scale`, health checks. Any thread.

``to_dict`` gives a status as plain values: ``bps status --json`` prints it, and ``BYTEPS_REPORT`` holds it at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from byteps_py.config.settings import Settings
from byteps_py.errors import UsageError
from byteps_py.proto import control_pb2 as pb
from byteps_py.system import jobs
from byteps_py.system.log import silence_grpc
from byteps_py.wording import count_text, sendable

_RETRY_S = 0.1
_GRACE_S = 10.0
_MOST_RETRIES_S = 4.0  # a scheduler that has a secret hangs up on a process without one, again and again
STATE_WORDS = {1: "forming", 2: "running", 3: "failed", 4: "ended"}


def status(settings: Settings, timeout_s: float = 5.0) -> pb.StatusReply:
    """The job's members, their traffic and their waits, as the scheduler of ``settings`` knows them.

    Raises RendezvousError (no scheduler there, or another secret), StallError (no answer in ``timeout_s``),
    ConfigurationError (no address).
    """
    reply: pb.StatusReply = _ask(settings, "Status", pb.StatusRequest(), timeout_s)
    return reply


def stop(settings: Settings, reason: str, timeout_s: float = 5.0) -> None:
    """Let the scheduler end its job in order; returns when it has told its members. Raises like ``status``."""
    _ask(settings, "Stop", pb.StopRequest(reason=sendable(reason)), timeout_s)


def scale(settings: Settings, servers: int, addresses: Sequence[str], timeout_s: float = 5.0) -> int:
    """Drain the servers at these addresses, and then CPU machines until ``servers`` are left (-1: any number). Returns
    how many stay, as soon as keys begin to move. Raises like ``status``, and UsageError if the job can't do it."""
    request = pb.ScaleRequest(servers=servers, addresses=addresses)
    reply: pb.ScaleReply = _ask(settings, "Scale", request, timeout_s)
    if reply.error:
        raise UsageError(reply.error)
    return reply.servers


def collect(settings: Settings, timeout_s: float = 30.0) -> Iterator[pb.Answer]:
    """The contents of all members' flight recorders, as they come; an Answer with an error for each member that has
    none in ``timeout_s``. Raises like ``status``."""
    yield from _ask(settings, "Collect", pb.CollectRequest(timeout_s=timeout_s), timeout_s + _GRACE_S, is_stream=True)


def _ask(  # type: ignore[no-untyped-def]
    settings: Settings, method: str, request: object, timeout_s: float, is_stream: bool = False
):
    silence_grpc()
    import grpc

    from byteps_py.proto import control_pb2_grpc
    from byteps_py.scheduler import rpc

    settings = jobs.with_local_secret(settings)
    with rpc.open_channel(settings) as channel:
        stub = control_pb2_grpc.SchedulerStub(channel)  # type: ignore[no-untyped-call]
        began_s = time.monotonic()
        until_s = began_s + min(timeout_s, _MOST_RETRIES_S)
        while True:
            left_s = max(0.01, began_s + timeout_s - time.monotonic())
            try:
                answers = getattr(stub, method)(request, timeout=left_s, metadata=rpc.metadata(settings))
                return list(answers) if is_stream else answers
            except grpc.RpcError as error:
                if not rpc.is_dropped(error) or time.monotonic() + _RETRY_S >= until_s:
                    raise rpc.explain(settings.scheduler_address, error, timeout_s) from error
            time.sleep(_RETRY_S)


def to_dict(reply: pb.StatusReply) -> dict[str, Any]:
    """The reply as plain values: sizes in bytes, times in seconds; ``share`` is of all bytes summed."""
    total = sum(m.statistics.bytes_summed for m in reply.members)
    return {
        "state": STATE_WORDS.get(reply.state, "unknown"),
        "reason": reply.reason,
        "epoch": reply.epoch,
        "num_workers": reply.num_workers,
        "num_servers": reply.num_servers,
        "replicated_bytes": reply.replicated_bytes,
        "sharded_bytes": reply.sharded_bytes,
        "hosted_remarks": list(reply.hosted_remarks),
        "partition_bytes": reply.partition_bytes,
        "tensors": reply.tensors,
        "tensor_bytes": reply.tensor_bytes,
        "stalled": list(reply.stalled),
        "slow": list(reply.slow),
        "awaited_s": {str(each.rank): each.age_s for each in reply.awaited},
        "training": _training([each for member in reply.members for each in member.progress]),
        "shadow": {"step": reply.shadow.step, "survives": reply.shadow.survives} if reply.shadow.survives else None,
        "missing_workers": list(reply.missing_workers),
        "restarts": reply.restarts,
        "journal": reply.journal,
        "members": [_member(m, total) for m in reply.members],
    }


def _training(ranks: Sequence[pb.RankProgress]) -> dict[str, Any] | None:
    """Of all ranks together: the step of the rank that is behind all others, and of the one that is ahead; the longest
    time of a step; the sum of tokens; the mean share of waiting. None before the first step."""
    if not any(rank.steps for rank in ranks):
        return None
    return {
        "step": min(rank.steps for rank in ranks),
        "furthest_step": max(rank.steps for rank in ranks),
        "step_s": max(rank.step_s for rank in ranks),
        "tokens_per_s": sum(rank.tokens_per_s for rank in ranks),
        "exposed_communication_ratio": sum(rank.exposed_share for rank in ranks) / len(ranks),
        "recoveries": max(rank.recoveries for rank in ranks),
    }


def training_text(training: dict[str, Any]) -> str:
    """That of ``to_dict`` in words.

    >>> training_text({"step": 12, "furthest_step": 13, "step_s": 0.25, "tokens_per_s": 4e4, "recoveries": 0,
    ...                "exposed_communication_ratio": 0.081})
    'training: step 12 to 13, 0.25 s each, 40,000 tokens/s, 8% of the time waiting for communication'
    """
    step, furthest = training["step"], training["furthest_step"]
    parts = [f"step {step:,}" if step == furthest else f"step {step:,} to {furthest:,}"]
    if training["step_s"]:
        parts.append(f"{training['step_s']:.3g} s each")
    if training["tokens_per_s"]:
        parts.append(f"{training['tokens_per_s']:,.0f} tokens/s")
    parts.append(f"{training['exposed_communication_ratio']:.0%} of the time waiting for communication")
    if training["recoveries"]:
        parts.append(f"gone on after {count_text(training['recoveries'], 'change')} of the group")
    return f"training: {', '.join(parts)}"


def _member(status: pb.MemberStatus, total_summed: int) -> dict[str, Any]:
    member, counters = status.member, status.statistics
    is_worker = member.role == 1
    return {
        "member_id": member.member_id,
        "kind": "worker" if is_worker else "server",
        "machine": f"{'CPU' if member.kind == 2 else f'GPU {member.machine_index}'}",
        "machine_id": member.machine_id,
        "host": member.host,
        "pid": member.pid,
        "address": member.address,
        "first_rank": member.first_rank if is_worker else None,
        "local_size": member.local_size if is_worker else None,
        "weight": 0 if is_worker else member.weight,
        "link_mbit": member.link_mbit,
        "alive": status.alive,
        "left": status.left,
        "doubt": status.doubt,
        "heartbeat_age_s": status.heartbeat_age_s,
        "bytes_received": counters.bytes_received,
        "bytes_sent": counters.bytes_sent,
        "bytes_local": counters.bytes_local,
        "bytes_relayed": counters.bytes_relayed,
        "bytes_in_flight": counters.bytes_in_flight,
        "bytes_summed": counters.bytes_summed,
        "share": counters.bytes_summed / total_summed if total_summed else 0.0,
        "rounds": counters.rounds,
        "cpu_s": counters.cpu_s,
        "resident_bytes": counters.resident_bytes,
        "ranks": [
            {field.name: getattr(rank, field.name) for field in pb.RankProgress.DESCRIPTOR.fields}
            for rank in status.progress
        ],
    }

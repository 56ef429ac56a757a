"""A job's state as plain values: what ``bps status --json`` prints and ``BYTEPS_REPORT`` holds at the end. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from byteps_py.proto import control_pb2 as pb


STATE_WORDS = {1: "forming", 2: "running", 3: "failed", 4: "ended"}


def to_dict(reply: pb.StatusReply) -> dict[str, Any]:
    """The reply as plain values: sizes in bytes, times in seconds; ``share`` is of all bytes summed."""
    total = sum(m.statistics.bytes_summed for m in reply.members)
    return {
        "state": STATE_WORDS.get(reply.state, "unknown"),
        "reason": reply.reason,
        "epoch": reply.epoch,
        "num_workers": reply.num_workers,
        "num_servers": reply.num_servers,
        "partition_bytes": reply.partition_bytes,
        "tensors": reply.tensors,
        "tensor_bytes": reply.tensor_bytes,
        "stalled": list(reply.stalled),
        "slow": list(reply.slow),
        "shadow": {"step": reply.shadow.step, "survives": reply.shadow.survives} if reply.shadow.survives else None,
        "restarts": reply.restarts,
        "journal": reply.journal,
        "members": [_member(m, total) for m in reply.members],
    }


def _member(status: pb.MemberStatus, total_summed: int) -> dict[str, Any]:
    member, counters = status.member, status.statistics
    is_worker = member.role == 1
    return {
        "kind": "worker" if is_worker else "server",
        "machine": f"{'CPU' if member.kind == 2 else f'GPU {member.machine_index}'}",
        "machine_id": member.machine_id,
        "host": member.host,
        "pid": member.pid,
        "address": member.address,
        "first_rank": member.first_rank if is_worker else None,
        "local_size": member.local_size if is_worker else None,
        "alive": status.alive,
        "left": status.left,
        "doubt": status.doubt,
        "heartbeat_age_s": status.heartbeat_age_s,
        "bytes_received": counters.bytes_received,
        "bytes_sent": counters.bytes_sent,
        "bytes_local": counters.bytes_local,
        "bytes_in_flight": counters.bytes_in_flight,
        "bytes_summed": counters.bytes_summed,
        "share": counters.bytes_summed / total_summed if total_summed else 0.0,
        "rounds": counters.rounds,
        "cpu_s": counters.cpu_s,
        "resident_bytes": counters.resident_bytes,
    }

"""Spans as the files that torch leaves behind: flight recorder dumps, and Kineto's traces of nccl operations."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

from byteps_py.tools.spans import Spans

_NAMES = {"dp": "mesh_dp", "pp": "mesh_pp", "cp": "mesh_cp", "tp": "mesh_tp"}


def recorder_dumps(spans: Spans) -> dict[int, dict[str, Any]]:
    """By rank, as the backend byteps records: with the times of each operation."""
    origin_s = float(spans.started_s.min()) - 1
    dumps: dict[int, dict[str, Any]] = {}
    for rank in sorted(set(spans.rank.tolist())):
        config = {
            str(number): {"name": str(number), "desc": _NAMES[group.dimension], "ranks": json.dumps(group.ranks)}
            for number, group in enumerate(spans.groups)
            if rank in group.ranks
        }
        dumps[rank] = {"version": "2.10", "pg_config": config, "entries": [], "host_name": spans.hosts.get(rank, "")}
    for at in range(len(spans.rank)):
        rank, number = int(spans.rank[at]), int(spans.group[at])
        group, operation = spans.groups[number], spans.operations[spans.operation[at]]
        is_message = operation in ("send", "recv")
        if is_message:
            me = group.ranks.index(rank)
            operation += f" {me}{'->' if operation == 'send' else '<-'}{1 - me}"
        start, end = (int((times[at] - origin_s) * 1e9) for times in (spans.started_s, spans.ended_s))
        dumps[rank]["entries"].append(
            {
                "process_group": (str(number), _NAMES[group.dimension]), "profiling_name": f"gloo:{operation}",
                "collective_seq_id": int(spans.sequence[at]), "p2p_seq_id": int(spans.sequence[at]),
                "is_p2p": is_message, "time_created_ns": start, "time_discovered_started_ns": start,
                "time_discovered_completed_ns": end, "state": "completed", "input_sizes": [[1 << 18]],
                "input_dtypes": ["Float"], "retired": True,
            }
        )  # fmt: skip
    return dumps


def profiler_traces(spans: Spans) -> dict[int, dict[str, Any]]:
    """By rank, as torch.profiler writes them for nccl."""
    names = {"all_gather": "allgather", "all_reduce": "allreduce", "reduce_scatter": "reduce_scatter"}
    traces: dict[int, dict[str, Any]] = {
        rank: {"distributedInfo": {"rank": rank, "backend": "nccl", "pg_config": []}, "traceEvents": []}
        for rank in sorted(set(spans.rank.tolist()))
    }
    for at in range(len(spans.rank)):
        rank, number = int(spans.rank[at]), int(spans.group[at])
        group, operation = spans.groups[number], spans.operations[spans.operation[at]]
        arguments = {
            "Collective name": names.get(operation, operation), "Process Group Name": str(number),
            "Process Group Description": _NAMES[group.dimension], "Process Group Ranks": json.dumps(group.ranks),
            "In msg nelems": 1 << 18, "dtype": "Float",
        }  # fmt: skip
        if operation in ("send", "recv"):
            arguments["Dst Rank" if operation == "send" else "Src Rank"] = sum(group.ranks) - rank
        traces[rank]["traceEvents"].append(
            {
                "ph": "X", "cat": "kernel", "name": f"ncclDevKernel_{operation}", "ts": spans.started_s[at] * 1e6,
                "dur": (spans.ended_s[at] - spans.started_s[at]) * 1e6, "args": arguments,
            }
        )  # fmt: skip
    return traces


def write_all(directory: Path, contents: dict[int, dict[str, Any]], kind: str) -> Path:
    """``kind``: pickle or json."""
    directory.mkdir(exist_ok=True)
    for rank, content in contents.items():
        data = pickle.dumps(content) if kind == "pickle" else json.dumps(content).encode()
        (directory / f"rank_{rank}{'' if kind == 'pickle' else '.json'}").write_bytes(data)
    return directory

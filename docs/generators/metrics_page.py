"""docs/reference/metrics.md: every metric, from the table of byteps_py/prometheus/metrics.py."""

from __future__ import annotations

from byteps_py.prometheus.metrics import LABELS, METRICS, RANK, SCHEDULER, SERVER, WORKER

_HEAD = """# Metrics

What the pages of [BYTEPS_METRICS_PORT](../howto/watch.md) have. `python docs/generators` makes this page from
byteps_py/prometheus/metrics.py.

Every line has the labels {labels}. A figure has the same name and the same labels on every page that it is on, so a
query that takes `max by (…)` first is right whether Prometheus scrapes one page of a job or all of them.

| label | value |
|---|---|
| `job` | the job's name: BYTEPS_JOB_ID, else the scheduler's address |
| `role` | `rank`, `worker` (a machine's communication service), `server`, `scheduler` |
| `machine` | `gpu-N` with the machine's number; `cpu-HOST:PORT`, the address of a CPU machine's server; else empty |
| | of a machine that waits for an elastic job's next group: `gpu-outside-HOST-PID` |
| `rank` | the rank's number; empty for services |

A process that restarts begins its counters at 0, which `rate()` and `increase()` allow for. The lines of a process that
has ended are gone from the next page on, and Prometheus marks them as stale.
"""
_PARTS = (
    (RANK, "Ranks", "On the page of the rank, of its machine's communication service, and of the scheduler."),
    (WORKER, "Communication services and summation servers", "On the page of the service, and of the scheduler."),
    (SCHEDULER, "The job", "On the scheduler's page."),
)


def text() -> str:
    parts = [_HEAD.format(labels=", ".join(f"`{label}`" for label in LABELS))]
    for role, title, where in _PARTS:
        of = (WORKER, SERVER) if role == WORKER else (role,)
        parts.append(f"## {title}\n\n{where}\n\n| metric | kind | of | meaning |\n|---|---|---|---|")
        for metric in METRICS:
            if set(metric.of) & set(of):
                extra = f" Label `{metric.extra[0]}`." if metric.extra else ""
                meaning = f"{metric.meaning}. {metric.detail}".strip() + extra
                parts.append(f"| `{metric.name}` | {metric.kind} | {', '.join(metric.of)} | {meaning} |")
        parts.append("")
    return "\n".join(parts)

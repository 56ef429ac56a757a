"""`bps top`: a running job as it changes: who waits for whom, what each link carries, what each server sums.

Two statuses of the scheduler are compared (``compare``, pure). Members report with their heartbeats, so each rate is
of the time between the two heartbeats of its member.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from byteps_py.cli.command import add_command, add_json
from byteps_py.cli.job_choice import add_job_choice, add_timeout, chosen_settings
from byteps_py.errors import PeerLostError, RendezvousError, UsageError
from byteps_py.system.terminal import LivePage, is_terminal
from byteps_py.wording import count_text

if TYPE_CHECKING:
    from byteps_py.config.settings import Settings

_COUNTERS = ("bytes_received", "bytes_sent", "bytes_summed")
_MOST_CHANGES = 8


@dataclass(frozen=True, slots=True)
class Sample:
    """``status``: as scheduler.query.to_dict gives it; ``at_s``: when it was asked for, by any steady clock."""

    status: dict[str, Any]
    at_s: float


def add_parser(subparsers: Any) -> None:
    """Add the command to `bps`."""
    parser = add_command(
        subparsers,
        "top",
        help="watch a job: who waits for whom, what links carry, what servers sum",
        description="Watch a running job. On a terminal the page is written again in place until Ctrl-C or the end of "
        "the job; elsewhere, and with --once or --json, it is printed once, after one interval. A server's share of "
        "the sums stands beside the share that placement gives it. The goodput of a link is that of the services: "
        "what ranks send to each other directly is not in it.",
        example="bps top --once",
        exits={0: "the job forms, runs or has ended well", 1: "it has failed, or does not answer"},
    )
    parser.add_argument("--once", action="store_true", help="print one page, and exit")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds from one page to the next; default 2"
    )
    add_job_choice(parser)
    add_timeout(parser)
    add_json(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the page, once or until the job is over."""
    if not 0.1 <= arguments.interval <= 3600:
        raise UsageError(f"--interval={arguments.interval:g}: give 0.1 to 3600 seconds")
    settings = chosen_settings(arguments)

    def sample() -> Sample:
        from byteps_py.scheduler import query

        return Sample(query.to_dict(query.status(settings, arguments.timeout)), time.monotonic())

    if arguments.once or arguments.json or not is_terminal(sys.stdout):
        before = sample()
        time.sleep(arguments.interval)
        found = compare(before, sample())
        print(json.dumps(found, indent=2) if arguments.json else to_page(found, changes(before.status, found)))
        return _exit_code(found)
    return _watch(settings, sample, arguments.interval)


def _watch(settings: Settings, sample: Callable[[], Sample], interval_s: float) -> int:
    """Write the page again and again, until the job is over or Ctrl-C."""
    before = sample()
    seen: list[str] = []
    found: dict[str, Any] = compare(before, before)
    over = ""
    try:
        with LivePage() as page:
            page.show(to_page(found, seen))
            while found["state"] not in ("failed", "ended"):
                time.sleep(interval_s)
                after = sample()
                found = compare(before, after)
                stamp = time.strftime("%H:%M:%S")
                seen = [*seen, *(f"{stamp} {text}" for text in changes(before.status, found))][-_MOST_CHANGES:]
                page.show(to_page(found, seen))
                before = after
    except KeyboardInterrupt:
        pass
    except (RendezvousError, PeerLostError):
        over = f"\nthe scheduler at {settings.scheduler_address} does not answer any more: the job is over"
    print(to_page(found, seen) + over)
    return _exit_code(found)


def _exit_code(found: dict[str, Any]) -> int:
    return int(found["state"] == "failed")


# ---- what two statuses say -------------------------------------------------------------------------------------


def compare(before: Sample, after: Sample) -> dict[str, Any]:
    """The page as plain values: rates in Mbit/s of payload, shares from 0 to 1, None where nothing is known.

    ``links``: one entry per machine, of its services together. ``servers``: ``share`` of what all servers summed
    between the samples, ``formula_share``: of the weights that placement uses.
    """
    status = after.status
    members = status["members"]
    earlier = {_process(member): member for member in before.status["members"]}
    progress = [_progress(member, earlier.get(_process(member)), before.at_s, after.at_s) for member in members]
    links: dict[str, dict[str, Any]] = {}
    for member, rates in zip(members, progress, strict=True):
        if not member["alive"]:
            continue
        link = links.setdefault(
            member["machine_id"],
            {
                "machine": member["machine"],
                "host": member["host"],
                "members": 0,
                "received_mbit": 0.0,
                "sent_mbit": 0.0,
                "link_mbit": member["link_mbit"] or None,
            },
        )
        link["members"] += 1
        link["received_mbit"] += rates["bytes_received"] * 8e-6
        link["sent_mbit"] += rates["bytes_sent"] * 8e-6
    servers = [
        (member, rates["bytes_summed"])
        for member, rates in zip(members, progress, strict=True)
        if member["kind"] == "server" and member["alive"]
    ]
    servers.sort(key=lambda server: _order(server[0]))
    summed = sum(rate for _, rate in servers)
    weights = sum(member["weight"] for member, _ in servers)
    lost = [member for member in members if not member["alive"] and not member["left"]]
    return {
        "state": status["state"],
        "reason": status["reason"],
        "interval_s": after.at_s - before.at_s,
        "training": status["training"],
        "waits": [*status["stalled"], *status["slow"]],
        "doubts": [f"{_name(member)}: {member['doubt']}" for member in members if member["doubt"]],
        "links": sorted(links.values(), key=_order),
        "servers": [
            {
                "machine": member["machine"],
                "address": member["address"].removeprefix("tcp://"),
                "summed_mbit": rate * 8e-6,
                "share": rate / summed if summed else None,
                "formula_share": member["weight"] / weights if weights else None,
            }
            for member, rate in servers
        ],
        "recoveries": {
            "epoch": status["epoch"],
            "scheduler_restarts": status["restarts"],
            "members_lost": [_name(member) for member in lost],
            "workers_awaited": status["missing_workers"],
        },
        "members": [
            {"process": _process(member), "name": _name(member), "state": _state(member)} for member in members
        ],
    }


def changes(before: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """The changes of members and of the group since the status ``before``: one sentence each."""
    then = {_process(member): _state(member) for member in before["members"]}
    said = []
    for member in found["members"]:
        was = then.get(member["process"])
        if was is None:
            said.append(f"{member['name']} has joined")
        elif was != member["state"]:
            said.append(f"{member['name']}: {member['state']}")
    recoveries = found["recoveries"]
    if recoveries["epoch"] > before["epoch"] > 0:
        said.append(f"epoch {recoveries['epoch']}: the members, or their shares, have changed")
    if recoveries["scheduler_restarts"] > before["restarts"]:
        said.append("the scheduler was started again, and has resumed the job")
    return said


def _progress(member: dict[str, Any], earlier: dict[str, Any] | None, then_s: float, now_s: float) -> dict[str, float]:
    """Bytes per second by counter. A member that was not there has begun with nothing, but nobody knows when."""
    if earlier is None:
        return dict.fromkeys(_COUNTERS, 0.0)
    took_s = (now_s - member["heartbeat_age_s"]) - (then_s - earlier["heartbeat_age_s"])
    if took_s <= 0:
        return dict.fromkeys(_COUNTERS, 0.0)
    return {name: max(0.0, member[name] - earlier[name]) / took_s for name in _COUNTERS}


def _process(member: dict[str, Any]) -> str:
    return f"{member['machine_id']}/{member['pid']}/{member['member_id']}"


def _state(member: dict[str, Any]) -> str:
    return "alive" if member["alive"] else "left" if member["left"] else "lost"


def _name(member: dict[str, Any]) -> str:
    return f"{member['kind']} of {member['machine']} ({member['host']}:{member['pid']})"


# ---- the page --------------------------------------------------------------------------------------------------


def to_page(found: dict[str, Any], seen: list[str]) -> str:
    """The page for people, without a final newline. ``seen``: the latest changes."""
    recoveries = found["recoveries"]
    lost = recoveries["members_lost"]
    lines = [
        f"{found['state']}: {found['reason']}",
        f"epoch {recoveries['epoch']}, {count_text(recoveries['scheduler_restarts'], 'restart')} of the scheduler, "
        f"{count_text(len(lost), 'member')} lost",
    ]
    if found["training"]:
        from byteps_py.scheduler.query import training_text

        lines.append(training_text(found["training"]))
    if recoveries["workers_awaited"]:
        lines.append(f"GPU machines that are lost and awaited: {', '.join(map(str, recoveries['workers_awaited']))}")
    lines += ["", "waits"]
    lines += [f"  {text}" for text in (*found["waits"], *found["doubts"])] or ["  nobody waits"]
    if found["links"]:
        rows: list[tuple[str, ...]] = [("link", "host", "in Mbit/s", "out Mbit/s", "rate Mbit/s", "busy")]
        rows += [_link_row(link) for link in found["links"]]
        lines += ["", *_table(rows, left=2)]
    if found["servers"]:
        rows = [("server", "address", "sums Mbit/s", "share", "formula")]
        rows += [
            (each["machine"], each["address"], f"{each['summed_mbit']:,.0f}", *map(_percent, _shares(each)))
            for each in found["servers"]
        ]
        lines += ["", *_table(rows, left=2)]
    if seen:
        lines += ["", "changes", *(f"  {text}" for text in seen)]
    return "\n".join(lines)


def _order(row: Mapping[str, Any]) -> tuple[object, ...]:
    """CPU machines first, then GPU machines by number."""
    return len(row["machine"]), row["machine"], row["host"]


def _shares(server: dict[str, Any]) -> tuple[float | None, float | None]:
    return server["share"], server["formula_share"]


def _link_row(link: dict[str, Any]) -> tuple[str, ...]:
    rate = link["link_mbit"]
    busiest = max(link["received_mbit"], link["sent_mbit"])
    return (
        link["machine"],
        link["host"],
        f"{link['received_mbit']:,.0f}",
        f"{link['sent_mbit']:,.0f}",
        f"{rate:,.0f}" if rate else "–",
        f"{busiest / rate:.0%}" if rate else "–",
    )


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _table(rows: list[tuple[str, ...]], left: int) -> list[str]:
    """``rows`` in columns, the first ``left`` of which are aligned to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        .rstrip()
        for row in rows
    ]  # fmt: skip

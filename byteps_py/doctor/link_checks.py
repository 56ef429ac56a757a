"""Looks at a running job from this machine: whether its scheduler answers, and how far each member's server is.

Servers are asked as a reader is, so a training notices nothing but the bytes: a fifth of a second of as much as the
link takes, in each direction, for each server. One thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from byteps_py.config.settings import Settings
from byteps_py.dataplane import long_links
from byteps_py.dataplane.dialer import Dialer, DialTarget, Owner
from byteps_py.doctor import Figures, Finding, fail, ok, warn
from byteps_py.errors import BytePSError, ProtocolError
from byteps_py.runtime import Runtime
from byteps_py.scheduler import query
from byteps_py.system import jobs
from byteps_py.system.loop import EventLoop
from byteps_py.wire.data_link import READER, Header, Kind
from byteps_py.worker.io.probe import Probe

_PROBE_BYTES = 64
_ROUND_TRIPS = 20
_LIMIT_S = 4.0
#: Slower answers are worth a remark: a training waits for several in each step.
_SLOW_S = 0.005


def check_job(
    settings: Settings, timeout_s: float, is_expected: bool, progress: Callable[[int, int], None]
) -> Iterator[Finding]:
    """The scheduler, then each member. ``is_expected``: the job is known to run. ``progress``: called with (members
    done, all of them)."""
    began_s = time.monotonic()
    try:
        status = query.to_dict(query.status(settings, timeout_s))
    except BytePSError as error:
        if is_expected:
            yield fail("scheduler", str(error), "start it, or name another one: --scheduler HOST:PORT")
        else:
            yield ok("scheduler", f"none answers at {settings.scheduler_address} yet: links were not measured")
        return
    took_ms = (time.monotonic() - began_s) * 1e3
    text = f"{settings.scheduler_address} answers in {took_ms:.0f} ms: {status['state']}, {status['reason']}"
    if status["state"] == "failed":
        yield fail("scheduler", text, "start the job again; its launchers' last lines say more")
    else:
        yield ok("scheduler", text, job_figures(status))
    settings = jobs.with_local_secret(settings)
    members = status["members"]
    for number, member in enumerate(members):
        progress(number, len(members))
        yield _check_member(settings, member)


def job_figures(status: dict[str, Any]) -> Figures:
    """The machines of a job, by the status of its scheduler: how many, the most and the fewest ranks of a machine, and
    the rate of the slowest link, as the members know it."""
    members = [member for member in status["members"] if member["alive"] and not member["left"]]
    workers = [member for member in members if member["kind"] == "worker"]
    cpu = {member["machine_id"] for member in members if member["machine"] == "CPU"}
    ranks = [member["local_size"] for member in workers]
    rates = [member["link_mbit"] for member in members if member["link_mbit"]]
    figures: Figures = {"gpu_machines": len({member["machine_id"] for member in workers}), "cpu_machines": len(cpu)}
    if ranks:
        figures |= {"most_ranks": max(ranks), "fewest_ranks": min(ranks)}
    return figures | ({"slowest_link_mbit": min(rates)} if rates else {})


def _check_member(settings: Settings, member: dict[str, Any]) -> Finding:
    subject = f"{member['kind']} {member['host']}:{member['pid']}"
    if not member["alive"]:
        if member["left"]:
            return ok(subject, "has left the job in order")
        return warn(subject, "is lost", "see its launcher's last lines; bps scale or its launcher start another one")
    if member["doubt"]:
        return warn(subject, member["doubt"], "see whether its machine is overloaded, or its network is cut")
    if member["kind"] == "worker":
        return ok(subject, f"heard {member['heartbeat_age_s']:.1f} s ago; its machine's link is that of its server")
    return check_server(settings, subject, member["address"], member["link_mbit"])


def check_server(settings: Settings, subject: str, address: str, expected_mbit: float) -> Finding:
    """The way to the summation service at ``address``, ``tcp://host:port``. ``expected_mbit``: the rate that placement
    uses; 0 if it has none."""
    found = measure_latency(settings, address)
    host = address.removeprefix("tcp://")
    if isinstance(found, str):
        return fail(
            subject,
            f"{host} can't be reached from here: {found}",
            f"open its port in the firewall between this machine and {host.rpartition(':')[0]}, or have it offer "
            "another address (DMLC_NODE_HOST, DMLC_INTERFACE)",
        )
    mbit = measure_rate(settings, address)
    text = f"{host}: {found * 1e6:,.0f} µs there and back, {mbit:,.0f} Mbit/s each way at the same time"
    if not mbit:
        return warn(subject, f"{text}: too few answers came in {_LIMIT_S:g} s", "see whether the link loses packets")
    figures: Figures = {"round_trip_s": found, "link_mbit": mbit}
    if found > _SLOW_S:
        remedy = "keep the machines of a job in one place: each step waits for several answers"
        if lacks := long_links.hindrance(settings):
            remedy += f"; {lacks}"
        return warn(subject, text, remedy, figures)
    return ok(subject, f"{text}; placement counts on {expected_mbit:,.0f}" if expected_mbit else text, figures)


def measure_latency(settings: Settings, address: str) -> float | str:
    """The median time of a round trip in seconds, or why there is none."""
    loop = EventLoop()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    trips = RoundTrips(loop)
    dialer = Dialer(context, loop, DialTarget(address, f"the server at {address}"), READER, settings, trips)
    trips.begin(dialer)
    loop.call_later(_LIMIT_S, loop.stop)
    try:
        loop.run()
    finally:
        dialer.close()
        context.term()
        loop.close()
    if len(trips.times_s) < _ROUND_TRIPS:
        return trips.error or f"no answer within {_LIMIT_S:g} s"
    return statistics.median(trips.times_s)


class RoundTrips(Owner):
    """Sends one small probe after another. ``times_s``: of those that came back; ``error``: why no more come."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._dialer: Dialer | None = None
        self._sent_s = 0.0
        self.times_s: list[float] = []
        self.error = ""

    def begin(self, dialer: Dialer) -> None:
        """Use this connection, once it is open."""
        self._dialer = dialer

    def on_open(self) -> None:
        """See Owner."""
        self._send()

    def _send(self) -> None:
        if self._dialer is not None:
            self._sent_s = time.perf_counter()
            self._dialer.send(Header(Kind.PROBE, READER, length=_PROBE_BYTES), bytes(_PROBE_BYTES))

    def on_message(self, header: Header, payload: zmq.Frame) -> None:
        """See Owner."""
        if header.kind is not Kind.PROBE:
            self.error = payload.bytes.decode(errors="replace").replace("\n", ": ")
            self._loop.stop()
            return
        self.times_s.append(time.perf_counter() - self._sent_s)
        if len(self.times_s) == _ROUND_TRIPS:
            self._loop.stop()
        else:
            self._send()

    def on_refused(self, error: ProtocolError) -> None:
        """See Owner."""
        self.error = str(error)
        self._loop.stop()


def measure_rate(settings: Settings, address: str) -> float:
    """Goodput each way at the same time in Mbit/s; 0 if too few answers came."""
    runtime = Runtime()
    found: list[float] = []

    def done(mbit: float) -> None:
        found.append(mbit)
        runtime.loop.stop()

    probe = Probe(runtime, settings, READER, address, done)
    try:
        runtime.loop.run()
    finally:
        probe.close()
        runtime.loop.close()
    return found[0]

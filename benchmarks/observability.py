"""What watching a training costs: the flight recorder, metrics with a scraper that asks every page each second, logs as
JSON, all of it; and the trace of the whole job.

    python -m benchmarks.observability [--rounds 4] [--turns 6] [--steps 50] [--json FILE]

All contenders are jobs of the same training, alive at the same time on two emulated machines and a CPU machine, and
take turns: one makes steps while the others wait in a read. So what else happens on the machine happens to all. Each
turn of a contender is compared with a turn of the job without anything ("off") just before or after it, and jobs are
started anew in each round: two jobs alike differ by some percent for as long as they live. The table has the median of
these differences, and the middle half of them; a machine that is used for other things meanwhile makes it
wide. Processor time is that of all of a job's processes: it also shows what idle cores hide. "off, again" is a second
job without anything: it differs by noise. A second table has what each thing that is done takes by itself, as a share
of a second, in which it is done once, or of a step.

To measure something else, add a row to CONTENDERS: its name, the variables of its job, and whether it is scraped.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.turns import Command, Job, measured, orders

MACHINES = 2
_PORTS = 4  # of each emulated machine, the CPU machine included: see byteps_py/prometheus/page.py
_SCRAPE_S = 1.0


class Contender(NamedTuple):
    """``variables``: of its job, beside those of all. ``is_scraped``: it has a port, and a scraper asks its pages."""

    name: str
    variables: dict[str, str]
    is_scraped: bool


JSON_LOGS = {"BYTEPS_LOG_FORMAT": "json", "BYTEPS_LOG_LEVEL": "INFO"}
NO_RECORDER = {"BYTEPS_FLIGHT_RECORDER_SIZE": "0"}
CONTENDERS = (
    Contender("off", NO_RECORDER, False),
    Contender("off, again", NO_RECORDER, False),
    Contender("flight recorder", {}, False),
    Contender("metrics", NO_RECORDER, True),
    Contender("logs as JSON", {**NO_RECORDER, **JSON_LOGS}, False),
    Contender("everything", JSON_LOGS, True),
    # All steps are in the window, and the job's end writes the file: the recording is measured.
    Contender(
        "trace", {"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_START_STEP": "0", "BYTEPS_TRACE_END_STEP": "1000000000"}, False
    ),
)


def main() -> None:
    """Run the benchmark, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="each with new jobs")
    parser.add_argument("--turns", type=int, default=6, help="of each contender in a round")
    parser.add_argument("--steps", type=int, default=50, help="in a turn")
    parser.add_argument("--width", type=int, default=1000, help="of the model: three layers of WIDTH x WIDTH")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        run_rank(arguments.width)
        return
    figures: Figures = {contender.name: [] for contender in CONTENDERS}
    for number in range(arguments.rounds):
        measure(figures, arguments.turns, arguments.steps, arguments.width)
        table = summary(figures)
        print(f"{to_text(table, arguments.steps)}\n\nafter round {number + 1} of {arguments.rounds}\n", flush=True)
    alone = pieces(statistics.median(turn["ms"] for turn in figures["off"]))
    print(alone_to_text(alone))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"steps": arguments.steps, "table": table, "pieces": alone, "turns": figures}, indent=1)
        )


def run_rank(width: int) -> None:
    """One rank: it trains for as many steps as it is told."""
    import torch

    import byteps_py as bps

    torch.set_num_threads(1)
    bps.init()
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(3)))
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model.named_parameters())
    data = torch.randn(64, width)

    def step() -> None:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        bps.count_batch(tokens=64 * width, samples=64)

    with orders() as words:
        for word, answer in words:
            answer(measured(step, int(word)))
    bps.shutdown()


#: By contender, of each of its turns: ms and processor ms of a step.
Figures = dict[str, list[dict[str, float]]]


def measure(figures: Figures, turns: int, steps: int, width: int) -> None:
    """Add the figures of a round."""
    with contextlib.ExitStack() as stack:
        jobs: dict[str, tuple[Job, Sequence[int]]] = {}
        traces = stack.enter_context(tempfile.TemporaryDirectory())
        for index, contender in enumerate(CONTENDERS):
            first = 21000 + index * _PORTS * (MACHINES + 1)
            variables = {"BYTEPS_TRACE_DIR": traces, **contender.variables}
            variables |= {"BYTEPS_METRICS_PORT": str(first)} if contender.is_scraped else {}
            words = [
                sys.executable, "-m", "byteps_py.launch", "-np", "1", "--machines", str(MACHINES), "--servers", "1",
                sys.executable, "-m", "benchmarks.observability", "--rank", "--width", str(width),
            ]  # fmt: skip
            job = Job(f"observability-{index}", MACHINES, [Command(words, variables)])
            stack.callback(job.close)
            job.meet()
            job.tell(str(steps))  # libraries are loaded, memory is touched
            jobs[contender.name] = job, pages(first) if contender.is_scraped else ()
        for turn in range(turns):
            for contender in CONTENDERS[1:]:
                pair = (CONTENDERS[0].name, contender.name)
                for name in pair if turn % 2 == 0 else pair[::-1]:
                    job, ports = jobs[name]
                    before = sum(job.cpu_s().values())
                    with scraping(ports):
                        answers = job.tell(str(steps))
                    used_s = sum(job.cpu_s().values()) - before
                    ms = max(answer["ms"] for answer in answers)
                    figures[name].append({"ms": ms, "cpu_ms": used_s / steps * 1e3})


def pages(first: int) -> list[int]:
    """The ports of all pages of the job, those of its scheduler, its machines and the CPU machine."""
    return [first, *(first + _PORTS * m + i for m in range(MACHINES) for i in (1, 2, 3)), first + _PORTS * MACHINES + 2]


@contextlib.contextmanager
def scraping(ports: Sequence[int]) -> Iterator[None]:
    """Meanwhile, ask for every page at the beginning of each second."""
    is_over = threading.Event()

    def scrape() -> None:
        due_s = time.monotonic()
        while not is_over.wait(max(0.0, due_s - time.monotonic())):
            for port in ports:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                connection.request("GET", "/metrics")
                answer = connection.getresponse()
                if answer.status != 200 or not answer.read():
                    raise SystemExit(f"no page at port {port}")
                connection.close()
            due_s += _SCRAPE_S

    thread = threading.Thread(target=scrape) if ports else None
    if thread is not None:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if thread is not None:
            thread.join()


def summary(figures: Figures) -> list[dict[str, Any]]:
    """A row for each contender: medians, and differences from the turns of "off" beside its own."""
    rows: list[dict[str, Any]] = []
    off = figures[CONTENDERS[0].name]
    for index, contender in enumerate(CONTENDERS):
        own = figures[contender.name]
        row: dict[str, Any] = {"name": contender.name}
        for unit in ("ms", "cpu_ms"):
            row[unit] = statistics.median(turn[unit] for turn in own)
            if index:  # the turn of "off" beside it
                beside = off[index - 1 :: len(CONTENDERS) - 1]
                more = [100 * (mine[unit] / its[unit] - 1) for mine, its in zip(own, beside, strict=True)]
                quarters = statistics.quantiles(more, n=4) if len(more) > 1 else [more[0]] * 3
                row[f"{unit}_more_percent"] = quarters
        rows.append(row)
    return rows


def to_text(rows: list[dict[str, Any]], steps: int) -> str:
    """The table in Markdown."""
    lines = [
        f"A step, median of turns of {steps}; the difference from the turn of 'off' beside it: median, middle half.",
        "",
        "| | ms | difference | processor ms, all processes | difference |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        cells = [row["name"]]
        for unit in ("ms", "cpu_ms"):
            cells.append(f"{row[unit]:.2f}")
            more = row.get(f"{unit}_more_percent")
            cells.append("–" if more is None else f"{more[1]:+.2f} % ({more[0]:+.2f} to {more[2]:+.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def pieces(step_ms: float, span_s: float = 0.5) -> list[dict[str, Any]]:
    """What each thing takes by itself, in processor microseconds; the percentage of the time from one to the next.
    ``span_s``: how long each is measured."""
    from byteps_py.prometheus.metrics import Place, of_member, of_progress, of_status
    from byteps_py.prometheus.page import MetricsPage
    from byteps_py.proto import control_pb2 as pb
    from byteps_py.session.progress import Progress
    from byteps_py.wire import rank_link

    progress = Progress()
    told = pb.RankProgress(steps=1000, tokens=10**9, exposed_s=12.5, last_step_at_s=1.7e9)
    worker = Place("job", "worker", "gpu-0")

    def status(machines: int, ranks: int) -> pb.StatusReply:
        members = [
            pb.MemberStatus(
                member=pb.Member(member_id=machine, role=1, kind=1, machine_index=machine),  # type: ignore[arg-type]
                alive=True, progress=[pb.RankProgress(rank=machine * ranks + rank, steps=9) for rank in range(ranks)],
            )
            for machine in range(machines)
        ]  # fmt: skip
        return pb.StatusReply(state=pb.StatusReply.STATE_RUNNING, members=members)

    def noticed() -> None:
        progress.stepped(1)
        progress.waited(time.monotonic())

    small, large = status(2, 1), status(128, 8)
    found = [
        ("a step and a wait that are noticed", step_ms / 1e3, noticed),
        ("a rank tells its progress", 1.0, lambda: rank_link.encode(rank_link.ProgressMade(**progress.facts(0)))),
    ]
    pages = (
        ("a rank's page", lambda: of_progress(worker._replace(role="rank", rank="0"), told)),
        ("the page of a communication service with 8 ranks", lambda: of_member(worker, pb.Statistics(), [told] * 8)),
        ("the scheduler's page, 2 machines", lambda: of_status("job", small)),
        ("the scheduler's page, 128 machines with 8 ranks each", lambda: of_status("job", large)),
    )
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        for name, collect in pages:
            page = MetricsPage("127.0.0.1", 0, name, collect)
            stack.callback(page.close)
            found.append((name, _SCRAPE_S, page.text))
        for name, every_s, do in found:
            began = time.thread_time()
            do()
            often = 10 if time.thread_time() - began < 0.01 else 1
            times, deadline_s = [], time.monotonic() + span_s
            while time.monotonic() < deadline_s:
                began = time.thread_time()
                for _ in range(often):
                    do()
                times.append((time.thread_time() - began) / often)
            took_s = statistics.median(times)
            rows.append({"name": name, "us": took_s * 1e6, "percent": 100 * took_s / every_s})
    return rows


def alone_to_text(rows: list[dict[str, Any]]) -> str:
    """The second table."""
    lines = ["| by itself | processor µs | of the time |", "|---|---|---|"]
    lines += [f"| {row['name']} | {row['us']:,.1f} | {row['percent']:.4f} % |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

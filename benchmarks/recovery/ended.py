"""Faults that a job does not survive (no elastic one): how long until every rank that lives has raised an error, and
whether that names who is to blame. Each run is a job of its own: 2 GPU machines with 2 ranks each, a CPU machine.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

from benchmarks.recovery.job import Job, running
from benchmarks.recovery.launcher import UnforeseenError, send
from benchmarks.recovery.rows import Row
from benchmarks.recovery.survived import History, middle_of_a_round

RANKS = ("m0.0", "m0.1", "m1.0", "m1.1")


def raised(
    row: Row, repeat: int, fault: Callable[[Job], float], pattern: str, survivors: tuple[str, ...] = RANKS
) -> list[Row]:
    """``fault`` returns when it was; each of ``survivors`` is to raise an error that ``pattern`` is found in."""
    for _ in range(repeat):
        try:
            with running(ranks=2) as job:
                middle_of_a_round(job)
                at_s = fault(job)
                notes = [job.until_note(rank, "error") for rank in survivors]
                row.add(max(note["at"] for note in notes) - at_s, first=min(note["at"] for note in notes) - at_s)
                for note in notes:
                    row.check(bool(re.search(pattern, note["text"])), f"does not say {pattern!r}: {note['text']}")
                    row.check("tensor '" in note["text"], f"does not name a tensor: {note['text']}")
                row.remarks.add(f"one says: {notes[0]['text'][:250]}")
        except UnforeseenError as error:
            row.failures.append(str(error))
    return [row]


def rank_killed(repeat: int, _: History) -> list[Row]:
    def fault(job: Job) -> float:
        return send(signal.SIGKILL, [job.until_note("m1.1", "ready")["pid"]])

    row = Row("a rank killed, until all others have raised", 1.5)
    return raised(row, repeat, fault, r"rank 3 \(process", RANKS[:3])


def machine_killed(repeat: int, _: History) -> list[Row]:
    row = Row("a GPU machine killed, until all others have raised", 1.5)
    return raised(
        row, repeat, lambda job: job.launchers["m1"].signal(signal.SIGKILL), r"lost worker 1 \(ranks 2-3", RANKS[:2]
    )


def machine_frozen(repeat: int, _: History) -> list[Row]:
    row = Row("a GPU machine frozen (SIGSTOP), until all others have raised", 1.5)
    return raised(
        row, repeat, lambda job: job.launchers["m1"].signal(signal.SIGSTOP), r"lost worker 1 \(ranks 2-3", RANKS[:2]
    )


def service_killed(repeat: int, _: History) -> list[Row]:
    row = Row("a communication service killed, until all ranks have raised", 1.5)
    pattern = r"lost worker 1 \(ranks 2-3|the communication service of this machine is gone"
    return raised(row, repeat, lambda job: job.launchers["m1"].signal(signal.SIGKILL, "byteps_py.worker"), pattern)


def exception(repeat: int, _: History) -> list[Row]:
    def fault(job: Job) -> float:
        told = job.folder / "raise.new"
        told.write_text("3")
        told.rename(job.folder / "raise")
        return float(job.until_note("m1.1", "raises")["at"])

    row = Row("an exception in one rank, until all others have raised", 0.5)
    pattern = r"(?s)rank 3 \(process .*ValueError: the data of step \d+ are bad.*Traceback.*fail_if_told"
    return raised(row, repeat, fault, pattern, RANKS[:3])

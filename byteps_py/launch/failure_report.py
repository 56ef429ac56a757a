"""What the launcher shows of a job that failed: the cause, once, with the ranks that reported it. Pure.

A rank that ended because another rank failed repeats that rank's error; so does a service. Their messages are shown
only if no process of this launcher reported the error as its own: the cause was on another machine, or a killed process
said nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from byteps_py.failure_notice import Blame, FailureNotice

#: How many different errors are shown; there may be as many as ranks.
_MOST = 4
#: If a process has not ended so many seconds after its message, the message is shown: something keeps the process.
SHOW_AFTER_S = 15.0


@dataclass(slots=True)
class _Said:
    label: str
    words: FailureNotice
    at_s: float


class FailureReport:
    """Collects the messages of one job's processes."""

    def __init__(self) -> None:
        self._said: list[_Said] = []
        self._shown: set[Blame] = set()

    def heard(self, label: str, words: FailureNotice, now_s: float) -> None:
        """A message of the process with this label, as in prefixes."""
        if words.blame is not Blame.NOBODY:
            self._said.append(_Said(label, words, now_s))

    @property
    def due_s(self) -> float | None:
        """When to show the message of a process that does not end; None if there is none."""
        return min((said.at_s + SHOW_AFTER_S for said in self._said if said.words.blame is Blame.OWN), default=None)

    def take(self, was_asked_to_end: bool = False) -> list[tuple[str, str]]:
        """The (labels, text) pairs to show now, the first cause last; they are not shown again. ``was_asked_to_end``: a
        user ended the job, so only processes that failed by themselves matter."""
        said, self._said = self._said, []
        for blame in (Blame.OWN,) if was_asked_to_end else (Blame.OWN, Blame.OTHERS, Blame.SERVICE):
            if self._shown and blame is not Blame.OWN:
                break  # the cause has been shown, or one of its consequences
            groups: dict[str, list[_Said]] = {}
            for each in said:
                if each.words.blame is blame:
                    groups.setdefault(each.words.error, []).append(each)
            if groups:
                self._shown.add(blame)
                return self._blocks(list(groups.values())[: None if blame is Blame.OWN else 1])
        return []

    def begin_anew(self) -> None:
        """Errors that are reported from now on have another cause than those before."""
        self._shown.clear()

    @staticmethod
    def _blocks(groups: list[list[_Said]]) -> list[tuple[str, str]]:
        # The longest text of equal errors has the exception that caused it, such as that of a pipeline's stage.
        blocks = [
            (_labels([each.label for each in group]), max((each.words.text for each in group), key=len))
            for group in groups[:_MOST]
        ]
        if len(groups) > _MOST:
            more = len(groups) - _MOST
            blocks.append(
                ("", f"… and {more} other {'errors' if more > 1 else 'error'} of other ranks, which came later")
            )
        return blocks[::-1]


def _labels(labels: list[str]) -> str:
    """
    >>> _labels(["2", "0", "1"]), _labels(["3", "1"]), _labels(["0.1"])
    ('0-2', '1,3', '0.1')
    """
    if not all(label.isdigit() for label in labels):
        return ",".join(sorted(labels))
    numbers = sorted(map(int, labels))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)

"""What all ranks of benchmarks/goodput train, and what they write down. A rank's program makes the loop around it.

Each line of a rank's own file is a JSON object: what happened (ready, begin: of a step's body, step: it is made, end),
and at which time (``time.monotonic()``, the same clock in all processes).
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.recovery.launcher import started_s  # noqa: E402
from examples.gpt import GPT, read_text  # noqa: E402

_IMPORTED_S = time.monotonic()
CONTEXT, WIDTH, LAYERS = 32, 64, 2  # small: the processor is to be free while a step "computes"


@dataclass(frozen=True)
class Task:
    """What to train. ``copies``: of the model; each has samples of its own. ``compute_s``: of each step, the time in
    which a GPU would compute and the processor rests."""

    folder: str
    ranks: int
    copies: int
    steps: int
    compute_s: float
    batch_size: int = 2
    checkpoint_every: int = 10

    @staticmethod
    def read() -> Task:
        return Task(**json.loads(sys.argv[1]))

    def word(self) -> str:
        return json.dumps(asdict(self))

    @property
    def samples(self) -> int:
        """Of the only epoch: each is to be used once."""
        return self.steps * self.copies * self.batch_size


class Log:
    def __init__(self, task: Task, rank: int) -> None:
        self._file = os.open(Path(task.folder) / f"{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.note("ready", pid=os.getpid(), import_s=_IMPORTED_S - started_s(os.getpid()))

    def note(self, what: str, **more: Any) -> None:
        os.write(self._file, (json.dumps({"what": what, "at": time.monotonic(), **more}) + "\n").encode())


class Passages(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Passages of the text: (number, inputs, targets)."""

    def __init__(self, text: torch.Tensor, count: int) -> None:
        self._text, self._count = text, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        start = number * 97 % (len(self._text) - CONTEXT - 1)
        passage = self._text[start : start + CONTEXT + 1]
        return number, passage[:-1], passage[1:]


def model_and_data(task: Task) -> tuple[GPT, Passages]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    letters, text, _ = read_text()
    return GPT(len(letters), CONTEXT, WIDTH, LAYERS, heads=4), Passages(text, task.samples)


def loader_of(task: Task, data: Passages, copy: int) -> DataLoader[Any]:
    sampler = DistributedSampler(data, task.copies, copy, shuffle=True)
    return DataLoader(data, batch_size=task.batch_size, sampler=sampler)


def rest(task: Task) -> None:
    """The time in which a GPU would compute a step."""
    time.sleep(task.compute_s)


def compute(task: Task, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Forward and backward passes."""
    rest(task)
    functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()


def hash_of(model: torch.nn.Module) -> str:
    hashed = xxhash.xxh3_128()
    for parameter in model.parameters():
        hashed.update(parameter.detach().numpy())
    return hashed.hexdigest()

"""Trains elastically, so many steps as a file says: ``python elastic.py FILE``; FILE: ``STEPS IS_LAST``.

Says where each group begins ("group from step 8: 2 1 1", the ranks of each machine), each step that all have committed,
and, when it has taken its steps, what the parameters are. In a group all must be equal, bit for bit: each checks that.
TEST_HOSTED: the services make the optimizer's steps. TEST_INT8: gradients are compressed; with
TEST_FEEDBACK, machines keep what they have not sent, and momentum. TEST_POWERSGD: gradients are factors of low rank.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from torch_training import Net, loss_of, wrap

import byteps_py.torch as bps

STEPS_PER_COMMIT = 4


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # in one piece: others write, too


def digest_of(model: torch.nn.Module) -> str:
    data = b"".join(value.contiguous().view(torch.uint8).numpy().tobytes() for value in model.state_dict().values())
    return hashlib.sha256(data).hexdigest()[:16]


def told(file: Path) -> tuple[int, bool]:
    """What rank 0 reads in the file."""
    steps, is_last = map(int, file.read_text().split())
    agreed = bps.broadcast(torch.tensor([steps, is_last]), 0, name="told")
    return int(agreed[0]), bool(agreed[1])


def check(model: torch.nn.Module) -> None:
    digests = bps.allgather_object(digest_of(model), name="digests")
    if len(set(digests)) > 1:
        say(f"the ranks differ: {digests}")
        sys.exit(1)


def main() -> None:
    file = Path(sys.argv[1])
    bps.init()
    torch.set_num_threads(1)
    model = Net()
    compression = bps.Compression.int8 if "TEST_INT8" in os.environ else bps.Compression.none
    if "TEST_FEEDBACK" in os.environ:
        kind = bps.Compression.int8 if "TEST_INT8" in os.environ else bps.Compression.dithering(7, "natural", seed=3)
        compression = bps.Compression.with_momentum(bps.Compression.with_error_feedback(kind), 0.5)
    if "TEST_POWERSGD" in os.environ:
        compression = bps.Compression.powersgd(rank=2, min_compression_rate=1.0)
    hosted = os.environ.get("TEST_HOSTED", False)
    optimizer = wrap(model, hosted=hosted if hosted == "machine" else bool(hosted), compression=compression)

    @bps.elastic.run
    def train(state) -> None:
        machines = bps.allgather_object(bps.cross_rank(), name="machines")
        check(model)
        if bps.rank() == 0:
            sizes = " ".join(str(machines.count(machine)) for machine in range(bps.cross_size()))
            say(f"group from step {state.step}: {sizes}")
        said = committed = -1

        def commit() -> None:
            nonlocal committed
            state.commit()  # returns once all have saved
            if state.step != committed:
                committed = state.step
                say(f"rank {bps.rank()}: committed is step {committed}")

        while True:
            steps, is_last = told(file)
            while state.step < steps:
                loss_of(model, bps.rank(), state.step).backward()
                optimizer.step()
                optimizer.zero_grad()
                state.step += 1
                if state.step % STEPS_PER_COMMIT == 0:
                    commit()
            if said != steps:
                said = steps
                check(model)
                if bps.rank() == 0:
                    say(f"after {state.step} steps {digest_of(model)}")
            if is_last:
                return
            commit()

    train(bps.elastic.TorchState(model, optimizer, step=0))
    say(f"rank {bps.rank()} of {bps.size()} ends after {digest_of(model)}")


if __name__ == "__main__":
    main()

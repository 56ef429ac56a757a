"""One rank of benchmarks/local_goodput.py. Arguments: the contender, steps from one outer step to the next, ms of a
step, and the folder where it writes when each step began and ended."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import byteps_py as bps
from examples.gpt import GPT, random_batch, read_text

_CONTEXT, _SEQUENCES = 32, 2


def made(name: str, model: torch.nn.Module, every: int) -> Any:
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    streaming = bps.local.Streaming(delay=min(10, every - 1))
    topk = bps.Compression.topk(0.03, bits=2)
    if name.startswith("decoupled"):
        compression = topk if name.endswith("topk") else bps.Compression.none
        how = {"quorum": 2, "streaming": streaming, "compression": compression}
        return bps.local.DecoupledDiLoCo(model, inner, outer, every=every, **how)
    compression = topk if name == "diloco_topk" else bps.Compression.with_error_feedback(bps.Compression.int8)
    return bps.local.DiLoCo(model, inner, outer, every=every, streaming=streaming, compression=compression)


def main() -> None:
    name, every, step_ms, folder = sys.argv[1:]
    torch.set_num_threads(1)
    letters, data, _ = read_text()
    torch.manual_seed(0)
    model = GPT(len(letters), _CONTEXT, width=64, layers=2, heads=4)
    bps.init()
    optimizer = made(name, model, int(every))
    own = torch.Generator().manual_seed(os.getpid())
    with (Path(folder) / f"steps-{os.getpid()}").open("w", buffering=1) as steps:

        @bps.elastic.run
        def train(state: bps.elastic.TorchState) -> None:
            while True:
                begun_s = time.time()
                optimizer.zero_grad()
                inputs, targets = random_batch(data, _SEQUENCES, _CONTEXT, own)
                functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
                time.sleep(max(0.0, begun_s + float(step_ms) / 1e3 - time.time()))
                optimizer.step()
                steps.write(f"{begun_s} {time.time()}\n")

        train(bps.elastic.TorchState(optimizer=optimizer))


if __name__ == "__main__":
    main()

"""Gradients that travel by a process group, as those of GPUs do with BYTEPS_LOCAL_SUM. Says that they are right."""

import torch
import torch.distributed as dist

import byteps_py as bps
from byteps_py.torch.collectives.context import current
from byteps_py.torch.gradients.gradient_reducer import GradientReducer
from byteps_py.torch.gradients.group_bucket import sums_of


def main() -> None:
    dist.init_process_group("byteps")
    bps.init()
    rank = bps.rank()
    params = [torch.nn.Parameter(torch.zeros(count)) for count in (5, 2_000_000, 7)]
    named = [(f"p{place}", param) for place, param in enumerate(params)]
    reducer = GradientReducer(current(), named, group_sums=sums_of(dist.new_group(), "cpu"))
    for step in range(3):
        for place in ((0, 1, 2), (2, 0, 1))[rank]:
            param = params[place]
            param.grad = torch.full_like(param, float(rank + step + place))
            reducer.ready(reducer.place(param), param)
        reducer.finish()
        for place, param in enumerate(params):
            assert param.grad is not None
            assert torch.equal(param.grad, torch.full_like(param, step + place + 0.5))
    print("gradients are right", flush=True)
    bps.shutdown()
    dist.destroy_process_group()


main()

"""A default device that the training sets is for its tensors, not for those that the package makes for itself."""

from __future__ import annotations

import ast
from pathlib import Path

import torch
from support.threaded import ThreadedCluster, contract
from torch_training import wrap

import byteps_py.torch as bps

PACKAGE = Path(__file__).parents[2] / "byteps_py"
#: Functions of torch that make tensors on the default device.
MAKERS = {
    "arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn",
    "randperm", "scalar_tensor", "sparse_coo_tensor", "tensor", "zeros",
}  # fmt: skip
#: A simulation, whose tensors are the caller's own experiment.
EXCEPT = {"precision.py"}


def test_every_tensor_of_the_package_names_its_device() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and path.name not in EXCEPT:
                makes = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
                names = {keyword.arg for keyword in node.keywords}
                if makes and node.func.attr in MAKERS and "device" not in names:
                    found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: torch.{node.func.attr}")
    assert not found, "\n".join(found)


def test_operations_under_another_default_device() -> None:
    machines = (2, 1)
    parts = [torch.arange(6.0).view(3, 2) * (rank + 1) for rank in range(3)]

    def main(rank: int):
        x = parts[rank].clone()
        layer = torch.nn.Embedding(9, 4, sparse=True)
        ids = torch.tensor([rank, 5])
        with torch.device("meta"):
            optimizer = wrap(layer)
            layer(ids).sum().backward()
            optimizer.synchronize()
            return [
                bps.allreduce(x, op=bps.Sum, name="x"),
                bps.allgather(x, name="x"),
                bps.alltoall(x, [1, 1, 1], name="x")[0],
                bps.reducescatter(x, op=bps.Sum, name="x"),
                bps.broadcast(x, 1, name="x"),
                bps.broadcast_object({"rank": rank}, 1),
                bps.allgather_object(rank),
                layer.weight.grad.to_dense(),
            ]

    total = contract(parts, machines)
    found = ThreadedCluster(machines).run(main)
    for rank, (summed, gathered, swapped, scattered, sent, thing, ranks, gradient) in enumerate(found):
        assert torch.equal(summed, total)
        assert torch.equal(gathered, torch.cat(parts))
        assert torch.equal(swapped, torch.stack([part[rank] for part in parts]))
        assert torch.equal(scattered, total[rank : rank + 1])
        assert torch.equal(sent, parts[1])
        assert thing == {"rank": 1}
        assert ranks == [0, 1, 2]
        assert torch.equal(gradient, found[0][-1])
        assert torch.equal(gradient[5], torch.ones(4))

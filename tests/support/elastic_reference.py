"""What tests/programs/elastic.py computes: the same training, in the test's process."""

from __future__ import annotations

import torch
from programs.elastic import digest_of
from torch_training import Net, gradients, loss_of, sgd

from byteps_py.tensor_codec import Codec
from support.coded_sums import CodedSums
from support.threaded import contract


class Reference:
    """``codec``: of the gradients, each of which travels alone."""

    def __init__(self, codec: Codec | None = None) -> None:
        self.codec = codec
        self.sums: list[CodedSums] = []  # of each parameter
        self.model = Net()
        self.optimizer = sgd(list(self.model.parameters()))
        self.step = 0

    def go(self, to: int, machines: list[int]) -> str:
        """Take steps with so many ranks on each machine; the parameters after them."""
        for step in range(self.step, to):
            if machines == [1]:  # nothing is exchanged, and what is not used has no gradient
                self.model.zero_grad()
                loss_of(self.model, 0, step).backward()
                self.optimizer.step()
                continue
            sums = iter(self.sums)
            by_rank = [gradients(self.model, rank, [step]) for rank in range(sum(machines))]
            for param, parts in zip(self.model.parameters(), zip(*by_rank, strict=True), strict=True):
                if self.codec is None:
                    param.grad = contract(parts, machines, average=True)
                else:
                    param.grad = next(sums)(parts, sum(machines))
            self.optimizer.step()
        self.step = to
        return digest_of(self.model)

    def regroup(self, machines: list[int], were: list[int | None]) -> None:
        """``were``: which machine each was in the group before, None for a new one."""
        if self.codec is None:
            return
        before, names = self.sums, [f"Gradient.{name}" for name, _ in self.model.named_parameters()]
        self.sums = [CodedSums(self.codec, machines, name) for name in names]
        for old, new, param in zip(before, self.sums, self.model.parameters(), strict=False):
            new.round = old.round
            zeros = torch.zeros(param.numel())
            if old.errors is not None and old.moments is not None:
                new.errors = [zeros if was is None else old.errors[was] for was in were]
                new.moments = [zeros if was is None else old.moments[was] for was in were]

"""How much memory a division of a model needs on its fullest GPU: weights, gradients, optimizer states, activations.

The formulas are those of formulas.py. Pure; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from byteps_py.parallel.mesh.formulas import activation_bytes, state_bytes
from byteps_py.parallel.mesh.model_shape import ModelShape

#: Of the attention scores alone, or of whole layers.
Recomputation = Literal["selective", "full"]


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on one GPU."""

    #: Weights, gradients, optimizer states.
    states: float
    #: What forward passes leave for backward passes, logits and layers under way included.
    activations: float

    @property
    def total(self) -> float:
        """Both."""
        return self.states + self.activations

    def __str__(self) -> str:
        return f"{gigabytes(self.total)} ({gigabytes(self.states)} states, {gigabytes(self.activations)} activations)"


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """One way to divide a training job."""

    tp: int
    cp: int
    pp: int
    dp: int
    #: Sequences of a data-parallel group in a step.
    batch: int
    #: Sequences of a micro-batch.
    micro_batch: int = 1
    zero_stage: int = 1
    recomputation: Recomputation = "selective"

    @property
    def alternates(self) -> bool:
        """Whether a worker alternates forward and backward passes (1F1B), or does all forward passes first."""
        return self.zero_stage == 1

    def in_flight(self, worker: int) -> int:
        """The micro-batches whose activations a worker of the pipeline has at most."""
        if self.pp == 1:
            return 1
        micro_batches = self.batch // self.micro_batch
        return min(self.pp - worker, micro_batches) if self.alternates else micro_batches

    def __str__(self) -> str:
        return f"tp {self.tp}, cp {self.cp}, pp {self.pp}, dp {self.dp}"


def stage_layers(layers: int, pp: int) -> tuple[int, int]:
    """(layers of the first and of the last stage, of each stage between them): the outer stages also have the embedding
    and the head, and take fewer if there is a remainder (Llama 3, section 3.1.2).

    >>> stage_layers(126, 16), stage_layers(32, 1)
    ((7, 8), (32, 32))
    """
    inner = -(-layers // pp)
    return (inner, inner) if pp < 3 else (max(0, -(-(layers - inner * (pp - 2)) // 2)), inner)


def memory_need(model: ModelShape, sequence: int, sizes: MeshSizes) -> MemoryNeed:
    """Of the fullest GPU.

    A layer keeps 34·s·b·h/t bytes for a micro-batch ("selective"); or its input, which sequence parallelism divides,
    too: 2·s·b·h/t ("full"), with 34·s·b·h/t of one layer under way. Logits are float32. ZeRO-3 has gathered two layers,
    and the gradients of one.
    """
    tp, tokens = sizes.tp, sequence // sizes.cp
    layer = activation_bytes(tokens, sizes.micro_batch, model.hidden, model.heads, tp, "selective")
    kept, under_way = layer, 0.0
    if sizes.recomputation == "full":
        kept = activation_bytes(tokens, sizes.micro_batch, model.hidden, model.heads, tp, "full") / tp
        under_way = layer
    logits = 4 * tokens * sizes.micro_batch * model.vocabulary / tp

    def of_worker(layers: int, others: int, worker: int, has_head: bool) -> MemoryNeed:
        parameters = (layers * model.layer_parameters + others) / tp
        states = state_bytes(parameters, sizes.dp * sizes.cp, sizes.zero_stage)
        if sizes.zero_stage == 3:
            states += 6 * model.layer_parameters / tp
        each = layers * kept + (logits if has_head else 0)
        return MemoryNeed(states, sizes.in_flight(worker) * each + under_way)

    outer, inner = stage_layers(model.layers, sizes.pp)
    if sizes.pp == 1:
        return of_worker(outer, 2 * model.embedding_parameters, 0, True)
    needs = [
        of_worker(outer, model.embedding_parameters, 0, False),
        of_worker(outer, model.embedding_parameters, sizes.pp - 1, True),
    ]
    if sizes.pp > 2:
        needs.append(of_worker(inner, 0, 1, False))
    return max(needs, key=lambda need: need.total)


def gigabytes(count: float) -> str:
    """In units of 10⁹.

    >>> gigabytes(80e9)
    '80.0 GB'
    """
    return f"{count / 1e9:,.1f} GB"

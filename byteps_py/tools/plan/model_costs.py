"""The costs of each layer and each operator of a model, as a trace has found them (module_trace.py): parameters, FLOPs,
activations, and what follows for plans: the shape of a decoder, and where to cut a pipeline. Pure; any thread."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from byteps_py.errors import UsageError
from byteps_py.tools.plan.sizing_job import ModelShape, gigabytes
from byteps_py.wording import count_text

#: A backward pass computes two products for each one of the forward pass: for the input's gradient, and the weight's.
BACKWARD_RATIO = 2


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """One call of an operator of PyTorch. Views are none."""

    #: The operator's, as "aten.mm".
    kind: str
    #: The path of the innermost module that called it; empty: the model itself.
    module: str
    flops: int
    #: Of inputs and outputs.
    moved_bytes: int
    output_shape: tuple[int, ...]
    output_bytes: int
    #: Elements of parameters that it reads.
    parameters: int
    #: The numbers of the operators whose outputs it reads.
    inputs: tuple[int, ...]
    #: Whether a value of the output needs one value of each input only; copies are such operators.
    is_elementwise: bool


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer in the order of the forward pass: a module that a pipeline does not cut, or (``name`` empty) what the
    model itself does between its layers."""

    name: str
    #: The class of its module.
    kind: str
    #: Elements of its parameters that no layer before has.
    parameters: int
    #: Of the forward pass.
    flops: int
    #: Of inputs and outputs of operators in the forward pass.
    moved_bytes: int
    #: The bytes that autograd keeps for the backward pass, without parameters, buffers and the model's inputs.
    activation_bytes: int
    output_shape: tuple[int, ...]
    #: The shapes of its parameters with two dimensions.
    matrices: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """Layers of one class that follow each other and have parameters of the same shapes: ``layers[first:first+count]``
    in ModelCosts."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class AttentionSize:
    """Of the queries, as scaled_dot_product_attention got them. ``kv_heads``: of the keys."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class UncostedOperator:
    """Calls of an operator for which there is no number of FLOPs: only its bytes are counted."""

    kind: str
    calls: int
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """A model, for inputs of one size."""

    layers: tuple[LayerCost, ...]
    operators: tuple[OperatorCost, ...]
    uncosted: tuple[UncostedOperator, ...]
    blocks: tuple[RepeatedBlocks, ...]
    attention: AttentionSize | None
    #: The last dimension of the output.
    output_width: int
    #: Values that two or more layers share are counted once.
    shared_parameters: int

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def flops(self) -> int:
        """Of a forward pass."""
        return sum(layer.flops for layer in self.layers)

    @property
    def step_flops(self) -> int:
        """Of a forward and a backward pass."""
        return (1 + BACKWARD_RATIO) * self.flops

    @property
    def activation_bytes(self) -> int:
        """Of all layers."""
        return sum(layer.activation_bytes for layer in self.layers)

    def remarks(self) -> Iterator[str]:
        """Sentences: which blocks repeat, and what the figures lack."""
        if self.blocks:
            listed = "; ".join(map(self._shown, self.blocks))
            yield f"Equal blocks follow each other, and a pipeline is cut between them: {listed}."
        if not self.blocks:
            yield "No blocks repeat: a pipeline is cut between any two layers of the table."
        if self.shared_parameters:
            yield f"{self.shared_parameters:,} elements of parameters are in several layers; they count once."
        if self.uncosted:
            listed = ", ".join(f"{one.kind} ({count_text(one.calls, 'call')})" for one in self.uncosted)
            moved = gigabytes(sum(one.moved_bytes for one in self.uncosted))
            yield (
                f"These operators have no formula of FLOPs, and are counted by their bytes ({moved}) alone: {listed}. "
                "If they compute much, steps take longer than planned; torch.utils.flop_counter.register_flop_formula "
                "adds a formula."
            )

    def _shown(self, run: RepeatedBlocks) -> str:
        first, last = self.layers[run.first], self.layers[run.first + run.count - 1]
        return f"{run.count} x {first.kind} ({first.name} to {last.name}, {self._share_of(run):.0%} of the FLOPs)"

    def _share_of(self, run: RepeatedBlocks) -> float:
        return sum(each.flops for each in self.layers[run.first : run.first + run.count]) / max(1, self.flops)

    def decoder_shape(self) -> ModelShape:
        """The shape of the decoder, for ``bps plan layout``. Its feed-forward layers are as wide as matters for
        parameters and FLOPs of a block: for two matrices of 4h, 8h/3, since a ModelShape has three.

        Raises UsageError if the model is no decoder: no blocks with attention repeat.
        """
        if not self.blocks or self.attention is None:
            lacking = "no equal blocks follow each other" if not self.blocks else "no block calls attention"
            raise UsageError(
                f"the model is no decoder whose layouts can be planned: {lacking}. `bps plan model` has its layers, "
                "and --stages cuts them; scaled_dot_product_attention is the attention that is found"
            )
        run = max(self.blocks, key=self._share_of)
        block = self.layers[run.first]
        hidden = block.output_shape[-1]
        kv_heads = self._kv_heads(block, self.attention)
        kv_width = kv_heads * self.attention.head_dim
        elements = sum(rows * columns for rows, columns in block.matrices)
        ffn = round((elements - 2 * hidden * hidden - 2 * hidden * kv_width) / (3 * hidden))
        if self.attention.heads * self.attention.head_dim != hidden or ffn < 1:
            raise UsageError(
                f"the blocks of class {block.kind} are no transformer layers whose layouts can be planned: "
                f"{self.attention.heads} heads of {self.attention.head_dim}, {hidden} values of a token, and matrices "
                f"of {elements:,} elements do not go together. Write the shape into a JSON file, and give it as --model"
            )
        return ModelShape(run.count, hidden, self.attention.heads, kv_heads, ffn, self.output_width)

    def _kv_heads(self, block: LayerCost, attention: AttentionSize) -> int:
        """Models often repeat keys for their groups of query heads before they call attention. Then the projections
        tell: two of the same width, or one for queries, keys and values together."""
        hidden, dim = block.output_shape[-1], attention.head_dim
        if attention.kv_heads < attention.heads:
            return attention.kv_heads
        heights = [rows for rows, columns in block.matrices if columns == hidden]
        for heads in range(1, attention.heads):
            if attention.heads % heads == 0 and (
                heights.count(heads * dim) == 2 or hidden + 2 * heads * dim in heights
            ):
                return heads
        return attention.heads

    def cut(self, stages: int) -> list[range]:
        """The layers of each stage of a pipeline, so that the slowest one computes as little as possible; of cuts
        that are alike in this, one with even states. Raises UsageError if there are fewer layers than stages."""
        count = len(self.layers)
        if not 1 <= stages <= count:
            raise UsageError(f"{stages} stages: this model can be cut into 1 to {count}, of at least one layer each")
        flops = [0, *itertools.accumulate(layer.flops for layer in self.layers)]
        states = [0, *itertools.accumulate(16 * one.parameters + one.activation_bytes for one in self.layers)]
        # Of the layers before ``end`` in so many stages: (FLOPs and bytes of the largest ones, where each stage ends).
        best: dict[int, tuple[int, int, tuple[int, ...]]]
        best = {end: (flops[end], states[end], (end,)) for end in range(1, count + 1)}
        for stage in range(2, stages + 1):
            best = {
                end: min(
                    (max(most, flops[end] - flops[cut]), max(fullest, states[end] - states[cut]), (*ends, end))
                    for cut, (most, fullest, ends) in best.items()
                    if cut < end
                )
                for end in range(stage, count + 1)
            }
        return [range(first, last) for first, last in itertools.pairwise((0, *best[count][2]))]

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return {
            "parameters": self.parameters,
            "flops": self.flops,
            "step_flops": self.step_flops,
            "activation_bytes": self.activation_bytes,
            "layers": [asdict(layer) for layer in self.layers],
            "blocks": [asdict(run) for run in self.blocks],
            "uncosted": [asdict(one) for one in self.uncosted],
            "remarks": list(self.remarks()),
        }


def find_blocks(signatures: Sequence[object]) -> Iterator[RepeatedBlocks]:
    """Runs of at least two equal entries. ``signatures``: of the layers; None for one that can't be a block.

    >>> list(find_blocks(["embedding", "block", "block", "block", "head"]))
    [RepeatedBlocks(first=1, count=3)]
    """
    place = 0
    for signature, run in itertools.groupby(signatures):
        count = len(list(run))
        if signature is not None and count > 1:
            yield RepeatedBlocks(place, count)
        place += count

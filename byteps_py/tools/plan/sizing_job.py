"""The job whose mesh is to be sized: its GPUs, its batch, its model, and the sizes that divide them. How much memory a
division needs on its fullest GPU: weights, gradients, optimizer states, activations.

The models are decoder-only transformers, such as Llama 3: their shapes are those of well-known models, or of a user's
JSON file. The formulas are those of formulas.py. Reads files and does nothing else; any thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from byteps_py.errors import UsageError
from byteps_py.tools.plan.formulas import activation_bytes, state_bytes
from byteps_py.wording import shown


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention, gated feed-forward layers and separate embedding and head.

    Raises UsageError if a value is no whole number of at least 1, or if heads do not divide.
    """

    layers: int
    #: Values of a token between layers.
    hidden: int
    #: Query heads.
    heads: int
    #: Heads of keys and values.
    kv_heads: int
    #: Inner values of the feed-forward layers.
    ffn: int
    vocabulary: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise UsageError(f"{field.name}={value!r}: a model has a whole number of at least 1 there")
        if self.hidden % self.heads:
            raise UsageError(f"hidden={self.hidden} is not a multiple of heads={self.heads}: heads are of one size")
        if self.heads % self.kv_heads:
            raise UsageError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}: groups are of one size"
            )

    @property
    def layer_parameters(self) -> int:
        """Of one layer: projections of queries and outputs, of keys and values, three matrices of the gated
        feed-forward layer, two norms.

        >>> known_model("llama3-8b").layer_parameters
        218112000
        """
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.hidden * self.kv_heads // self.heads
        return attention + 3 * self.hidden * self.ffn + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding, and as many of the head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All of them.

        >>> [round(known_model(name).parameters / 1e9, 2) for name in ("llama3-8b", "llama3-70b", "llama3-405b")]
        [8.03, 70.55, 405.85]
        """
        return self.layers * self.layer_parameters + 2 * self.embedding_parameters + self.hidden


#: The public shapes of Llama 3 (Grattafiori et al., The Llama 3 Herd of Models, 2024, table 3).
MODELS = {
    "llama3-8b": ModelShape(32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": ModelShape(80, 8192, 64, 8, 28672, 128256),
    "llama3-405b": ModelShape(126, 16384, 128, 8, 53248, 128256),
}


def known_model(name: str) -> ModelShape:
    """A well-known model. Raises UsageError for another name; it lists the known ones."""
    if name not in MODELS:
        raise UsageError(
            f"unknown model {shown(name)!r}: known models are {', '.join(MODELS)}; for another one, give a JSON file "
            f"(NAME.json) with the keys {', '.join(_KEYS)}"
        )
    return MODELS[name]


def read_model(path: str) -> ModelShape:
    """The model of a JSON file: an object with the attributes of ModelShape. Raises UsageError."""
    return read_object(path, ModelShape, "model")


T = TypeVar("T")


def read_object(path: str, kind: Callable[..., T], what: str) -> T:
    """The JSON object in a file, whose keys are the fields of ``kind``, a dataclass; those with a default may be left
    out. ``what``: the kind in errors. Raises UsageError."""
    return object_of(read_json(path), path, kind, what)


def read_json(path: str) -> Any:
    """The content of a JSON file. Raises UsageError."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{shown(path)} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{shown(path)} is not JSON: {error}") from error


def object_of(found: Any, path: str, kind: Callable[..., T], what: str) -> T:
    """The result of ``read_object`` for the content of a file. Raises UsageError."""
    known = {field.name: field.default is MISSING for field in fields(kind)}  # type: ignore[arg-type]
    keys = ", ".join(known)
    if not isinstance(found, dict):
        raise UsageError(f"{shown(path)} has a {type(found).__name__}; it must have an object with {keys}")
    if missing := [name for name, is_needed in known.items() if is_needed and name not in found]:
        raise UsageError(f"{shown(path)} lacks {', '.join(missing)}: a {what} has {keys}")
    if unknown := sorted(set(found) - set(known)):
        raise UsageError(f"{shown(path)} has {shown(unknown[0])!r}: a {what} has {keys} only")
    try:
        return kind(**found)
    except UsageError as error:
        raise UsageError(f"{shown(path)}: {error}") from error


def load_model(name: str) -> ModelShape:
    """``name``: of a well-known model, or of a file (\"….json\", or with a slash). Raises UsageError."""
    return read_model(name) if name.endswith(".json") or "/" in name else known_model(name)


_KEYS = tuple(field.name for field in fields(ModelShape))


#: Of the attention scores alone, or of whole layers.
Recomputation = Literal["selective", "full"]


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on one GPU."""

    #: Weights, gradients, optimizer states.
    states: float
    #: The bytes that forward passes leave for backward passes, logits and layers under way included.
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


# ---- the job -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SizeOptions:
    """The cluster. Raises UsageError for values that are not above 0.

    The defaults are those of Llama 3's: machines of 8 NVIDIA H100. Such a GPU has 80·2³⁰ bytes; what exceeds 80·10⁹ is
    left to the CUDA context and to communication buffers.
    """

    gpus_per_machine: int = 8
    #: For states and activations, of each GPU.
    memory_bytes: float = 80e9
    #: Of a GPU, a second, with 2-byte numbers.
    peak_flops: float = 989e12
    #: Of a GPU's network link, in one direction.
    network_bytes_per_s: float = 50e9
    #: Between GPUs of a machine, in one direction.
    machine_bytes_per_s: float = 450e9

    def __post_init__(self) -> None:
        check_count("gpus_per_machine", self.gpus_per_machine)
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise UsageError(f"{field.name}={value!r}: a number above 0 is needed")


@dataclass(frozen=True, slots=True)
class SizingJob:
    """Raises UsageError if the numbers do not go together."""

    gpus: int
    #: Of a step, over all GPUs.
    batch_tokens: int
    #: Tokens of a sequence.
    sequence: int
    model: ModelShape
    options: SizeOptions

    def __post_init__(self) -> None:
        for name in ("gpus", "batch_tokens", "sequence"):
            check_count(name, getattr(self, name))
        machine = self.options.gpus_per_machine
        if self.gpus > machine and self.gpus % machine:
            below = self.gpus // machine * machine
            raise UsageError(
                f"{self.gpus} GPUs are no multiple of the {machine} of a machine: use {below} or {below + machine} "
                "GPUs, or say how many a machine has"
            )
        if self.batch_tokens % self.sequence:
            below = self.batch_tokens // self.sequence * self.sequence
            near = f"{below} or {below + self.sequence}" if below else f"at least {self.sequence}"
            raise UsageError(
                f"a batch of {self.batch_tokens} tokens is no whole number of sequences of {self.sequence}: use {near} "
                "tokens. K, M and G stand for 2^10, 2^20 and 2^30: 131072 is 128K"
            )

    @property
    def sequences(self) -> int:
        """Of a step, over all GPUs."""
        return self.batch_tokens // self.sequence

    @property
    def tp_sizes(self) -> list[int]:
        """Ascending. They divide a machine, so that no group spans two; each rank has whole query heads, and those of
        keys and values are shared evenly, or copied."""
        heads, kv_heads = self.model.heads, self.model.kv_heads
        return [
            size
            for size in divisors(min(self.gpus, self.options.gpus_per_machine))
            if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
        ]

    @property
    def cp_sizes(self) -> list[int]:
        """Ascending. A rank has two equal chunks of each sequence."""
        return [size for size in divisors(self.gpus) if size == 1 or self.sequence % (2 * size) == 0]

    def intensity(self, sizes: MeshSizes) -> float:
        """The FLOPs of a forward pass for each byte of weights that ZeRO-3 gathers: a parameter has 2 bytes, and 2
        FLOPs a token."""
        return sizes.micro_batch * self.sequence / sizes.cp

    def is_hidden(self, sizes: MeshSizes) -> bool:
        """Whether computing is slow enough to hide the transfers of weights."""
        return sizes.zero_stage < 3 or self.intensity(sizes) >= self.intensity_of_links

    @property
    def intensity_of_links(self) -> float:
        """The FLOPs that a GPU can compute while a byte comes from another, which is on its machine if there is only
        one."""
        options = self.options
        is_one_machine = self.gpus <= options.gpus_per_machine
        return options.peak_flops / (options.machine_bytes_per_s if is_one_machine else options.network_bytes_per_s)


def check_count(name: str, value: Any) -> None:
    """Raises UsageError unless ``value`` is a whole number of at least 1."""
    if type(value) is not int or value < 1:
        raise UsageError(f"{name}={value!r}: a whole number of at least 1 is needed")


def divisors(number: int) -> list[int]:
    """Ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})

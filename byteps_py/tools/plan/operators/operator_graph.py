"""A model as a graph of operators, for a search of strategies: from a JSON file, or from a traced module. Reads a
file and does nothing else; any thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from byteps_py.errors import UsageError
from byteps_py.tools.plan.model_costs import ModelCosts, OperatorCost
from byteps_py.tools.plan.sizing_job import object_of, read_json
from byteps_py.wording import shown


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator. Its output has three axes, along which it can be divided: samples, an attribute (tokens, or rows of
    pixels) and channels; a size of 1 can't be divided. Parameters are divided with the channels.

    Raises UsageError for sizes that make no sense.
    """

    name: str
    samples: int
    attribute: int = 1
    channels: int = 1
    #: Of the forward pass; the backward pass takes twice as long.
    flops: float = 0
    #: Of inputs, outputs and parameters in the forward pass.
    moved_bytes: float = 0
    output_bytes: float = 0
    parameters: int = 0
    #: Whether a part of the output needs the whole attribute, or all channels, of the inputs: attention, a product.
    mixes_attribute: bool = False
    mixes_channels: bool = False
    #: The names of the operators whose outputs it reads.
    inputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("samples", "attribute", "channels"):
            if type(size := getattr(self, name)) is not int or size < 1:
                raise UsageError(f"{shown(self.name)}: {name}={size!r}: a whole number of at least 1 is needed")
        for name in ("flops", "moved_bytes", "output_bytes", "parameters"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise UsageError(f"{shown(self.name)}: {name}={value!r}: a number of at least 0 is needed")


@dataclass(frozen=True, slots=True)
class OperatorGraph:
    """Operators in an order in which they can run. Raises UsageError if a name is missing, or is there twice, or if an
    operator reads what comes after it.

    >>> graph = OperatorGraph((Operator("a", 4), Operator("b", 4, inputs=("a",))))
    >>> graph.edges
    ((0, 1),)
    """

    operators: tuple[Operator, ...]

    def __post_init__(self) -> None:
        known: set[str] = set()
        for one in self.operators:
            if one.name in known:
                raise UsageError(f"two operators are called {shown(one.name)!r}: each needs a name of its own")
            if missing := [name for name in one.inputs if name not in known]:
                raise UsageError(
                    f"{shown(one.name)!r} reads {shown(missing[0])!r}, which is no operator before it: list operators "
                    "in an order in which they can run"
                )
            known.add(one.name)
        if not self.operators:
            raise UsageError("the graph has no operators: give a model with at least one that has parameters or FLOPs")

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """(the number of an operator, that of one that reads its output)"""
        place = {one.name: number for number, one in enumerate(self.operators)}
        return tuple((place[name], number) for number, one in enumerate(self.operators) for name in one.inputs)

    def as_json(self) -> dict[str, Any]:
        """As ``read_graph`` reads it."""
        return {"operators": [asdict(one) for one in self.operators]}


def read_graph(path: str) -> OperatorGraph:
    """The graph of a JSON file: {"operators": [{"name": …, …}, …]}, with the attributes of Operator. Raises
    UsageError."""
    found = read_json(path)
    if not isinstance(found, dict) or not isinstance(entries := found.get("operators"), list):
        names = ", ".join(one.name for one in fields(Operator))
        raise UsageError(f'{shown(path)} has no graph: give {{"operators": […]}}, each with {names}')
    operators = []
    for entry in entries:
        one = object_of(entry, path, Operator, "graph's operator")
        inputs = one.inputs
        if not isinstance(inputs, list | tuple) or not all(isinstance(name, str) for name in (one.name, *inputs)):
            raise UsageError(f"{shown(path)}: {shown(str(one.name))}: names and inputs are strings")
        operators.append(replace(one, inputs=tuple(inputs)))
    return OperatorGraph(tuple(operators))


def graph_of(costs: ModelCosts, samples: int) -> OperatorGraph:
    """The graph of a traced model for inputs of ``samples`` samples. Operators of a module without parts of its own are
    one operator; elementwise ones join the operator whose output they read, if it is only one."""
    groups = OperatorGroups(costs.operators)
    found = []
    for number, members in groups.members.items():
        inputs = {groups.group_of[one] for member in members for one in member.inputs if one in groups.group_of}
        names = tuple(groups.name_of(one) for one in sorted(inputs - {number}))
        found.append(_merged(groups.name_of(number), members, names, samples))
    return OperatorGraph(tuple(found))


class OperatorGroups:
    """The operators of a trace that become one. ``members``: by the number of their group, in the order in which groups
    can run; ``group_of``: by the operator's number. Constants, as masks and positions, belong to none."""

    def __init__(self, operators: Sequence[OperatorCost]) -> None:
        self.members: dict[int, list[OperatorCost]] = {}
        self.group_of: dict[int, int] = {}
        paths = {one.module for one in operators}
        with_parts = {path[:end] for path in paths for end, letter in enumerate(path) if letter == "."} | {""}
        for number, one in enumerate(operators):
            read = [self.group_of[source] for source in one.inputs if source in self.group_of]
            if not read and not one.parameters and not one.flops:
                continue
            group = number
            if read:
                last = max(read)
                is_same_module = one.module not in with_parts and self.members[last][-1].module == one.module
                if is_same_module or (one.is_elementwise and len(set(read)) == 1):
                    group = last
            self.group_of[number] = group
            self.members.setdefault(group, []).append(one)

    def name_of(self, number: int) -> str:
        """The module with the operator that matters most, and the number of the operator, which is unique."""
        main = max(self.members[number], key=lambda one: (one.flops, one.parameters, not one.is_elementwise))
        return f"{main.module or 'model'}:{main.kind.rpartition('.')[2].strip('_')}:{number}"


def _merged(name: str, members: Sequence[OperatorCost], inputs: tuple[str, ...], samples: int) -> Operator:
    main = max(members, key=lambda one: (one.flops, one.parameters, not one.is_elementwise))
    shape = main.output_shape or (1,)
    is_attention = "scaled_dot_product" in main.kind
    rows = math.prod(shape) // max(1, shape[-1])
    # A product of a linear layer has samples and tokens in one dimension.
    has_samples = rows % samples == 0 if main.flops else shape[0] == samples
    channels, attribute = shape[-1], max(1, rows // samples)
    if (
        len(shape) == 4 and main.flops
    ):  # (samples, heads, tokens, values) of attention, (samples, channels, …) of images
        channels, attribute = shape[1], shape[2]
    # Norms, softmax and sums need whole channels, and so does what was merged with them.
    others = [one for one in members if not (one.is_elementwise or one.flops or "embedding" in one.kind)]
    return Operator(
        name,
        samples if has_samples else 1,
        attribute if has_samples else 1,
        1 if others else channels,
        sum(one.flops for one in members),
        sum(one.moved_bytes for one in members),
        members[-1].output_bytes,
        sum(one.parameters for one in members),
        mixes_attribute=is_attention or not has_samples,
        mixes_channels=bool(others) or (main.flops > 0 and not is_attention),
        inputs=inputs,
    )

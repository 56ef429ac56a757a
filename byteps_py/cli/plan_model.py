"""`bps plan model`: what each layer of a model costs, from a forward pass on the meta device. Starts nothing."""

from __future__ import annotations

import argparse
import itertools
import json
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from byteps_py.cli.command import add_command, add_json

if TYPE_CHECKING:
    from byteps_py.tools.plan.model_costs import LayerCost, ModelCosts

_WIDTH = 100
_COLUMNS = ("parameters", "FLOPs", "activations")


def add_model(plans: Any) -> None:
    """Add the command to `bps plan`."""
    parser = add_command(
        plans,
        "model",
        help="parameters, FLOPs and activations of each layer of a model",
        description="Build a model on the meta device, where tensors have no values, run its forward pass there, and "
        "print what each layer costs: parameters, FLOPs of the forward pass, and the bytes that its backward pass "
        "needs. Takes seconds and no memory, however large the model is; needs torch. Operators without a formula of "
        "FLOPs are listed.",
        example="bps plan model --module my_package.model:build --input 1x2048:int64",
    )
    parser.add_argument(
        "--module", required=True, metavar="MODULE:FUNCTION", help="the function, without arguments, that makes the "
        "nn.Module; or MODEL.py:FUNCTION, or a call as 'model.py:build(layers=4)'",
    )  # fmt: skip
    add_inputs(parser)
    parser.add_argument("--stages", type=int, metavar="P", help="also cut the layers into P stages of a pipeline")
    add_json(parser)
    parser.set_defaults(handler=run_model)


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a module is traced."""
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SIZE[:TYPE]",
        help="of an input of the forward pass, as 1x2048:int64, or with its name, as ids=1x2048:int64; the type is "
        "float32 by default; may be given several times",
    )
    parser.add_argument("--dtype", metavar="TYPE", help="of the module, as bfloat16; default: its own")


def traced(arguments: argparse.Namespace) -> ModelCosts:
    """The costs of the module that the command line names. Raises UsageError."""
    from byteps_py.errors import UsageError

    try:
        from byteps_py.tools.plan.module_trace import InputSize, load_factory, parse_dtype, trace_model
    except ImportError as error:
        raise UsageError(f"--module needs torch on this machine ({error}): pip install 'byteps_py[torch]'") from error
    if not arguments.input:
        raise UsageError("--input is missing: give the sizes of the forward pass's inputs, as --input 1x2048:int64")
    dtype = None if arguments.dtype is None else parse_dtype(arguments.dtype)
    return trace_model(load_factory(arguments.module), [InputSize.parse(text) for text in arguments.input], dtype)


def run_model(arguments: argparse.Namespace) -> int:
    """Print the layers. Raises UsageError if the model can't be traced, or cut."""
    costs = traced(arguments)
    stages = costs.cut(arguments.stages) if arguments.stages is not None else []
    if arguments.json:
        cuts = {"stages": [[stage.start, stage.stop] for stage in stages]} if stages else {}
        print(json.dumps(costs.as_json() | cuts))
        return 0
    rows = list(_rows(costs))
    width = max(len(row[0]) for row in rows)
    print(f"{'layer':<{width}}  {'parameters':>16}  {'FLOPs':>9}  {'activations':>12}")
    for name, cells in rows:
        print(f"{name:<{width}}  {cells[0]:>16}  {cells[1]:>9}  {cells[2]:>12}")
    print()
    for number, stage in enumerate(stages):
        layers = costs.layers[stage.start : stage.stop]
        share = sum(layer.flops for layer in layers) / max(1, costs.flops)
        names = shown_range(layers[0].name, layers[-1].name)
        print(_wrapped(f"Stage {number}: {names}, {share:.0%} of the FLOPs."))
    for remark in costs.remarks():
        print(_wrapped(remark))
    print(
        _wrapped(f"A step computes {amount(costs.step_flops)}FLOPs: a backward pass twice as many as a forward pass.")
    )
    return 0


def _rows(costs: ModelCosts) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Equal layers in one row, then all together."""
    place = 0
    for _, run in itertools.groupby(costs.layers, key=_alike):
        layers = list(run)
        first = layers[0]
        name = f"{len(layers)} x {first.kind}, {shown_range(first.name, layers[-1].name)}, each"
        yield (name if len(layers) > 1 else f"{first.name or '(itself)'} {first.kind}"), _cells(first)
        place += len(layers)
    total = (f"{costs.parameters:,}", amount(costs.flops), f"{costs.activation_bytes / 1e6:,.1f} MB")
    yield "all", total


def _alike(layer: LayerCost) -> tuple[Any, ...]:
    return (layer.kind, layer.parameters, layer.flops, layer.activation_bytes, bool(layer.name))


def _cells(layer: LayerCost) -> tuple[str, str, str]:
    return f"{layer.parameters:,}", amount(layer.flops), f"{layer.activation_bytes / 1e6:,.1f} MB"


def shown_range(first: str, last: str) -> str:
    """Names of layers in text; the model itself has none."""
    return (first or "the model itself") if first == last else f"{first or 'the model itself'} to {last}"


def amount(value: float) -> str:
    """With a prefix of the SI.

    >>> amount(1.5e12), amount(0)
    ('1.50 T', '0 ')
    """
    for power, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= power:
            return f"{value / power:.2f} {prefix}"
    return f"{value:g} "


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)

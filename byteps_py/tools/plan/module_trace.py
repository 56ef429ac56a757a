"""The costs of a model of PyTorch, found without its memory or its time: the module is built on the meta device, where
tensors have shapes and no values, and its forward pass runs there once under a TorchDispatchMode.

    factory ─► nn.Module on "meta" ─► forward pass: operators, their FLOPs (torch.utils.flop_counter) and bytes,
                                      tensors that autograd keeps ─► ModelCosts

trace_recorder.py counts. One trace at a time: what it registers with torch, other threads see, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from byteps_py.errors import UnsupportedError, UsageError
from byteps_py.tools.plan.model_costs import ModelCosts
from byteps_py.tools.plan.trace_recorder import TraceRecorder
from byteps_py.wording import shown

#: What torch says of operators without a kernel for the meta device, and where a value is asked for.
_MISSING_MARKS = ("no fake impl", "no Meta kernel", "not implemented for 'Meta'")
_VALUE_MARKS = ("meta tensor", "data-independent", "data-dependent", "meta device type tensor")


@dataclass(frozen=True, slots=True)
class InputSize:
    """An input of the forward pass. ``name``: of the keyword; empty: by position."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> InputSize:
        """``2x1024:int64``, or ``mask=2x1024:bool``; without a type it is float32. Raises UsageError.

        >>> InputSize.parse("ids=2x1024:int64")
        InputSize(shape=(2, 1024), dtype=torch.int64, name='ids')
        """
        name, _, rest = text.rpartition("=")
        sizes, _, kind = rest.partition(":")
        dtype = getattr(torch, kind or "float32", None)
        parts = sizes.split("x")
        if not all(part.isdecimal() and int(part) for part in parts) or not isinstance(dtype, torch.dtype):
            raise UsageError(
                f"{shown(text)!r} is no input: give sizes and a type of torch, as 2x1024:int64, or with the argument's "
                "name, as ids=2x1024:int64"
            )
        return cls(tuple(map(int, parts)), dtype, name)


def parse_dtype(name: str) -> torch.dtype:
    """The floating-point type of torch with this name. Raises UsageError."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(f"--dtype={shown(name)}: a floating-point type of torch is needed, as bfloat16")
    return dtype


def load_factory(text: str) -> Callable[[], nn.Module]:
    """``package.module:build`` or ``model.py:build``, of a function without arguments or a class; or a call of it, as
    ``model.py:build(layers=4)``: Python, in the module's names. Raises UsageError."""
    where, _, expression = text.partition(":")
    if not where or not expression:
        raise UsageError(
            f"{shown(text)!r} names no function: give MODULE:FUNCTION, as my_package.model:build, or MODEL.py:FUNCTION"
        )
    try:
        found = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    except Exception as error:
        raise UsageError(
            f"{shown(where)} can't be imported: {_said(error)}. Try it with python -c, from the same folder"
        ) from error
    if all(name.isidentifier() for name in expression.split(".")):
        made: Any = found
        for name in expression.split("."):
            made = getattr(made, name, None)
        if not callable(made):
            raise UsageError(f"{shown(where)} has no function {shown(expression)!r}: name one that returns the module")
        return made  # type: ignore[no-any-return]
    try:
        code = compile(expression, "--module", "eval")
    except SyntaxError as error:
        raise UsageError(
            f"{shown(expression)!r} is no Python: {error.msg}. Give a function's name, or a call of it"
        ) from error
    return lambda: eval(code, vars(found))


def _import_module(name: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:  # as `python -m` has it; `bps` does not
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no such file, seen from {Path.cwd()}")
    if str(path.parent.resolve()) not in sys.path:  # a script finds its neighbours
        sys.path.insert(0, str(path.parent.resolve()))
    name = f"planned {path.resolve()}"  # none that another module has
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


def trace_model(
    model: nn.Module | Callable[[], nn.Module], inputs: Sequence[InputSize], dtype: torch.dtype | None = None
) -> ModelCosts:
    """The costs of a model's layers and operators for inputs of these sizes. Nothing is computed, and nothing is
    allocated, however large the model is.

    Args:
        model: a function that makes the module, which then is built on the meta device; or a module of that device.
        inputs: of the forward pass.
        dtype: of parameters and of floating-point inputs; default: the module's own.

    Raises:
        UnsupportedError: the model asks for values of tensors, or has an operator that the meta device lacks.
        UsageError: the module can't be built there, or its forward pass fails.

    >>> costs = trace_model(lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), [InputSize((4, 8))])
    >>> costs.parameters, costs.flops, [layer.name for layer in costs.layers]
    (552, 4096, ['0', '1', '2'])
    """
    module = _on_meta(model, dtype)
    found = [
        torch.empty(
            one.shape, dtype=dtype if dtype is not None and one.dtype.is_floating_point else one.dtype, device="meta"
        )
        for one in inputs
    ]
    positional = [tensor for tensor, one in zip(found, inputs, strict=True) if not one.name]
    named = {one.name: tensor for tensor, one in zip(found, inputs, strict=True) if one.name}
    recorder = TraceRecorder(module, found)
    try:
        with recorder, torch.device("meta"), torch.enable_grad():
            output = module(*positional, **named)
    except UsageError:
        raise
    except Exception as error:
        raise _explained(error, recorder, type(module).__name__) from error
    return recorder.costs(output)


def _on_meta(model: nn.Module | Callable[[], nn.Module], dtype: torch.dtype | None) -> nn.Module:
    if isinstance(model, nn.Module):
        made: Any = model
    else:
        try:
            with torch.device("meta"):
                made = model()
        except Exception as error:
            raise UsageError(
                f"the model can't be built on the meta device: {_said(error)}. It must not read values of parameters "
                "while it is built, nor load weights; give a function without arguments"
            ) from error
    if not isinstance(made, nn.Module):
        raise UsageError(f"the function returns a {type(made).__name__}: it must return the nn.Module")
    module: nn.Module = made
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.device.type != "meta" for tensor in tensors):
        if isinstance(model, nn.Module):
            raise UsageError(
                "the model has parameters with values: build it within `with torch.device('meta'):`, or give the "
                "function that builds it"
            )
        module = module.to(device="meta")  # a factory that names its device, or loads weights
    if dtype is not None:
        module.to(dtype)
    return module


def _explained(error: Exception, recorder: TraceRecorder, model: str) -> UsageError:
    where = f"layer {recorder.place!r}" if recorder.place else f"{model}'s own forward"
    said = _said(error)
    if any(mark in str(error) for mark in _MISSING_MARKS):
        return UnsupportedError(
            f"{where} calls an operator that the meta device lacks: {said}. torch.library.register_fake tells the size "
            "of its output; or plan a model without this layer"
        )
    if any(mark in str(error) for mark in _VALUE_MARKS):
        return UnsupportedError(
            f"{where} depends on values of tensors, and on the meta device there are none: {said}. Plan a model "
            "without this branch (no .item(), no bool(tensor), no sizes that follow from values)"
        )
    return UsageError(
        f"the forward pass fails in {where}: {said}. See whether the inputs are those that the model takes, and "
        "whether it makes its own tensors on the device of its inputs"
    )


def _said(error: Exception) -> str:
    """The first sentence of the message, with its class."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].split('. ')[0].rstrip('.!')}" if lines else type(error).__name__

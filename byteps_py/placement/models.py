"""Lists of parameters to plan a placement for: those of well-known models, or of a user's file.

Owns models.json (written by benchmarks/models.py) and the format of users' files, which is the same: rows of
[parameter name, shape]. Reads files and does nothing else; any thread.
"""

from __future__ import annotations

import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

from byteps_py.errors import ConfigurationError
from byteps_py.placement.placement_table import Entry
from byteps_py.tensors import key_of

#: Parameter names and shapes, in the model's order.
Shapes = list[tuple[str, tuple[int, ...]]]


def known_models() -> list[str]:
    """The names that ``load_model`` takes."""
    return list(_models())


def load_model(name: str) -> Shapes:
    """The parameters of a well-known model. Raises ConfigurationError for another name; it lists the known ones."""
    models = _models()
    if name not in models:
        raise ConfigurationError(
            f"unknown model {name!r}: known models are {', '.join(models)}; for another one, give --shapes FILE"
        )
    return _checked(models[name], f"model {name}")


def read_shapes(path: str) -> Shapes:
    """The rows of a JSON file, ``[["conv1.weight", [64, 3, 7, 7]], …]``. Raises ConfigurationError."""
    try:
        rows = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from error
    return _checked(rows, path)


def entries(shapes: Shapes, itemsize: int = 4) -> list[Entry]:
    """The parameters' gradients as entries of a placement table, with ``itemsize`` bytes per element."""
    return [Entry(key_of(name), math.prod(shape) * itemsize, itemsize) for name, shape in shapes]


def _models() -> dict[str, Any]:
    models: dict[str, Any] = json.loads(resources.files(__package__).joinpath("models.json").read_text())
    return models


def _checked(rows: object, source: str) -> Shapes:
    if not isinstance(rows, list):
        raise ConfigurationError(f"{source} must be a list of [name, shape] rows, got {type(rows).__name__}")
    shapes: Shapes = []
    for number, row in enumerate(rows, start=1):
        match row:
            case [str(name), [*shape]] if _is_text(name) and all(type(d) is int and d >= 0 for d in shape):
                shapes.append((name, tuple(shape)))
            case _:
                raise ConfigurationError(
                    f'{source}: row {number} must be a name and a shape, ["fc.weight", [10, 4]], got {row!r}'
                )
    names = [name for name, _ in shapes]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise ConfigurationError(f"{source}: parameter {twice!r} is listed twice")
    if not any(math.prod(shape) for _, shape in shapes):
        raise ConfigurationError(f"{source} holds no elements: there is nothing to place")
    return shapes


def _is_text(name: str) -> bool:
    """False for a string with surrogates, which JSON allows but UTF-8 can't encode: it has no key."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)

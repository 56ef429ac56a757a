"""Shapes of decoder-only transformers, such as Llama 3: those of well-known models, or of a user's JSON file.

Reads files and does nothing else; any thread.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from byteps_py.errors import UsageError
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
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{shown(path)} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{shown(path)} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{shown(path)} has a {type(found).__name__}; it must have an object with {', '.join(_KEYS)}")
    if missing := [key for key in _KEYS if key not in found]:
        raise UsageError(f"{shown(path)} lacks {', '.join(missing)}: a model has the keys {', '.join(_KEYS)}")
    if unknown := sorted(set(found) - set(_KEYS)):
        raise UsageError(f"{shown(path)} has {shown(unknown[0])!r}: a model has the keys {', '.join(_KEYS)} only")
    try:
        return ModelShape(**found)
    except UsageError as error:
        raise UsageError(f"{shown(path)}: {error}") from error


def load_model(name: str) -> ModelShape:
    """``name``: of a well-known model, or of a file (\"….json\", or with a slash). Raises UsageError."""
    return read_model(name) if name.endswith(".json") or "/" in name else known_model(name)


_KEYS = tuple(field.name for field in fields(ModelShape))

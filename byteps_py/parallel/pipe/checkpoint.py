"""Saves a pipeline and its optimizer so that a pipeline with other stages, another schedule or another number of ranks
can go on: torch.distributed.checkpoint, with the names that parameters have in the whole model.

All ranks call the functions. One thread.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from byteps_py.errors import UsageError
from byteps_py.parallel.pipe.pipeline import Pipeline

_MODEL, _OPTIMIZER = "model.", "optimizer."


def save(pipe: Pipeline, path: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write the parameters and buffers of all stages to the directory ``path``, which all ranks reach, and the state of
    ``optimizer``, which has this rank's parameters.

        save(pipe, "checkpoint/1000", optimizer)
    """
    state: dict[str, Any] = {_MODEL + name: tensor for name, tensor in pipe.state_dict().items()}
    if optimizer is not None:
        for name, parameter in pipe.named_parameters(remove_duplicate=False):
            for key, value in optimizer.state.get(parameter, {}).items():
                state[f"{_OPTIMIZER}{name}.{key}"] = value
    state_dict_saver.save(state, checkpoint_id=path, process_group=pipe.group)


def load(pipe: Pipeline, path: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None) -> None:
    """Read a checkpoint of ``save``, perhaps one of other stages. Hyperparameters of ``optimizer`` stay. Raises
    UsageError if the model has other parameters."""
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    state: dict[str, Any] = {_MODEL + name: tensor for name, tensor in pipe.state_dict().items()}
    for name, tensor in state.items():
        _check(name, tensor, metadata, path)
    names = dict(pipe.named_parameters())
    entries: dict[str, dict[str, str]] = {name: {} for name in names}
    if optimizer is not None:
        for key, stored in metadata.state_dict_metadata.items():
            name, _, entry = key.removeprefix(_OPTIMIZER).rpartition(".")
            if key.startswith(_OPTIMIZER) and name in names:
                entries[name][entry] = key
                state[key] = _empty(stored, names[name].device)
    state_dict_loader.load(state, storage_reader=reader, process_group=pipe.group)
    pipe.load_state_dict({key.removeprefix(_MODEL): value for key, value in state.items() if key.startswith(_MODEL)})
    if optimizer is not None:
        for name, found in entries.items():
            optimizer.state[names[name]] = {entry: state[key] for entry, key in found.items()}


def _empty(stored: TensorStorageMetadata | BytesStorageMetadata, device: torch.device) -> Any:
    """The place for the stored value."""
    if not isinstance(stored, TensorStorageMetadata):
        return None
    # Scalars such as Adam's count of steps stay on the CPU.
    return torch.empty(stored.size, dtype=stored.properties.dtype, device=device if stored.size else "cpu")


def _check(name: str, tensor: Any, metadata: Metadata, path: str | os.PathLike[str]) -> None:
    stored = metadata.state_dict_metadata.get(name)
    if stored is None:
        raise UsageError(f"{os.fspath(path)}: there is no {name.removeprefix(_MODEL)!r}: it is of another model")
    if isinstance(stored, TensorStorageMetadata) and stored.size != tensor.shape:
        raise UsageError(
            f"{os.fspath(path)}: {name.removeprefix(_MODEL)!r} has the shape {tuple(stored.size)} there, "
            f"{tuple(tensor.shape)} here"
        )

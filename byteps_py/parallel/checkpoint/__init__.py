"""Saves a model in parts and its optimizer, so that ranks in another layout can go on: other numbers of tensor-parallel
ranks, other stages and schedules of a pipeline, with FSDP2 or without, and other numbers of ranks.

    saving, loading       the functions; saves in the background
    contents              what a rank saves of its model, and of its optimizer, of whatever kind
    stored_pieces         which pieces of a checkpoint a rank reads, and where they go
    copies                whether ranks that should have equal parameters do
    ranks                 all ranks go on, or all raise the same error

The files are those of byteps_py/checkpoint_files.py: a manifest with checksums, renamed last.

The format is torch.distributed.checkpoint's. The names are those that parameters have in the whole model. A parameter
that tensor-parallel ranks have cut is saved as its pieces: "model.0.weight@0:512:1024" are the indices 512 to 1023 of
dimension 0. The padding of a vocabulary is not saved. Each rank reads the pieces that overlap with its own.

All ranks call the functions. One thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from byteps_py.lazy_imports import import_lazily

if TYPE_CHECKING:
    from byteps_py.parallel.checkpoint.loading import load as load
    from byteps_py.parallel.checkpoint.saving import SaveHandle as SaveHandle, save as save

import_lazily(__name__)

"""The largest of all ranks' values: what ranks compare numbers with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from byteps_py.tensors import DType, Op, TensorSpec
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.slot_view import TensorRequest


def largest(context: Context, name: str, values: Sequence[float]) -> list[float]:
    """The largest of all ranks' values, each. All ranks call it. Raises what Session.wait raises."""
    own = torch.tensor(values, dtype=torch.float64, device="cpu")
    if context.session.size == 1:
        return own.tolist()
    spec = TensorSpec(name, DType.FLOAT64, (len(own),), Op.MAX)
    (view,) = context.slot_views([TensorRequest(spec, torch.float64, ((len(own),),), own.device)])
    view.contribute([own])
    view.wait()
    return view.results[0].tolist()

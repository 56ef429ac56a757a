"""A communication hook for torch's DistributedDataParallel, for scripts that use gloo or NCCL for everything else.

DistributedDataParallel's reducer calls it on autograd's threads; a thread of the pool waits for the results.
"""

# No `from __future__ import annotations`: DistributedDataParallel compares a hook's annotations with its own types.
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.utils.weak import WeakIdKeyDictionary

from byteps_py.errors import UnsupportedError
from byteps_py.tensors import PRIORITY_READY_ORDER, NonFinite, TensorSpec
from byteps_py.torch.collectives import context as contexts, nonfinite
from byteps_py.torch.collectives.completion import Completer
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import wire_dtype
from byteps_py.torch.collectives.slot_view import PieceView, TensorRequest
from byteps_py.torch.compression import Compression, Compressor, codec_for, compression_of


@dataclass(frozen=True, slots=True)
class CommHookOptions:
    """The state of ``ddp_comm_hook``. compression: one of Compression, for the network."""

    compression: type[Compressor] = Compression.none


def ddp_comm_hook(state: CommHookOptions | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over all ranks of byteps_py: ``model.register_comm_hook(None, ddp_comm_hook)``.

    Call ``init()`` before. The model's process group must contain all ranks of the job. The result is the bucket's own
    tensor, dense, on cpu or cuda. Raises NotInitializedError, and UnsupportedError if BYTEPS_NONFINITE is skip. After a
    later failure ``backward()`` raises a RuntimeError that names byteps_py's error.
    """
    context = contexts.current()
    average = _BucketAverage(bucket.buffer())
    if context.session.size > 1 or context.settings.force_distributed:
        average.begin(context, _name_of(context, bucket), (state or CommHookOptions()).compression)
        _completer.add(average)
    else:
        average.fire()
    return average.future


_completer = Completer()
_lock = threading.Lock()
_names = WeakIdKeyDictionary()  # by first parameter, which alone identifies a bucket's model here


def _name_of(context: Context, bucket: GradBucket) -> str:
    """The bucket's name: a number. All ranks see new buckets in the same order, so they number them equally."""
    first = bucket.parameters()[0]
    with _lock:
        name = _names.get(first)
        if name is None:
            name = _names[first] = context.claim("ddp_comm_hook")
        return str(name)


class _BucketAverage:
    """One round of a bucket."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._slot_view: PieceView | None = None
        self._error: Exception | None = None
        self._promise: torch.futures.Future[Any] = torch.futures.Future()
        # See work.py: C++ does not see an error set on a Python future, but sees one that a callback raises.
        self.future: torch.futures.Future[torch.Tensor] = self._promise.then(self._result)

    def begin(self, context: Context, name: str, compression: type[Compressor]) -> None:
        compression = compression_of(compression)
        dtype = compression.wire_dtype(self._buffer.dtype)
        shape = tuple(self._buffer.shape)
        mode = nonfinite.mode_of(context)
        if mode is NonFinite.SKIP:
            raise UnsupportedError(
                "ddp_comm_hook can't leave out a step, which is your optimizer's: use BYTEPS_NONFINITE=raise or allow, "
                "or a DistributedOptimizer"
            )
        codec = codec_for(compression, dtype, self._buffer.nbytes, name, context.settings)
        spec = TensorSpec(
            name, wire_dtype(dtype, name), shape, average=True, priority=PRIORITY_READY_ORDER, nonfinite=mode,
            codec=codec,
        )  # fmt: skip
        (self._slot_view,) = context.slot_views([TensorRequest(spec, dtype, (shape,), self._buffer.device)])
        self._slot_view.contribute([self._buffer])

    def complete_or_fail(self) -> None:
        try:
            if self._slot_view is not None:
                self._slot_view.wait()
                if blame := self._slot_view.slot.nonfinite_ranks:
                    step = self._slot_view.slot.round
                    place = nonfinite.where(
                        self._slot_view.slot.spec.name, self._slot_view.results[0], self._buffer.dtype
                    )
                    raise nonfinite.explain(blame, self._slot_view.session.size, step, [place] if place else [])
                self._slot_view.fetch([self._buffer])
                if (queued := self._slot_view.mover.queued()) is not None:
                    queued.synchronize()
        except Exception as error:
            self._error = error

    def fire(self) -> None:
        self._promise.set_result(None)

    def _result(self, _: torch.futures.Future[Any]) -> torch.Tensor:
        if self._error is not None:
            raise self._error
        return self._buffer

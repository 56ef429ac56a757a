"""Adasum combines vectors of several ranks: it averages parallel vectors and adds orthogonal ones.

    adasum(a, b) = (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation" (arXiv 2006.02924). The rule combines
neighbours, then neighbours of the results, and so on; with an odd number, the last vector enters the next level
unchanged. Every result is a linear combination of the ranks' vectors, and its factors follow from the products a·b of
all pairs. So the operation takes one exchange, one small sum and one gather, for any number of ranks:

    EXCHANGE  each rank gets its 1/n of every rank's vectors       M (n-1)/n bytes out and in
    SUM       products of all pairs, computed on each 1/n          n (n+1)/2 float64 per tensor
    combine   each rank its 1/n; the factors are equal on all
    GATHER    the combined pieces                                  M (n-1)/n bytes out and in

Products, factors and the combination are float64, rounded once at the end. The number of ranks alone decides the order
of additions, so all ranks get the same bits. Any thread may call ``start``. Each operation has a thread of its own, so
that ranks may wait for their operations in different orders.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from byteps_py.errors import UsageError
from byteps_py.session import Session, Slot
from byteps_py.tensors import DType, Layout, Op, TensorSpec
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import check_dense, wire_dtype

Floats = npt.NDArray[np.float64]

#: Elements of a vector that are converted to float64 at once. A constant, because it is part of the order of additions.
_CHUNK = 1 << 15
#: A square smaller than this fraction of the sum of its terms' magnitudes is rounding error and counts as zero.
_ROUNDING = 1e-13

_running: weakref.WeakKeyDictionary[Session, dict[str, AdasumOperation]] = weakref.WeakKeyDictionary()
_running_lock = threading.Lock()


def adasum(
    context: Context, tensors: Sequence[torch.Tensor], name: str, group: tuple[int, ...] = ()
) -> list[torch.Tensor]:
    """The Adasum of each of ``tensors`` over the ranks of ``group`` (empty: all); see ``start``."""
    return start(context, tensors, name, group).wait()


def start(context: Context, tensors: Sequence[torch.Tensor], name: str, group: tuple[int, ...] = ()) -> AdasumOperation:
    """Begin to combine each of ``tensors`` with the other ranks' tensors at the same position.

    The tensors have one floating dtype and any shape, are on cpu or cuda, and may be changed after the call. Raises
    UsageError for another dtype, for different dtypes, or if an operation of this name is not finished.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1:
        raise UsageError(f"tensor {name!r}: Adasum takes tensors of one dtype, got {sorted(map(str, dtypes))}")
    for tensor in tensors:
        check_dense(tensor, name)
    if not wire_dtype(tensors[0].dtype, name).is_floating:
        raise UsageError(f"tensor {name!r} has dtype {tensors[0].dtype}: Adasum takes floating types")
    session = context.session
    with _running_lock:
        earlier = _running.setdefault(session, {}).get(name)
        if earlier is not None and not earlier.done:
            raise UsageError(f"duplicate name: Adasum of {name!r} is in flight already; wait for it first")
        operation = _running[session][name] = AdasumOperation(session, tensors, name, group)
    return operation


class AdasumOperation:
    """A running Adasum. Any thread may wait for it."""

    def __init__(self, session: Session, tensors: Sequence[torch.Tensor], name: str, group: tuple[int, ...]) -> None:
        self._session = session
        self._name = name
        self._group = group
        self._members = len(group or range(session.size))
        self._position = (group or range(session.size)).index(session.rank)
        self._dtype = tensors[0].dtype
        self._like = [(tensor.shape, tensor.device) for tensor in tensors]
        self._ends = np.cumsum([tensor.numel() for tensor in tensors]).tolist()
        self._results: list[torch.Tensor] = []
        self._error: Exception | None = None
        self._finished = threading.Event()
        self._thread: threading.Thread | None = None
        count = self._ends[-1]
        if self._members == 1 or not count:
            self._results = [tensor.detach().clone() for tensor in tensors]
            self._finished.set()
            return
        self._bounds = [count * i // self._members for i in range(self._members + 1)]
        slot = self._exchange(tensors)
        self._thread = threading.Thread(target=self._carry_on, args=(slot,), name=f"byteps-adasum-{name}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """True if ``wait`` would not block."""
        return self._finished.is_set()

    def wait(self) -> list[torch.Tensor]:
        """The results, new tensors in the order of the inputs. Raises as Session.wait does."""
        self._finished.wait()  # bounded: the thread's own waits have the session's time limits
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        # Here and not on the operation's thread: the caller does not wait for that thread's CUDA streams.
        return [result.to(device) for result, (_, device) in zip(self._results, self._like, strict=True)]

    # ---- the steps -------------------------------------------------------------------------------------

    def _exchange(self, tensors: Sequence[torch.Tensor]) -> Slot:
        """Send every rank its piece of this rank's vectors."""
        pieces = self._pieces()
        mine = pieces[self._position][1]
        total = sum(length for _, length in pieces)
        slot = self._declare("pieces", DType.UINT8, (total, self._members * mine), Op.EXCHANGE)
        flat = self._view(slot.input, total)
        with torch.no_grad():
            for tensor, end in zip(tensors, self._ends, strict=True):
                flat[end - tensor.numel() : end].copy_(tensor.detach().reshape(-1))
        receives = tuple((i * mine, mine) for i in range(self._members))
        self._session.hand_over(slot, layout=Layout(tuple(pieces), receives))
        return slot

    def _carry_on(self, slot: Slot) -> None:
        try:
            self._session.wait(slot)
            first, last = self._bounds[self._position : self._position + 2]
            rows = self._view(slot.result, self._members * (last - first) * self._dtype.itemsize)
            rows = rows.view(self._members, last - first)
            factors = _factors(self._sum(self._products(rows)))
            self._results = self._gather(self._combine(rows, factors))
        except Exception as error:
            self._error = error
        finally:
            self._finished.set()

    def _products(self, rows: torch.Tensor) -> Floats:
        """[tensor, i, j]: the product of rank i's and rank j's piece of each tensor."""
        products = np.zeros((len(self._ends), self._members, self._members))
        for number, start, end in self._chunks():
            chunk = rows[:, start:end].double().numpy()
            products[number] += np.einsum("ik,jk->ij", chunk, chunk)  # one thread, no BLAS: the same bits every time
        return products

    def _sum(self, products: Floats) -> Floats:
        upper = np.triu_indices(self._members)
        values = products[:, *upper]
        slot = self._declare("products", DType.FLOAT64, values.shape, Op.SUM)
        np.frombuffer(slot.input, np.float64)[:] = values.reshape(-1)
        self._session.hand_over(slot)
        self._session.wait(slot)
        total = np.empty_like(products)
        total[:, *upper] = np.frombuffer(slot.result, np.float64).reshape(values.shape)
        return np.triu(total) + np.triu(total, 1).transpose(0, 2, 1)

    def _combine(self, rows: torch.Tensor, factors: Floats) -> torch.Tensor:
        combined = torch.empty(rows.shape[1], dtype=self._dtype, device="cpu")
        for number, start, end in self._chunks():
            chunk = np.einsum("i,ik->k", factors[number], rows[:, start:end].double().numpy())
            combined[start:end].copy_(torch.from_numpy(chunk))
        return combined

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        pieces = self._pieces()
        total = sum(length for _, length in pieces)
        slot = self._declare("results", DType.UINT8, (mine.nbytes, total), Op.GATHER)
        self._view(slot.input, mine.nbytes).copy_(mine)
        self._session.hand_over(slot, layout=Layout(((0, mine.nbytes),), tuple(pieces)))
        self._session.wait(slot)
        flat = self._view(slot.result, total)
        results = []
        start = 0
        for (shape, _), end in zip(self._like, self._ends, strict=True):
            results.append(flat[start:end].reshape(shape).clone())
            start = end
        return results

    # ---- pieces ----------------------------------------------------------------------------------------

    def _pieces(self) -> list[tuple[int, int]]:
        """(offset, bytes) of each rank's piece."""
        size = self._dtype.itemsize
        return [(a * size, (b - a) * size) for a, b in zip(self._bounds, self._bounds[1:], strict=False)]

    def _chunks(self) -> Iterator[tuple[int, int, int]]:
        """(tensor, start, end) of each chunk of this rank's piece, counted from the start of the piece."""
        first, last = self._bounds[self._position : self._position + 2]
        begin = 0
        for number, end in enumerate(self._ends):
            low, high = max(begin, first), min(end, last)
            for start in range(low, high, _CHUNK):
                yield number, start - first, min(start + _CHUNK, high) - first
            begin = end

    def _declare(self, what: str, dtype: DType, shape: tuple[int, ...], op: Op) -> Slot:
        (slot,) = self._session.declare(
            [TensorSpec(f"{self._name}.adasum.{what}", dtype, shape, op, group=self._group)]
        )
        return slot

    def _view(self, memory: memoryview, nbytes: int) -> torch.Tensor:
        if not nbytes:
            return torch.empty(0, dtype=self._dtype, device="cpu")
        # Through numpy, which keeps the memory mapped while a view exists.
        return torch.from_numpy(np.frombuffer(memory, np.uint8, nbytes)).view(self._dtype)


def _factors(products: Floats) -> Floats:
    """[tensor, rank]: the factor of each rank's vector, from [tensor, i, j], the products of all pairs.

    >>> _factors(np.array([[[1.0, 0.0], [0.0, 4.0]]])).tolist()  # orthogonal vectors: the sum
    [[1.0, 1.0]]
    >>> _factors(np.array([[[1.0, 1.0], [1.0, 1.0]]])).tolist()  # equal vectors: the average
    [[0.5, 0.5]]
    """
    tensors, members, _ = products.shape
    levels = math.ceil(math.log2(members))
    combinations = [np.tile(row, (tensors, 1)) for row in np.eye(members)]  # each [tensor, rank]
    for _ in range(levels):
        left, right = combinations[0::2], combinations[1::2]
        merged = [_merge(a, b, products) for a, b in zip(left, right, strict=False)]
        combinations = merged + left[len(right) :]
    return combinations[0]


def _merge(a: Floats, b: Floats, products: Floats) -> Floats:
    def product(x: Floats, y: Floats) -> Floats:
        value = np.einsum("ti,tij,tj->t", x, products, y)
        size = np.einsum("ti,tij,tj->t", np.abs(x), np.abs(products), np.abs(y))
        result: Floats = np.where(np.abs(value) <= _ROUNDING * size, 0.0, value)
        return result

    def factor(square: Floats) -> Floats:
        # A zero vector is orthogonal to the other vector, which stays unchanged.
        shared = np.divide(both, 2 * square, out=np.zeros_like(square), where=~(square <= 0))
        return (1 - shared)[:, np.newaxis]

    with np.errstate(invalid="ignore", over="ignore"):  # infinities and NaN reach the result
        both = product(a, b)
        result: Floats = factor(product(a, a)) * a + factor(product(b, b)) * b
        return result

"""Values of parameters beside their gradients: side by side in one tensor (FlatCopy), and those that servers keep, and
that machines change in their own time (SharedValues).

    give: change ─► servers: values += change ─► take: values, as they are then

Machines are the unit: the ranks of one machine give together, and the sum of their changes is what the machine gives.
Where all ranks are on one machine, their changes are summed, and no server keeps anything. With a codec, changes travel
coded between machines, and counts beside them as they are. The training thread calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from byteps_py.tensor_codec import Codec
from byteps_py.tensors import NO_BOUND, Op, TensorSpec
from byteps_py.torch.collectives.context import Context
from byteps_py.torch.collectives.dtypes import wire_dtype
from byteps_py.torch.collectives.slot_view import PieceView, TensorRequest
from byteps_py.torch.compression import Compressor, codec_for

#: A parameter and its name.
Named = tuple[str, torch.nn.Parameter]


def copy_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter's global value and changes: at least float32, or small changes would be lost."""
    return torch.float32 if param.dtype.itemsize < torch.float32.itemsize else param.dtype


@dataclass(eq=False)
class FlatCopy:
    """The global values of parameters of one dtype and device.

    change: what is exchanged: a change, or the mean of all ranks' changes. views, changes: of each parameter's part.
    is_sent: of which elements the last mean has something, if it may lack some; None: of all.
    """

    names: list[str]
    params: list[torch.nn.Parameter]
    values: torch.nn.Parameter
    change: torch.Tensor
    views: list[torch.Tensor]
    changes: list[torch.Tensor]
    is_sent: torch.Tensor | None = None

    @classmethod
    def of(cls, named: Sequence[Named]) -> FlatCopy:
        """A copy of the present values."""
        names, params = [name for name, _ in named], [param for _, param in named]
        flat = torch.cat([param.detach().flatten().to(copy_dtype(param)) for param in params])
        change = torch.zeros_like(flat)
        sizes = [param.numel() for param in params]
        views, changes = (
            [part.view(param.shape) for part, param in zip(whole.split(sizes), params, strict=True)]
            for whole in (flat, change)
        )
        return cls(names, params, torch.nn.Parameter(flat, requires_grad=False), change, views, changes)

    @torch.no_grad()
    def take_change(self, sign: int = 1) -> None:
        """``change`` becomes what the rank's own values lack to the global ones, or with ``sign`` -1 what they have
        more."""
        for view, param, change in zip(self.views, self.params, self.changes, strict=True):
            if sign > 0:
                torch.sub(view, param, out=change)
            else:
                torch.sub(param, view, out=change)

    @torch.no_grad()
    def give_values(self, alpha: float = 0.0) -> None:
        """Parameters become the global values, but for a share of ``alpha`` of their own, and for what was not sent."""
        if self.is_sent is not None:
            sent = self.is_sent.split([param.numel() for param in self.params])
            for view, param, of in zip(self.views, self.params, sent, strict=True):
                values = view.to(param.dtype)
                values = param.lerp(values, 1 - alpha) if alpha else values
                param.copy_(torch.where(of.view(param.shape), values, param))
            return
        for view, param in zip(self.views, self.params, strict=True):
            if alpha:
                param.lerp_(view.to(param.dtype), 1 - alpha)
            else:
                param.copy_(view)

    @torch.no_grad()
    def move_parameters(self, before: torch.Tensor) -> None:
        """Parameters change as the global values have changed, which were ``before``."""
        moved = (self.values - before).split([param.numel() for param in self.params])
        for part, param in zip(moved, self.params, strict=True):
            param.add_(part.view(param.shape))


class SharedValues:
    """The values of some parameters. ``staleness``, ``quorum``: see TensorSpec; of a quorum, all machines if there are
    fewer. ``compression``: of changes."""

    def __init__(
        self,
        context: Context,
        name: str,
        staleness: int = NO_BOUND,
        quorum: int = 0,
        compression: type[Compressor] = Compressor,
    ) -> None:
        self._context, self._name, self._staleness, self._quorum = context, name, staleness, quorum
        self._compression = compression
        self._copies: list[FlatCopy] = []
        self._begun: list[PieceView] = []  # whose first round has brought the values
        self._given: list[PieceView] = []
        self._is_beginning = False  # the values are under way to the servers
        self._is_sum = False  # what was given last
        self._number = 0  # of the start
        self._counts: list[torch.Tensor] = []  # of each copy: changes, and ranks that have finished
        self._own_counts: list[torch.Tensor] = []  # what this rank has added to them last

    @property
    def copies(self) -> list[FlatCopy]:
        """By dtype and device. Empty before ``start``."""
        return self._copies

    @property
    def is_alone(self) -> bool:
        """One rank trains. Raises NotInitializedError after a shutdown."""
        session = self._context.session
        session.check_open()
        return session.size == 1

    @property
    def changes(self) -> int:
        """How many changes of ranks the values contain since the start. Of a quorum."""
        return min((int(count[0]) for count in self._counts), default=0)

    @property
    def finished(self) -> int:
        """How many ranks were known to have finished when the values were taken. Of a quorum."""
        return min((int(count[1]) for count in self._counts), default=0)

    def start(self, copies: Sequence[FlatCopy]) -> None:
        """From the next exchange on, these values, which are the same on all ranks. All ranks call it."""
        self._copies = list(copies)
        self._counts = [copy.change.new_zeros(2) for copy in self._copies] if self._quorum else []
        self._begun = []
        self._number = self._context.number_of_next(self._name)

    def start_from(self, named: Sequence[Named]) -> None:
        """From the next exchange on, the values of ``named``, as they are now. All ranks call it."""
        alike: dict[tuple[object, ...], list[Named]] = {}
        for name, param in named:
            alike.setdefault((param.dtype, param.device), []).append((name, param))
        self.start([FlatCopy.of(part) for part in alike.values()])

    def restart(self) -> None:
        """Begin anew with the next ``start``. All ranks call it."""
        self._copies, self._counts, self._is_beginning = [], [], False

    def begin(self) -> None:
        """After ``start``: send the values to the servers, which the next ``give`` would do otherwise, and wait for
        them. They must stay as they are until then. All ranks call it, or none."""
        if not self.is_alone:
            self._begin()

    def _begin(self) -> None:
        self._is_sum = self._context.session.num_machines == 1
        requests = [each for index, copy in enumerate(self._copies) for each in self._requests(index, copy)]
        self._given = self._context.slot_views(requests)
        if not self._is_sum and self._given != self._begun:  # also after join(), or in another job
            for count in self._counts:
                count.zero_()
            self._contribute([copy.values.detach() for copy in self._copies], self._counts)
            self._begun, self._is_beginning = self._given, True

    def _finish_beginning(self) -> None:
        if self._is_beginning:
            self._fetch([copy.values.detach() for copy in self._copies], self._counts)
            self._is_beginning = False

    def give(self, is_last: bool = False) -> None:
        """Send each copy's ``change``. ``is_last``: this rank has finished, of a quorum; to be said once."""
        changes = [copy.change for copy in self._copies]
        self._own_counts = [count.new_tensor([1, is_last]) for count in self._counts]
        if self.is_alone:
            return
        self._begin()
        self._finish_beginning()
        self._contribute(changes, self._own_counts)

    def take(self) -> None:
        """Wait for the values with the change that was given last. ``change`` is not needed any more."""
        values, changes = [copy.values.detach() for copy in self._copies], [copy.change for copy in self._copies]
        if not (self.is_alone or self._is_sum):
            self._fetch(values, self._counts)
            return
        if not self.is_alone:
            self._fetch(changes, self._own_counts)
        torch._foreach_add_([*values, *self._counts], [*changes, *self._own_counts])

    def unsent(self, is_taken: bool = False) -> list[torch.Tensor | None]:
        """Of each copy: what this rank's machine has not sent yet of its changes, if this rank has it; None if not.
        ``is_taken``: error feedback begins with zeros. Raises UsageError while an exchange is under way."""
        if not is_taken:
            self._finish_beginning()
        session, found = self._context.session, list[torch.Tensor | None]()
        if self._compression.codec is None or not self._compression.codec.error_feedback:
            return [None for _ in self._copies]
        names = [self._tensor_name(index) for index in range(len(self._copies))]
        states = session.coded_states(names)
        for name, copy in zip(names, self._copies, strict=True):
            state = states.get(name)
            error = torch.frombuffer(bytearray(state.data), dtype=torch.float32) if state and state.data else None
            found.append(None if error is None else error.to(copy.change.device))
        if is_taken:
            session.set_coded_states({name: each for name, each in session.coded_states().items() if name not in names})
        return found

    def _by_view(
        self, tensors: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]
    ) -> Iterator[tuple[PieceView, list[torch.Tensor]]]:
        """Each view, and what belongs to it."""
        has_own_counts = len(self._given) > len(tensors)
        pieces: list[list[torch.Tensor]] = []
        for index, tensor in enumerate(tensors):
            if has_own_counts:
                pieces += [[tensor], [counts[index]]]
            else:
                pieces.append([tensor, *counts[index : index + 1]])
        return zip(self._given, pieces, strict=True)

    def _contribute(self, given: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]) -> None:
        for view, pieces in self._by_view(given, counts):
            view.contribute(pieces)

    def _fetch(self, taken: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]) -> None:
        for view, pieces in self._by_view(taken, counts):
            view.wait()
            view.fetch(pieces)

    def _tensor_name(self, index: int) -> str:
        return f"{self._name}.{self._number}.{index}"

    def _requests(self, index: int, copy: FlatCopy) -> Iterator[TensorRequest]:
        """Values and counts as one tensor; as two where values have a codec, which counts can't have."""
        name, change = self._tensor_name(index), copy.change
        sizes = [change.numel(), *(count.numel() for count in self._counts[index : index + 1])]
        codec = None
        if not self._is_sum and self._compression.codec is not None:
            settings = self._context.settings
            codec = codec_for(self._compression, change.dtype, change.nbytes, name, settings)
        if self._compression.codec is None or self._is_sum:
            yield self._request(name, copy, sizes)
            return
        yield self._request(name, copy, sizes[:1], codec)
        for size in sizes[1:]:
            yield self._request(f"{name}.counts", copy, [size])

    def _request(self, name: str, copy: FlatCopy, sizes: Sequence[int], codec: Codec | None = None) -> TensorRequest:
        dtype = copy.change.dtype
        wire, shape = wire_dtype(dtype, name), (sum(sizes),)
        if self._is_sum:
            spec = TensorSpec(name, wire, shape)
        else:
            quorum = min(self._quorum, self._context.session.num_machines)
            spec = TensorSpec(name, wire, shape, Op.ACCUMULATE, staleness=self._staleness, quorum=quorum, codec=codec)
        return TensorRequest(spec, dtype, tuple((size,) for size in sizes), copy.change.device)

"""Where a run is in what it reads and draws: kept with each step, and put back so that each sample is used exactly
once.

    StatefulPosition    a loader with state_dict() and load_state_dict(), such as torchdata's StatefulDataLoader
    CountedPosition     torch's DataLoader with a dataset that has indices, and a sampler of torch's own: it is made to
                        choose the same order again, and what was used is skipped
    ElasticPosition     the same with an ElasticSampler, whose position other numbers of ranks divide anew
    random_states       of the generators that are global: of Python, numpy, torch, and its CUDA devices

What none of the positions can put back, ``position_of`` refuses. All states are plain values and tensors, which
torch.load takes with weights_only=True. The training thread calls.
"""

from __future__ import annotations

import abc
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import data

from byteps_py.errors import UsageError
from byteps_py.system.log import logger
from byteps_py.torch.elastic.sampler import ElasticSampler
from byteps_py.torch.elastic.state import Stateful

#: Samplers that draw random numbers for an epoch only when it begins: random numbers of the training script between
#: its batches do not change their order.
_AT_ONCE = (
    data.SequentialSampler,
    data.RandomSampler,
    data.SubsetRandomSampler,
    data.WeightedRandomSampler,
    data.DistributedSampler,
)
_ADVICE = (
    "Use torchdata's StatefulDataLoader, or another loader that has state_dict() and load_state_dict(), or torch's "
    "DataLoader with a dataset that has indices and a sampler of torch's own or bps.elastic.ElasticSampler"
)


class LoaderPosition(abc.ABC):
    """The position of one loader, over and over for each epoch."""

    #: Names the kind in what is saved.
    kind: str

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    @property
    def batches(self) -> int:
        """Of an epoch; 0 if the loader does not know."""
        try:
            return len(self._loader)
        except TypeError:  # of an IterableDataset
            return 0

    @abc.abstractmethod
    def begin(self, epoch: int) -> Iterator[Any]:
        """The batches of epoch number ``epoch``."""

    @abc.abstractmethod
    def state(self, is_begun: bool) -> dict[str, Any]:
        """The position after the latest batch. ``is_begun``: in an epoch; else between two."""

    @abc.abstractmethod
    def go_back(self, state: dict[str, Any], epoch: int, is_same_size: bool) -> Iterator[Any] | None:
        """The rest of the batches after a position in epoch number ``epoch``; None if it was between two. May change
        random states. ``is_same_size``: of as many ranks as there are. Raises UsageError if it can't be put back."""

    @abc.abstractmethod
    def note_batch(self) -> None:
        """A batch was taken. Raises UsageError if somebody else counts as well."""


def position_of(loader: object) -> LoaderPosition:
    """The position of a loader. Raises UsageError if its position can't be put back."""
    if isinstance(loader, Stateful):
        return StatefulPosition(loader)
    if not isinstance(loader, data.DataLoader):
        raise UsageError(
            f"RunState: a loader without state: {type(loader).__name__} has no state_dict() and load_state_dict(), so "
            f"a restored run could not go on behind the samples that it has used. {_ADVICE}"
        )
    _check_counted(loader)
    if isinstance(loader.sampler, ElasticSampler):
        return ElasticPosition(loader, loader.sampler)
    return CountedPosition(loader)


def _check_counted(loader: data.DataLoader[Any]) -> None:
    """Raises UsageError if going through the loader again does not give the same batches."""
    batches = loader.batch_sampler
    why = ""
    if isinstance(loader.dataset, data.IterableDataset):
        why = f"its dataset {type(loader.dataset).__name__} is an IterableDataset, which has no indices"
    elif batches is not None and type(batches) is not data.BatchSampler:
        why = f"its batch_sampler {type(batches).__name__} may choose another order when it is asked again"
    elif type(loader.sampler) not in (*_AT_ONCE, ElasticSampler):
        why = f"its sampler {type(loader.sampler).__name__} may choose another order when it is asked again"
    elif loader.num_workers and loader.persistent_workers:
        why = "persistent_workers=True lets random states of workers go on from epoch to epoch"
    elif loader.num_workers and not getattr(loader, "in_order", True):
        why = "in_order=False gives batches in the order in which workers finish them"
    if why:
        raise UsageError(f"RunState: a loader without state: {why}. {_ADVICE}")


def _set_epoch(loader: object, epoch: int) -> None:
    """Tell a sampler that orders by the epoch's number, as DistributedSampler does."""
    set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


class StatefulPosition(LoaderPosition):
    """Of a loader that knows where it is. Its position is this rank's."""

    kind = "stateful"

    def begin(self, epoch: int) -> Iterator[Any]:
        _set_epoch(self._loader, epoch)
        return iter(self._loader)

    def note_batch(self) -> None:
        """The loader counts."""

    def state(self, is_begun: bool) -> dict[str, Any]:
        return {"is_begun": is_begun, "loader": self._loader.state_dict()}

    def go_back(self, state: dict[str, Any], epoch: int, is_same_size: bool) -> Iterator[Any] | None:
        if not is_same_size:
            raise UsageError(
                f"RunState: {type(self._loader).__name__} keeps each rank's own position, and the run had another "
                "number of ranks: restart it with as many, or use torch's DataLoader with bps.elastic.ElasticSampler, "
                "whose position is that of all ranks together"
            )
        _set_epoch(self._loader, epoch)
        self._loader.load_state_dict(state["loader"])
        if state["is_begun"]:
            rest: Iterator[Any] = iter(self._loader)
            return rest
        self._loader.state_dict()  # makes torchdata's take it over now, and draw random numbers for it
        return None


class CountedPosition(LoaderPosition):
    """Of a loader that is asked again for the batches of its epoch.

    To choose the same order, random states are first as they were when the epoch began. Without worker processes, only
    indices are skipped. Worker processes may draw random numbers for what they load, so they load it again.
    """

    kind = "counted"

    def __init__(self, loader: data.DataLoader[Any]) -> None:
        super().__init__(loader)
        self._batches = 0  # since the iterator was made
        self._start: list[torch.Tensor] = []  # states of generators, when the iterator was made

    @property
    def _facts(self) -> dict[str, Any]:
        """A loader with others has other batches."""
        dataset: Any = self._loader.dataset
        return {
            "samples": len(dataset),
            "batch_size": self._loader.batch_size,
            "drop_last": self._loader.drop_last,
            "num_workers": self._loader.num_workers,
            "sampler": type(self._loader.sampler).__name__,
        }

    @property
    def _generators(self) -> list[torch.Generator]:
        """Beside torch's own: those that the loader and its sampler were given."""
        given = (self._loader.generator, getattr(self._loader.sampler, "generator", None))
        return [each for each in given if each is not None]

    def begin(self, epoch: int) -> Iterator[Any]:
        _set_epoch(self._loader, epoch)
        return self._iterator()

    def _iterator(self) -> Iterator[Any]:
        self._start = self._generator_states()
        self._batches = 0
        return iter(self._loader)

    def note_batch(self) -> None:
        self._batches += 1

    def _generator_states(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(each.get_state() for each in self._generators)]

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        first, *others = states
        torch.set_rng_state(first)
        if len(others) != len(self._generators):
            raise UsageError("RunState: the loader, or its sampler, had a generator in the run before, or has one now")
        for generator, state in zip(self._generators, others, strict=True):
            generator.set_state(state)

    def state(self, is_begun: bool) -> dict[str, Any]:
        return {
            "batches": self._batches if is_begun else 0,
            "generators": self._start if is_begun else self._generator_states(),
            "facts": self._facts,
        }

    def go_back(self, state: dict[str, Any], epoch: int, is_same_size: bool) -> Iterator[Any] | None:
        batches = state["batches"]
        if batches and not is_same_size:
            raise UsageError(
                f"RunState: the run had another number of ranks, and {type(self._loader.sampler).__name__} can't "
                "divide the rest of an epoch anew: restart it with as many ranks, or use bps.elastic.ElasticSampler"
            )
        self._check_facts(state["facts"], batches)
        self._set_generators(state["generators"])
        if not batches:
            return None
        rest = self.begin(epoch)
        self._skip(rest, batches)
        return rest

    def _check_facts(self, facts: dict[str, Any], batches: int) -> None:
        if batches and facts != self._facts:
            raise UsageError(
                f"RunState: the loader is another one than that of the run before, so the rest of its epoch is not "
                f"known: it had {facts}, and has {self._facts}"
            )

    def _skip(self, rest: Iterator[Any], batches: int) -> None:
        self._batches = batches
        indices = getattr(rest, "_sampler_iter", None) if not self._loader.num_workers else None
        if indices is None:
            logger.info(
                "%d batches that the run before has used are loaded again, because worker processes may have drawn "
                "random numbers for them; StatefulDataLoader does without", batches,
            )  # fmt: skip
        skipped = sum(1 for _ in itertools.islice(rest if indices is None else indices, batches))
        if skipped != batches:
            raise UsageError(f"RunState: the run before used {batches} batches of the epoch, which now has {skipped}")


class ElasticPosition(CountedPosition):
    """With the position of all ranks together, which is the sampler's. This class counts for it.

    As many ranks as before go on in the order in which samples were divided. Others divide the rest anew.
    """

    kind = "elastic"

    def __init__(self, loader: data.DataLoader[Any], sampler: ElasticSampler) -> None:
        super().__init__(loader)
        self._sampler = sampler
        self._first = 0  # samples that all ranks together had used when the rest was divided

    def begin(self, epoch: int) -> Iterator[Any]:
        self._sampler.set_epoch(epoch)
        return self._divided()

    def _divided(self) -> Iterator[Any]:
        self._first = self._sampler.processed_num
        return self._iterator()

    @property
    def _used(self) -> int:
        samples: int = self._facts["samples"]
        own = min(self._batches * (self._loader.batch_size or 1), self._sampler.num_samples)
        return min(self._first + own * self._sampler.num_replicas, samples)

    def note_batch(self) -> None:
        if self._sampler.processed_num != self._used:
            raise UsageError(
                "RunState counts the samples of its ElasticSampler: call neither record_batch() nor set_epoch() while "
                "an epoch goes on"
            )
        super().note_batch()
        self._sampler.processed_num = self._used

    def state(self, is_begun: bool) -> dict[str, Any]:
        used = {"first": self._first, "used": self._used} if is_begun else {"first": 0, "used": 0}
        return {**super().state(is_begun), **used}

    def go_back(self, state: dict[str, Any], epoch: int, is_same_size: bool) -> Iterator[Any] | None:
        if not state["used"]:
            return super().go_back(state, epoch, True)
        first = state["first"] if is_same_size else state["used"]
        if is_same_size:
            self._check_facts(state["facts"], state["batches"])
        self._set_generators(state["generators"])
        self._sampler.load_state_dict({"epoch": epoch, "processed_num": first})
        rest = self._divided()
        if is_same_size:
            self._skip(rest, state["batches"])
            self._sampler.processed_num = self._used
        return rest


def random_states() -> dict[str, Any]:
    """All of them as they are now. CUDA's only if this process uses CUDA.

    >>> before = random_states()
    >>> drawn = random.random(), torch.rand(1), np.random.rand()
    >>> set_random_states(before)
    >>> drawn == (random.random(), torch.rand(1), np.random.rand())
    True
    """
    numpy_state = np.random.get_state(legacy=False)
    assigned = dict(numpy_state)
    if assigned["bit_generator"] == "MT19937":  # numpy's own choice, unless somebody has set another one
        key = assigned["state"]["key"]
        assigned["state"] = {**assigned["state"], "key": torch.from_numpy(key.astype(np.int64))}
    found = {"python": random.getstate(), "numpy": assigned, "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def set_random_states(states: dict[str, Any]) -> None:
    """Go back to these. Warns if there are states of CUDA devices that this process does not have."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    numpy_state = dict(states["numpy"])
    if isinstance(key := numpy_state["state"].get("key"), torch.Tensor):
        numpy_state["state"] = {**numpy_state["state"], "key": key.numpy().astype(np.uint32)}
    np.random.set_state(numpy_state)
    torch.set_rng_state(states["torch"])
    of_devices = states.get("cuda", [])
    devices = torch.cuda.device_count() if of_devices and torch.cuda.is_available() else 0
    if devices != len(of_devices):
        logger.warning(
            "random states of %d CUDA devices are to be put back, and this process has %d: later random numbers of the "
            "others differ from those of the run before", len(of_devices), devices,
        )  # fmt: skip
    for device, state in zip(range(devices), of_devices, strict=False):
        torch.cuda.set_rng_state(state, device)

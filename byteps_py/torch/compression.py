"""Compression: the form in which a tensor travels. Any thread.

``fp16`` and ``bf16``: a dtype that ranks round it to. The rounding is part of the copy that hands a tensor over, so it
takes no extra pass over memory. ``int8``, ``topk`` and others: a codec, which the services of machines use between
them; ranks hand over and get the tensor as it is.
"""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from byteps_py.config.settings import Settings
from byteps_py.errors import UsageError
from byteps_py.tensor_codec import MAX_SEED, TOPK_BLOCK, Codec, CodecKind


@dataclass(frozen=True, slots=True)
class LowRank:
    """How matrices travel as factors: see Compression.powersgd. Pure."""

    rank: int
    min_compression_rate: float
    error_feedback: bool
    seed: int

    def __str__(self) -> str:
        plain = "" if self.error_feedback else " without error feedback"
        return f"powersgd of rank {self.rank}{plain}"

    @staticmethod
    def shape_of(parameter: torch.Tensor) -> tuple[int, int]:
        """The matrix that a parameter is: rows of its first dimension."""
        return parameter.shape[0], parameter.numel() // max(1, parameter.shape[0])

    def rank_of(self, shape: tuple[int, int]) -> int:
        """The rank of the factors of a matrix."""
        return min(self.rank, *shape)

    def compresses(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is a matrix, and large enough."""
        if parameter.dim() < 2 or not parameter.numel() or not parameter.is_floating_point():
            return False
        rows, columns = self.shape_of(parameter)
        factors = (rows + columns) * self.rank_of((rows, columns))
        return factors * self.min_compression_rate < rows * columns

    def most_elements(self, parameter: torch.Tensor) -> int:
        """Of the larger factor."""
        shape = self.shape_of(parameter)
        return max(shape) * self.rank_of(shape)


class Compressor:
    """Sends tensors without a conversion. Base class of the other compressors. ``codec``: the form between machines;
    None for that of the wire dtype. ``elements``: how many of a tensor it sends; 0: the share that the codec says.
    ``low_rank``: how gradients travel as factors; None: they do not."""

    codec: Codec | None = None
    elements: int = 0
    low_rank: LowRank | None = None

    @staticmethod
    def wire_dtype(dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor of ``dtype`` is sent, summed and averaged."""
        return dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """``tensor`` in its wire dtype, and the argument ``ctx`` of ``decompress``."""
        return tensor.to(cls.wire_dtype(tensor.dtype)), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        """``tensor`` in its original dtype."""
        return tensor.to(ctx)

    @classmethod
    def of(cls, name: str, parameter: torch.Tensor) -> type[Compressor]:
        """The compression of a parameter: always this one, see CompressionRules."""
        return cls

    #: See CompressionRules.
    warmup_steps: int = 0


class LowRankCompressor(Compressor):
    """Sends matrices as factors, and other parameters as they are: see Compression.powersgd."""

    @staticmethod
    def wire_dtype(dtype: torch.dtype) -> torch.dtype:
        """Factors of 16-bit matrices are computed and sent as float32."""
        return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Raises UsageError: only optimizers have the factors of earlier steps."""
        raise _for_gradients_only(cls)

    @classmethod
    def of(cls, name: str, parameter: torch.Tensor) -> type[Compressor]:
        """This one for large matrices, else none."""
        return cls if cls.low_rank is not None and cls.low_rank.compresses(parameter) else Compressor


@functools.cache
def _low_rank(low_rank: LowRank) -> type[Compressor]:
    """There is one for each."""
    attributes = {"low_rank": low_rank, "__doc__": f"Sends matrices as {low_rank}."}
    return type(f"<{low_rank}>", (LowRankCompressor,), attributes)


def _for_gradients_only(compression: type[Compressor]) -> UsageError:
    return UsageError(
        f"compression {compression.low_rank} is for the gradients of DistributedOptimizer, DistributedDataParallel and "
        "CrossBarrier, which go on from the factors of the step before: give another one of bps.Compression here"
    )


def _narrowed(dtype: torch.dtype, to: torch.dtype) -> torch.dtype:
    return to if dtype.is_floating_point and dtype.itemsize > to.itemsize else dtype


class FP16Compressor(Compressor):
    """Sends float32 and float64 as float16. Values beyond 65504 become infinite, so scale the loss."""

    @staticmethod
    def wire_dtype(dtype: torch.dtype) -> torch.dtype:
        return _narrowed(dtype, torch.float16)


class BF16Compressor(Compressor):
    """Sends float32 and float64 as bfloat16, which has float32's range and 8 bits of precision."""

    @staticmethod
    def wire_dtype(dtype: torch.dtype) -> torch.dtype:
        return _narrowed(dtype, torch.bfloat16)


def _coded(codec: Codec, elements: int = 0) -> type[Compressor]:
    """The compressor that sends tensors in this form. There is one for each."""
    return _made(codec, elements)


@functools.cache
def _made(codec: Codec, elements: int) -> type[Compressor]:
    what = f"{codec}" if not elements else f"{elements} elements as {codec.kind.name.lower()}"
    attributes = {"codec": codec, "elements": elements, "__doc__": f"Sends tensors between machines as {what}."}
    return type(f"<{what}>", (Compressor,), attributes)


@dataclass(frozen=True, slots=True)
class CompressionRules:
    """Which compression each parameter's gradient gets. See Compression.rules.

    choose: of a parameter and its name, what ``compression`` arguments mean. It must choose alike on all ranks.
    warmup_steps: codecs are used from the step after so many on. Steps are those of the ranks' present group: of an
    elastic job, since ranks have formed it; of all jobs, since they began.
    """

    choose: Callable[[str, torch.Tensor], Any]
    warmup_steps: int = 0

    __name__ = "rules"

    def of(self, name: str, parameter: torch.Tensor) -> type[Compressor]:
        """The compression of a parameter. Raises UsageError if that is no compression."""
        try:
            return _any_compression_of(self.choose(name, parameter)).of(name, parameter)
        except UsageError as error:
            raise UsageError(f"parameter {name!r}: {error}") from None


#: The values of a ``compression`` argument that is for many parameters.
CompressionChoice = type[Compressor] | CompressionRules
CompressionArgument = CompressionChoice | Mapping[str, Any] | Callable[[str, torch.Tensor], Any]

#: (where, compression) or (where, compression, the least bytes of a parameter).
Rule = (
    tuple[str | Callable[[str, torch.Tensor], bool], Any] | tuple[str | Callable[[str, torch.Tensor], bool], Any, int]
)


_MAX_RANK = 1024

#: Kinds of dithering, by partition and by what magnitudes are compared with.
_DITHERING = {
    ("linear", "max"): CodecKind.DITHERING_LINEAR,
    ("linear", "l2"): CodecKind.DITHERING_LINEAR_L2,
    ("natural", "max"): CodecKind.DITHERING_NATURAL,
    ("natural", "l2"): CodecKind.DITHERING_NATURAL_L2,
}


class Compression:
    """The values of ``compression`` arguments. See docs/explanation/compression.md.

    none: as they are. fp16, bf16: rounded to that dtype by each rank. The others compress between machines only, and
    only tensors of BYTEPS_MIN_COMPRESS_BYTES or more. int8: 8-bit integers, with a scale for each 256 elements: 3.9
    times fewer bytes than float32. float8 (float8_e4m3), float8_e5m2: 8-bit floats, likewise. ``topk``, ``randomk``: a
    share of the elements. ``onebit``: signs. ``dithering``: rounded by chance, right on average.
    ``thc``: integers that servers add. ``powersgd``: matrices as the product of two thin ones.

    >>> import torch
    >>> Compression.fp16.wire_dtype(torch.float32)
    torch.float16
    >>> Compression.topk(ratio=0.01, error_feedback=True).__name__
    '<topk of 41 in 4096 with error feedback>'
    """

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = _coded(Codec(CodecKind.INT8))
    float8_e4m3 = float8 = _coded(Codec(CodecKind.FLOAT8_E4M3))
    float8_e5m2 = _coded(Codec(CodecKind.FLOAT8_E5M2))

    @staticmethod
    def topk(ratio: float, error_feedback: bool = False, bits: int = 32) -> type[Compressor]:
        """Send the share ``ratio`` of the elements, those of the largest magnitude in each 4,096; others count as 0.
        error_feedback: what was not sent is added to the next round's tensor. bits: of each value. With 2, a value is
        sent as its sign and one of two magnitudes, and takes 14 bits with its position, instead of 48. Raises
        UsageError unless 0 < ratio <= 1, and for other bits.
        """
        return _coded(Codec.topk(ratio, error_feedback, bits))

    @staticmethod
    def randomk(ratio: float, seed: int = 0, error_feedback: bool = False) -> type[Compressor]:
        """Send the share ``ratio`` of the elements, at places that all machines draw alike from ``seed``, the tensor's
        name and the round; others count as 0. Raises UsageError unless 0 < ratio <= 1 and 0 <= seed < 2**32."""
        return _coded(Codec.randomk(ratio, _seed(seed), error_feedback))

    @staticmethod
    def onebit(scaling: bool = True, error_feedback: bool = False) -> type[Compressor]:
        """Send signs. scaling: times the mean magnitude of each 2,048 elements, else times 1."""
        return _coded(Codec(CodecKind.ONEBIT_SCALED if scaling else CodecKind.ONEBIT, error_feedback=error_feedback))

    @staticmethod
    def dithering(
        k: int, partition: str = "linear", normalize: str = "max", seed: int = 0, error_feedback: bool = False
    ) -> type[Compressor]:
        """Round magnitudes up or down by chance to one of ``k`` levels or 0, so that on average nothing is lost. With
        k = 1 an element takes 2 bits, up to 7 it takes 4, up to 127 it takes 8.

        partition: "linear", levels at equal distances; "natural", each half of the next. normalize: the highest level
        is the largest magnitude ("max") or the Euclidean norm ("l2") of each 256 elements. Raises UsageError for other
        values, and unless 0 <= seed < 2**32.
        """
        kind = _DITHERING.get((partition, normalize))
        if kind is None:
            raise UsageError(
                f"dithering has partition='linear' or 'natural' and normalize='max' or 'l2', not {partition!r} and "
                f"{normalize!r}"
            )
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= 127:
            raise UsageError(f"dithering has k = 1 to 127 levels, not k={k!r}")
        return _coded(Codec(kind, k, error_feedback, _seed(seed)))

    @staticmethod
    def thc(lanes: int = 8) -> type[Compressor]:
        """Send integers that servers add without decoding them, as multiples of a step that machines take from the
        round before; with error feedback. lanes: 8 or 16 bits hold the sum of all machines' integers, so with 8 bits
        2 machines have integers of 7 bits, 4 have 6, 8 have 5, 16 have 4; with 16 bits up to 258 have 8. Raises
        UsageError for other lanes."""
        if lanes not in (8, 16):
            raise UsageError(f"thc has lanes of 8 or 16 bits, not lanes={lanes!r}")
        return _coded(Codec(CodecKind.THC if lanes == 8 else CodecKind.THC_WIDE, error_feedback=True))

    @staticmethod
    def powersgd(
        rank: int = 4, min_compression_rate: float = 2.0, error_feedback: bool = True, seed: int = 0
    ) -> type[Compressor]:
        """Send gradients of matrices, n × m, as products of factors n × ``rank`` and m × ``rank``. Ranks sum one of the
        two in each step, in turns. For DistributedOptimizer, DistributedDataParallel and CrossBarrier; each rank makes
        its factors before anything else. Vectors travel as they are, and so do matrices with
        (n + m)·rank·min_compression_rate >= n·m.

        error_feedback: each rank adds what its own product lacked to its next gradient. seed: of the first factors.
        torch's ``start_powerSGD_iter`` is ``Compression.with_warmup(…, steps)``. Raises UsageError for values that make
        no sense.

        >>> Compression.powersgd(rank=2).of("w", torch.ones(100, 50)).__name__
        '<powersgd of rank 2>'
        >>> Compression.powersgd(rank=2).of("bias", torch.ones(100)) is Compression.none
        True
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= _MAX_RANK:
            raise UsageError(f"powersgd has factors of rank 1 to {_MAX_RANK}, not rank={rank!r}")
        if isinstance(min_compression_rate, bool) or not min_compression_rate > 0:
            raise UsageError(f"powersgd has a min_compression_rate above 0, not {min_compression_rate!r}")
        return _low_rank(LowRank(rank, float(min_compression_rate), bool(error_feedback), _seed(seed)))

    @staticmethod
    def with_error_feedback(compression: type[Compressor]) -> type[Compressor]:
        """``compression`` with error feedback: each machine adds what its codes lack to the next round's tensor. Raises
        UsageError for one without a codec.

        >>> Compression.with_error_feedback(Compression.int8).__name__
        '<int8 with error feedback>'
        """
        if compression.codec is None:
            raise UsageError(
                f"error feedback is for compression with a codec, such as int8, not {compression.__name__}"
            )
        return _coded(replace(compression.codec, error_feedback=True), compression.elements)

    @staticmethod
    def with_momentum(compression: type[Compressor], mu: float = 0.9) -> type[Compressor]:
        """``compression`` with Nesterov momentum, which each machine applies before error feedback and codec: of its
        ranks' sum g and the momentum m, m becomes mu·m + g, and g + mu·m is sent. The optimizer then needs none. Raises
        UsageError for one without a codec, and unless 0 < mu < 1.

        >>> Compression.with_momentum(Compression.int8).__name__
        '<int8 with momentum 0.9>'
        """
        if compression.codec is None:
            raise UsageError(f"momentum is for compression with a codec, such as int8, not {compression.__name__}")
        if not 0 < mu < 1:
            raise UsageError(f"momentum has a factor mu above 0 and below 1, not mu={mu!r}")
        return _coded(replace(compression.codec, momentum=float(mu)), compression.elements)

    @staticmethod
    def rules(rules: Sequence[Rule], default: Any = Compressor, warmup_steps: int = 0) -> CompressionRules:
        """Compression by parameter, for DistributedOptimizer, DistributedDataParallel and CrossBarrier. A parameter
        gets that of the first rule that fits, else ``default``.

        A rule is (where, compression) or (where, compression, bytes). where: a pattern of names, with * and ? as in
        file names, or a function of a name and a parameter. bytes: smaller parameters do not fit.
        warmup_steps: see ``with_warmup``. Instead of rules, the argument ``compression`` may also be a function of a
        name and a parameter. Gradients with different compression travel apart. Raises UsageError for other values.

        >>> chosen = Compression.rules([("*embed*", Compression.none)], default=Compression.int8)
        >>> chosen.of("layers.0.weight", torch.ones(3)).__name__
        '<int8>'
        """
        checked = [_checked_rule(rule) for rule in rules]
        otherwise = _any_compression_of(default)

        def choose(name: str, parameter: torch.Tensor) -> type[Compressor]:
            nbytes = parameter.numel() * parameter.element_size()
            found = (each for fits, each, least in checked if nbytes >= least and fits(name, parameter))
            return next(found, otherwise)

        return CompressionRules(choose, _warmup(warmup_steps))

    @staticmethod
    def with_warmup(compression: CompressionArgument, warmup_steps: int) -> CompressionRules:
        """``compression`` from the step after ``warmup_steps`` on: until then tensors with a codec travel without, on
        all ranks alike. A job that goes on from a checkpoint gives what is left of the steps. Raises UsageError."""
        return replace(_as_rules(choice_of(compression)), warmup_steps=_warmup(warmup_steps))


def _as_rules(choice: CompressionChoice) -> CompressionRules:
    return choice if isinstance(choice, CompressionRules) else CompressionRules(choice.of)


def _warmup(steps: int) -> int:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise UsageError(f"warmup_steps is a number of steps, 0 or more, not {steps!r}")
    return steps


def _checked_rule(rule: Any) -> tuple[Callable[[str, torch.Tensor], bool], type[Compressor], int]:
    """(whether it fits, compression, the least bytes)."""
    if not isinstance(rule, tuple) or len(rule) not in (2, 3):
        raise UsageError(f"a rule is (where, compression) or (where, compression, bytes), not {rule!r:.200}")
    where, choice, *least = rule
    if least and (isinstance(least[0], bool) or not isinstance(least[0], int) or least[0] < 0):
        raise UsageError(f"rule {where!r}: bytes are a whole number of 0 or more, not {least[0]!r}")
    if isinstance(where, str):

        def fits(name: str, parameter: torch.Tensor) -> bool:
            return fnmatch.fnmatchcase(name, where)
    elif callable(where):
        fits = where
    else:
        raise UsageError(
            f"a rule begins with a pattern of names or a function of a name and a parameter, not {where!r}"
        )
    return fits, _any_compression_of(choice), least[0] if least else 0


def choice_of(choice: Any) -> CompressionChoice:
    """The meaning of a ``compression`` argument for many parameters. Raises UsageError."""
    if isinstance(choice, CompressionRules):
        return choice
    if callable(choice) and not isinstance(choice, type) and _maker_name(choice) is None:
        return CompressionRules(choice)
    return _any_compression_of(choice)


def _maker_name(choice: object) -> str | None:
    """The name of the function of Compression that ``choice`` is; None if it is none: somebody forgot to call it."""
    names = (name for name in vars(Compression) if isinstance(vars(Compression)[name], staticmethod))
    return next((name for name in names if getattr(Compression, name) is choice), None)


def _seed(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise UsageError(f"a seed is a whole number from 0 to 2**32 - 1, not {seed!r}")
    return seed


class _Settings:
    """The contents of a dictionary of BytePS. Its examples have strings in the place of numbers. ``take`` removes a
    value."""

    def __init__(self, choice: Mapping[str, Any]) -> None:
        self._choice = dict(choice)
        self._rest = dict(choice)

    def take(self, name: str, default: object = None) -> Any:
        return self._rest.pop(name, default)

    def number(self, name: str, kind: type[int] | type[float], default: float | None = None) -> Any:
        value = self.take(name, default)
        try:
            return kind(value)
        except (TypeError, ValueError):
            what = "no whole number" if kind is int else "no number"
            raise self.error(f"{name}={value!r} of {self._choice!r} is {what}") from None

    def one_of(self, name: str, values: tuple[object, ...], default: object) -> Any:
        value = self.take(name, default)
        if value not in values:
            known = " or ".join(repr(each) for each in values if each is not None)
            raise self.error(f"{name}={value!r} of {self._choice!r} is not here; {known} is")
        return value

    def check_empty(self) -> None:
        if self._rest:
            names = ", ".join(map(repr, self._rest))
            raise self.error(
                f"{names} of {self._choice!r} is not known: there are compressor, ef, momentum and mu, k of "
                "topk, scaling of onebit, k and seed of randomk, k, partition, normalize and seed of "
                "dithering"
            )

    @staticmethod
    def error(text: str) -> UsageError:
        return UsageError(f"compression: {text}")


def compression_of(choice: Any) -> type[Compressor]:
    """The compressor that a ``compression`` argument for one tensor means: one of Compression, or a dictionary of
    BytePS. Raises UsageError, which names what is not supported.

    >>> compression_of({"compressor": "topk", "k": 0.01, "ef": "vanilla"}).__name__
    '<topk of 41 in 4096 with error feedback>'
    """
    found = _any_compression_of(choice)
    if found.low_rank is not None:
        raise _for_gradients_only(found)
    return found


def without_feedback(compression: type[Compressor]) -> type[Compressor]:
    """The same, without error feedback: for a caller who sends later what was left out."""
    if compression.codec is None:
        return compression
    return _coded(replace(compression.codec, error_feedback=False), compression.elements)


def _any_compression_of(choice: Any) -> type[Compressor]:
    if isinstance(choice, type) and issubclass(choice, Compressor):
        return choice
    if isinstance(choice, CompressionRules):
        raise UsageError(
            "compression by rules, or with a warm-up, is for DistributedOptimizer, DistributedDataParallel and "
            "CrossBarrier: give one of bps.Compression"
        )
    if (made := _maker_name(choice)) is not None:
        raise UsageError(f"compression: bps.Compression.{made} is a function: call it, bps.Compression.{made}(…)")
    if not isinstance(choice, Mapping):
        raise UsageError(
            f"compression must be one of bps.Compression, or a dictionary of BytePS, got {choice!r:.100}; say "
            "compression=bps.Compression.int8"
        )
    settings = _Settings(choice)
    found = _compressor(settings, settings.take("compressor"))
    if settings.one_of("ef", (None, "vanilla"), None):
        found = Compression.with_error_feedback(found)
    if settings.one_of("momentum", (None, "nesterov"), None):
        found = Compression.with_momentum(found, settings.number("mu", float))
    settings.check_empty()
    return found


def _compressor(settings: _Settings, name: object) -> type[Compressor]:
    """That of a dictionary of BytePS, without what is added to it."""
    if name in ("topk", "randomk"):
        k = settings.number("k", float)
        seed = _seed(settings.number("seed", int, 0)) if name == "randomk" else 0
        if k < 1:
            return Compression.topk(k) if name == "topk" else Compression.randomk(k, seed)
        if k != int(k):
            raise settings.error(f"k={k} is neither a share below 1 nor a whole number of elements")
        codec = Codec(CodecKind.TOPK if name == "topk" else CodecKind.RANDOMK, 1, seed=seed)
        return _coded(codec, int(k))
    if name == "onebit":
        scaling = settings.one_of("scaling", (True, False, "True", "False", "true", "false", "1", "0"), False)
        return Compression.onebit(scaling in (True, "True", "true", "1"))
    if name == "dithering":
        partition = settings.one_of("partition", ("linear", "natural"), "linear")
        normalize = settings.one_of("normalize", ("max", "l2"), "max")
        k, seed = settings.number("k", int), settings.number("seed", int, 0)
        return Compression.dithering(k, partition, normalize, seed)
    raise settings.error(f"the compressor {name!r} is not here; onebit, topk, randomk and dithering are")


def check_low_rank(compression: type[Compressor], name: str, parameter: torch.Tensor) -> None:
    """Raises UsageError for factors that can't be had here."""
    if compression.low_rank is None:
        return
    what = f"{name!r}: compression {compression.low_rank}"
    if parameter.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        kind = str(parameter.dtype).removeprefix("torch.")
        raise UsageError(f"{what} is for float16, bfloat16, float32 and float64, not for {kind}: give it none")


def codec_for(
    compression: type[Compressor], dtype: torch.dtype, nbytes: int, name: str | None, settings: Settings
) -> Codec | None:
    """The codec of a tensor of ``dtype`` and ``nbytes``; None if it has none, or is too small. Raises UsageError if it
    can't have it."""
    codec = compression.codec
    if codec is None:
        return None
    what = f"tensor {name!r}: compression {codec}" if name else f"compression {codec}"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        raise UsageError(f"{what} is for float32, float16 and bfloat16, not for {kind}: give it none")
    if nbytes < settings.min_compress_bytes:
        return None
    return _with_share(codec, compression.elements, nbytes // dtype.itemsize, name) if compression.elements else codec


def _with_share(codec: Codec, elements: int, count: int, name: str | None) -> Codec | None:
    """``codec``, so that it sends at least so many elements of ``count``."""
    if not count:
        return None
    if elements > count:
        raise UsageError(
            f"tensor {name!r}: compression is to send k={elements} of its elements, but it has {count}: give a smaller "
            "k, or the share that is to be sent, 0 < k < 1"
        )
    return replace(codec, entries=math.ceil(elements / count * TOPK_BLOCK))

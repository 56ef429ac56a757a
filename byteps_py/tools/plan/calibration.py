"""A model of step times that fits a table of measured steps, and the file that keeps it.

Jobs on one machine and jobs on several are fitted apart, since other links and other software carry them. Each fit has
two layers. The constants of step_time.py are fitted by Gauss-Newton steps to the logarithms of the times, against what
data sheets let expect, so that few rows move them only as far as they say; a row far off counts with its distance, not
with its square. The residual is smooth in the shapes: a Gaussian process over their logarithms (Rasmussen and Williams,
2006, chapters 2 and 5) adds it near measured rows, and nothing far from all of them.

Uses numpy alone. Pure, apart from write_model and read_model; any thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from byteps_py.errors import UsageError
from byteps_py.tools.plan.step_table import Column, StepLayout, StepLayouts, StepRow
from byteps_py.tools.plan.step_time import Hardware, Parts, constants, step_ms, step_parts
from byteps_py.wording import shown

ONE_MACHINE, SEVERAL_MACHINES = "one machine", "several machines"
_FORMAT = "byteps_py step times 1"
#: Relative errors of a formula with the right constants.
_FORMULA_ERROR = 0.04
#: Beyond so many of these, an error counts with its distance (Huber).
_HUBER = 1.5


@dataclass(frozen=True, slots=True)
class Feature:
    """A property of a layout, as a power of two, and how many doublings apart two rows still resemble each other."""

    name: str
    reach: float


#: Tokens of a micro-batch and the width of a rank decide which kernels and which algorithms of all-reduces run: these
#: errors change quickly. Those of counts (layers, micro-batches) change slowly.
FEATURES = (
    Feature("hidden", 1.5),
    Feature("micro-batch tokens", 1.5),
    Feature("tp", 1.0),
    Feature("pp", 1.5),
    Feature("layers", 3.0),
    Feature("micro-batches", 4.0),
    Feature("dp", 2.0),
    Feature("gpus", 6.0),
    Feature("chunks", 1.5),
    Feature("recomputation", 1.5),
    Feature("sequence parallelism", 1.5),
)


@dataclass(frozen=True, slots=True)
class Residual:
    """The mean of a Gaussian process: weights of measured rows, by their likeness."""

    #: A row for each measured row, a column for each of FEATURES.
    points: Column
    weights: Column
    reaches: Column
    #: The standard deviation of the logarithm.
    spread: float

    def at(self, points: Column) -> Column:
        """The logarithm of measured over computed time to expect at ``points``."""
        return np.asarray(self.spread**2 * likeness(points, self.points, self.reaches) @ self.weights)


@dataclass(frozen=True, slots=True)
class Fit:
    """The fit to the rows of one kind of job, on one machine or on several."""

    #: Logarithms of the constants of step_time.
    logarithms: Column
    residual: Residual
    #: The lines of the table that it has seen.
    lines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Predicts the time of a step."""

    hardware: Hardware
    #: By ONE_MACHINE and SEVERAL_MACHINES. Without any, times are those to expect of the hardware.
    fits: dict[str, Fit]

    def predict(self, layouts: Sequence[StepLayout]) -> list[float]:
        """Milliseconds of a step of each layout.

        A kind of job of which no row was seen is computed with the constants of the other kind, or those to expect of
        the hardware, and with what the data sheet lets expect of links: ``covers`` says so.
        """
        if not layouts:
            return []
        return np.sum(list(self.parts(layouts).values()), axis=0).tolist()  # type: ignore[no-any-return]

    def parts(self, layouts: Sequence[StepLayout]) -> Parts:
        """The parts of each layout's step, in milliseconds; what remains beside the constants is in each part."""
        found: Parts = {}
        for kind in (ONE_MACHINE, SEVERAL_MACHINES):
            places = [place for place, layout in enumerate(layouts) if self.kind_of(layout) == kind]
            if not places:
                continue
            jobs = StepLayouts.of([layouts[place] for place in places])
            fit = self.fits.get(kind)
            factor = 1.0 if fit is None else np.exp(fit.residual.at(features_of(jobs)))
            for name, part in step_parts(self._constants(kind), self.hardware, jobs).items():
                found.setdefault(name, np.zeros(len(layouts)))[places] = part * factor
        return found

    def _constants(self, kind: str) -> Column:
        if fit := self.fits.get(kind) or next(iter(self.fits.values()), None):
            return fit.logarithms
        return np.log([one.expected for one in constants(self.hardware)])

    def kind_of(self, layout: StepLayout) -> str:
        """ONE_MACHINE or SEVERAL_MACHINES."""
        return ONE_MACHINE if layout.gpus <= self.hardware.gpus_per_machine else SEVERAL_MACHINES

    def covers(self, layout: StepLayout) -> bool:
        """Whether it has seen jobs of this kind."""
        return self.kind_of(layout) in self.fits


def features_of(jobs: StepLayouts) -> Column:
    """A row for each job, a column for each of FEATURES."""
    return np.stack(
        [
            np.log2(jobs.hidden),
            np.log2(jobs.micro_batch * jobs.sequence),
            np.log2(jobs.tp),
            np.log2(jobs.pp),
            np.log2(jobs.layers),
            np.log2(jobs.micro_batches),
            np.log2(jobs.dp),
            np.log2(jobs.gpus),
            np.log2(jobs.chunks),
            jobs.repeats_scores + jobs.repeats_rest,
            jobs.sequence_parallel,
        ],
        axis=1,
    )


def likeness(some: Column, others: Column, reaches: Column) -> Column:
    """Between 0 and 1: the Matérn kernel of smoothness 3/2, multiplied over features."""
    distance = math.sqrt(3) * np.abs(some[:, None, :] - others[None, :, :]) / reaches
    return np.asarray(np.prod(1 + distance, axis=-1) * np.exp(-distance.sum(axis=-1)))


# ---- which rows ----------------------------------------------------------------------------------------------------


def choose_rows(layouts: Sequence[StepLayout], count: int) -> list[int]:
    """The places of ``count`` layouts to measure, or all of them: those from which the others can be told best.

    Each one is the layout that the chosen ones leave most uncertain, under a Gaussian process with the reaches of
    FEATURES and a linear trend (greedy D-optimal design). Of equals, the first. It does not look at times; the same
    layouts give the same choice. Raises UsageError if ``count`` is below 1.
    """
    if count < 1:
        raise UsageError(f"{count} rows: a model is fitted to at least one")
    points = features_of(StepLayouts.of(layouts))
    varying = points - points.mean(axis=0)
    deviation = varying.std(axis=0)
    trend = 0.5 * varying / np.maximum(deviation, 1e-9) / math.sqrt(max(1, int(np.count_nonzero(deviation))))
    reaches = np.array([feature.reach for feature in FEATURES])
    uncertainty = 1 + (trend**2).sum(axis=1)
    known = np.zeros((len(layouts), 0))
    chosen: list[int] = []
    for _ in range(min(count, len(layouts))):
        left = np.round(uncertainty, 9)
        left[chosen] = -1
        best = int(np.argmax(left))
        shared = likeness(points, points[best : best + 1], reaches)[:, 0] + trend @ trend[best]
        shared = (shared - known @ known[best]) / math.sqrt(max(uncertainty[best], 0) + _FORMULA_ERROR**2)
        known = np.concatenate([known, shared[:, None]], axis=1)
        uncertainty = uncertainty - shared**2
        chosen.append(best)
    return chosen


# ---- fitting -------------------------------------------------------------------------------------------------------


def calibrate(rows: Sequence[StepRow], count: int, hardware: Hardware) -> StepTimeModel:
    """The model that ``count`` of the ``rows`` give, chosen by ``choose_rows`` among those without a problem that
    have a measured time. Raises UsageError if there is none, or if ``count`` is below 1."""
    good = [row for row in rows if not row.problem]
    usable = [(row.line, row.layout, row.measured_ms) for row in good if row.layout and row.measured_ms is not None]
    if not usable:
        first = next((row.problem for row in rows if row.problem), "no row has a measured time")
        raise UsageError(f"no row of the table can be used: {first}")
    chosen = sorted(choose_rows([layout for _, layout, _ in usable], count))
    kinds: dict[str, list[tuple[int, StepLayout, float]]] = {}
    for place in chosen:
        line, layout, measured = usable[place]
        kind = ONE_MACHINE if layout.gpus <= hardware.gpus_per_machine else SEVERAL_MACHINES
        kinds.setdefault(kind, []).append((line, layout, measured))
    return StepTimeModel(hardware, {kind: _fit(seen, hardware) for kind, seen in kinds.items()})


def _fit(seen: list[tuple[int, StepLayout, float]], hardware: Hardware) -> Fit:
    jobs = StepLayouts.of([layout for _, layout, _ in seen])
    measured = np.log([time for _, _, time in seen])
    logarithms = fit_constants(jobs, measured, hardware)
    left = measured - np.log(step_ms(logarithms, hardware, jobs))
    return Fit(logarithms, _fit_residual(features_of(jobs), left), tuple(line for line, _, _ in seen))


def fit_constants(jobs: StepLayouts, measured: Column, hardware: Hardware) -> Column:
    """Logarithms of the constants of step_time that suit ``jobs`` with these logarithms of ``measured`` milliseconds:
    Levenberg-Marquardt with a Gaussian prior, and Huber's loss by weights."""
    expected = np.log([one.expected for one in constants(hardware)])
    spread = np.array([one.spread for one in constants(hardware)])

    def errors(at: Column) -> Column:
        return np.asarray((np.log(step_ms(at, hardware, jobs)) - measured) / _FORMULA_ERROR)

    def cost(at: Column) -> float:
        far = np.abs(errors(at))
        robust = np.where(far < _HUBER, far**2, 2 * _HUBER * far - _HUBER**2)
        return float(robust.sum() + (((at - expected) / spread) ** 2).sum())

    at, lowest, damping = expected, cost(expected), 1e-2
    for _ in range(100):
        now = errors(at)
        weights = np.minimum(1, _HUBER / np.maximum(np.abs(now), 1e-12))
        slopes = np.stack([(errors(at + step) - now) / 1e-5 for step in 1e-5 * np.eye(len(at))], axis=1)
        curvature = slopes.T @ (weights[:, None] * slopes) + np.diag(1 / spread**2)
        downhill = slopes.T @ (weights * now) + (at - expected) / spread**2
        for _ in range(12):
            to = at - np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), downhill)
            reached = cost(to)
            if reached < lowest:
                break
            damping *= 4
        else:
            break
        gained, at, lowest, damping = lowest - reached, to, reached, max(damping / 8, 1e-6)
        if gained < 1e-6 * lowest:
            break
    return at


def _fit_residual(points: Column, left: Column) -> Residual:
    """The likeliest reaches, spread and noise, by a search along each in turn: a handful of values, each with a prior,
    need no gradient."""
    usual = np.log([0.08, 0.01, *(feature.reach for feature in FEATURES)])
    width = np.array([1.0, 1.0] + [0.5] * len(FEATURES))
    varies = np.concatenate([[True, True], np.ptp(points, axis=0) > 0])

    def covariance(at: Column) -> Column:
        spread, noise, reaches = math.exp(at[0]), math.exp(at[1]), np.exp(at[2:])
        return np.asarray(spread**2 * likeness(points, points, reaches) + noise**2 * np.eye(len(points)))

    def cost(at: Column) -> float:
        try:
            root = np.linalg.cholesky(covariance(at))
        except np.linalg.LinAlgError:
            return math.inf
        solved = np.linalg.solve(root, left)
        prior = (((at - usual) / width) ** 2).sum()
        return float(0.5 * solved @ solved + np.log(np.diag(root)).sum() + 0.5 * prior)

    at, lowest = usual, cost(usual)
    steps = np.full(len(at), 0.4)
    for _ in range(12):
        moved = False
        for number in np.flatnonzero(varies):
            for sign in (1, -1):
                to = at.copy()
                to[number] += sign * steps[number]
                reached = cost(to)
                if reached < lowest - 1e-4:
                    at, lowest, moved = to, reached, True
                    steps[number] *= 1.3
                    break
            else:
                steps[number] /= 2
        if not moved and steps[varies].max() < 0.08:
            break
    weights: Column = np.asarray(np.linalg.solve(covariance(at), left), np.float64)
    return Residual(points, weights, np.asarray(np.exp(at[2:])), math.exp(at[0]))


# ---- the file ------------------------------------------------------------------------------------------------------


def write_model(path: str, model: StepTimeModel) -> None:
    """As JSON. Raises UsageError if the file can't be written."""
    names = [one.name for one in constants(model.hardware)]
    fits = {
        kind: {
            "lines": list(fit.lines),
            "constants": dict(zip(names, np.exp(fit.logarithms).tolist(), strict=True)),
            "residual": {
                "features": [feature.name for feature in FEATURES],
                "points": fit.residual.points.tolist(),
                "weights": fit.residual.weights.tolist(),
                "reaches": fit.residual.reaches.tolist(),
                "spread": fit.residual.spread,
            },
        }
        for kind, fit in model.fits.items()
    }
    text = json.dumps({"format": _FORMAT, "hardware": asdict(model.hardware), "fits": fits}, indent=1)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{shown(path)} can't be written: {error.strerror}") from error


def read_model(path: str) -> StepTimeModel:
    """Read a file of write_model. Raises UsageError if the file can't be read, or is another one."""
    remedy = "write it with: bps plan calibrate STEPS.csv --out MODEL.json"
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{shown(path)} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{shown(path)} is not JSON ({error}): {remedy}") from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise UsageError(f"{shown(path)} is no model of step times: {remedy}")
    try:
        hardware = Hardware(**found["hardware"])
        fits = {kind: _read_fit(found["fits"][kind], hardware) for kind in found["fits"]}
        if not fits or not set(fits) <= {ONE_MACHINE, SEVERAL_MACHINES}:
            raise ValueError("no fit")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{shown(path)} is a damaged model of step times ({error}): {remedy}") from error
    return StepTimeModel(hardware, fits)


def _read_fit(found: Any, hardware: Hardware) -> Fit:
    values = np.array([found["constants"][one.name] for one in constants(hardware)], np.float64)
    kept = found["residual"]
    points, weights, reaches = (np.array(kept[name], np.float64) for name in ("points", "weights", "reaches"))
    whole = (len(weights), len(FEATURES))
    if points.shape != whole or reaches.shape != whole[1:] or weights.ndim != 1:
        raise ValueError("the residual's sizes do not go together")
    numbers = (values, points, weights, reaches, np.array([kept["spread"]], np.float64))
    if not all(np.isfinite(some).all() for some in numbers) or (values <= 0).any() or (reaches <= 0).any():
        raise ValueError("a number is not finite, or not above 0")
    residual = Residual(points, weights, reaches, float(kept["spread"]))
    return Fit(np.log(values), residual, tuple(int(line) for line in found["lines"]))


@dataclass(frozen=True, slots=True)
class PredictionError:
    """How far predictions are from measured times."""

    rows: int
    #: Of |predicted / measured - 1|.
    mean: float
    worst: float


def prediction_error(predicted: Sequence[float], measured: Sequence[float]) -> PredictionError:
    """Raises UsageError if there are no rows.

    >>> prediction_error([90.0, 110.0], [100.0, 100.0]).rows
    2
    """
    if not predicted:
        raise UsageError("no row has both a predicted and a measured time")
    errors = np.abs(np.array(predicted) / np.array(measured) - 1)
    return PredictionError(len(errors), float(errors.mean()), float(errors.max()))

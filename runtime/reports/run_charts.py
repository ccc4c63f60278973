"""Computes the curves of a recorded run: values over steps, at most a few hundred points each.

Steps are divided into bins, so that a chart of 100,000 steps is as small as one of 500.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...metrics.catalog import communication, training
from ...metrics.catalog.labels import CAUSE, NON_TRAINING_PHASES, PHASES
from .metrics_reader import RankMetrics, RecordedMetrics
from .run_reader import Column, RankSteps, RecordedRun
from .run_summary import SUMMARY_SERIES, exposed_seconds, shared_work, training_seconds

MAX_POINTS = 500
# The metrics that the charts read over time.
CHART_SERIES = SUMMARY_SERIES | {
    communication.COMM_CAUSE_SECONDS.name,
    training.PHASE_SECONDS.name,
    training.MFU.name,
}
NUM_COLORS = 8
# Phases and causes have the same color in all charts and bars.
COLORS: Mapping[str, int] = {
    **{phase: 1 + place % NUM_COLORS for place, phase in enumerate(PHASES)},
    **{cause: 1 + place for place, cause in enumerate((*CAUSE.values, "unknown"))},
}
# An interval between two snapshots shorter than this part of the usual one, such as that before the
# end, is joined with the one before it: some counters are updated seconds late.
_SHORT_INTERVAL = 0.5
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The values of a series; None where nothing is known.

    Attributes:
        color: Number of a color of the page, from 1 to NUM_COLORS.
    """

    name: str
    color: int
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart over steps.

    Attributes:
        name: Short name, such as "phases".
        title: What it shows.
        unit: "seconds", "ratio", "per_second", "celsius" or "" for a plain number.
        note: How the values were computed, one sentence.
        steps: The last step of each point, ascending.
        curves: The series. Those of a stacked chart are drawn on top of each other.
        is_stacked: Whether the curves are parts of a whole.
        is_log: Whether the scale is logarithmic.
    """

    name: str
    title: str
    unit: str
    note: str
    steps: Sequence[float]
    curves: tuple[Curve, ...]
    is_stacked: bool = False
    is_log: bool = False


def charts_of(run: RecordedRun, metrics: RecordedMetrics) -> tuple[Chart, ...]:
    """Return the charts of a run; a chart without a known value is left out.

    Args:
        run: The step logs.
        metrics: The metrics logs, with the values of `CHART_SERIES` over time.
    """
    if not run.ranks:
        return ()
    bins = Bins(run.ranks.values())
    charts = (
        _phases(run, bins),
        _exposed(run, bins),
        _causes(run, metrics),
        _throughput(run, bins, shared_work(run, metrics)),
        _loss(run, bins),
        _gradient_norm(run, bins),
        _memory(run, bins),
        _utilization(run, bins),
        _temperature(run, bins),
        _mfu(run, metrics),
    )
    return tuple(chart for chart in charts if chart is not None and chart.curves)


class Bins:
    """Equal ranges of step numbers.

    Args:
        ranks: The ranks whose steps are divided.

    Attributes:
        steps: The last step of each bin.
        num_steps: Steps in a bin; 1 in a short run.
    """

    def __init__(self, ranks: Iterable[RankSteps]) -> None:
        ranks = list(ranks)
        numbers = [steps.column("step") for steps in ranks]
        self._first = min(int(each.min()) for each in numbers)
        last = max(int(each.max()) for each in numbers)
        self.num_steps = max(1, -(-(last - self._first + 1) // MAX_POINTS))
        rows = max(steps.steps_per_row for steps in ranks)
        self.num_steps = max(self.num_steps, rows)
        count = (last - self._first) // self.num_steps + 1
        ends = self._first - 1 + self.num_steps * np.arange(1, count + 1)
        self.steps = np.minimum(ends, last).astype(float)

    def sums(self, steps: RankSteps, values: Column) -> tuple[Floats, Floats]:
        """Return the sum and the number of the known values in each bin."""
        known = ~np.isnan(values)
        places = ((steps.column("step") - self._first) // self.num_steps)[known]
        count = len(self.steps)
        numbers = np.bincount(places, minlength=count)
        return np.bincount(places, values[known], count).astype(float), numbers.astype(float)

    def highest(self, steps: RankSteps, values: Column) -> Floats:
        """Return the highest known value in each bin; NaN without one."""
        known = ~np.isnan(values)
        places = ((steps.column("step") - self._first) // self.num_steps)[known]
        highest = np.full(len(self.steps), -np.inf)
        np.maximum.at(highest, places, values[known])
        return np.where(np.isneginf(highest), np.nan, highest)

    def mean(self, run: RecordedRun, values: Callable[[RankSteps], Column]) -> Floats:
        """Return the mean over the ranks and the steps of each bin.

        In large jobs most ranks record every tenth step, which is more often one with an evaluation
        or a checkpoint than the steps between. So ranks with half as many values as the rank with
        the most, or fewer, are left out of a bin.
        """
        pairs = [self.sums(steps, values(steps)) for steps in run.ranks.values()]
        totals, counts = (np.stack(each) for each in zip(*pairs, strict=True))
        is_used = 2 * counts > counts.max(axis=0)
        return divided((totals * is_used).sum(axis=0), (counts * is_used).sum(axis=0))

    def rate(self, run: RecordedRun, name: str) -> Floats:
        """Return samples or tokens per second of all ranks, in each bin.

        Ranks without a record in a bin, and those without a log, are counted like the others.
        """
        pairs = self.ratios(run, lambda steps: steps.column(name))
        rates = np.stack([divided(part, whole) for part, whole in pairs])
        mean = divided(np.nansum(rates, axis=0), np.isfinite(rates).sum(axis=0).astype(float))
        world_size = self.mean(run, lambda steps: steps.column("world_size"))
        # In a pipeline, only the ranks of some stages have tokens.
        with_work = [rank for rank, steps in run.ranks.items() if steps.total(name) is not None]
        num_with_work, num_logs = (
            np.searchsorted(ranks, world_size).astype(float) for ranks in (with_work, [*run.ranks])
        )
        return mean * world_size * divided(num_with_work, num_logs)

    def ratios(
        self, run: RecordedRun, part: Callable[[RankSteps], Column]
    ) -> list[tuple[Floats, Floats]]:
        """Return for each rank a part of training time and training time, in each bin.

        Steps whose part is unknown are left out of both.
        """
        pairs = []
        for steps in run.ranks.values():
            values = part(steps)
            whole = np.where(np.isnan(values), np.nan, training_seconds(steps))
            pairs.append((self.sums(steps, values)[0], self.sums(steps, whole)[0]))
        return pairs


def divided(part: Floats | int, whole: Floats | int) -> Floats:
    """Return a quotient; NaN where the whole is 0."""
    whole = np.asarray(whole, float)
    ratio: Floats = np.divide(part, whole, out=np.full(whole.shape, np.nan), where=whole > 0)
    return ratio


def _curve(name: str, place: int, values: Floats) -> Curve:
    """Return a curve with six digits, which is more than a screen shows."""
    return Curve(
        name=name,
        color=COLORS.get(name, 1 + place % NUM_COLORS),
        values=[float(f"{value:.6g}") if np.isfinite(value) else None for value in values],
    )


def chart_of(
    name: str,
    title: str,
    unit: str,
    note: str,
    steps: Floats,
    curves: Mapping[str, Floats],
    *,
    is_stacked: bool = False,
    is_log: bool = False,
) -> Chart:
    """Return a chart of the curves that have known values, and are not 0 if it is stacked."""
    known = {
        text: values
        for text, values in curves.items()
        if np.isfinite(values).any() and (np.nansum(values) > 0 or not is_stacked)
    }
    return Chart(
        name=name,
        title=title,
        unit=unit,
        note=note,
        steps=[float(step) for step in steps],
        curves=tuple(
            _curve(text, place, values) for place, (text, values) in enumerate(known.items())
        ),
        is_stacked=is_stacked,
        is_log=is_log,
    )


def per_point(bins: Bins) -> str:
    """Return a sentence about the steps in a point; empty if each has one."""
    return "" if bins.num_steps == 1 else f" Each point has {bins.num_steps} steps."


def _phases(run: RecordedRun, bins: Bins) -> Chart:
    named = {name for steps in run.ranks.values() for name in steps.names("phase")}
    curves = {
        phase: bins.mean(run, lambda steps, phase=phase: _zero_if_absent(steps, f"phase.{phase}"))  # type: ignore[misc]
        for phase in PHASES
        if phase in named
    }
    return chart_of(
        "phases",
        "Time of a step by phase",
        "seconds",
        f"Mean over the ranks.{per_point(bins)}",
        bins.steps,
        curves,
        is_stacked=True,
    )


def _zero_if_absent(steps: RankSteps, name: str) -> Column:
    return steps.columns[name] if name in steps.columns else np.zeros(steps.num_rows, np.float32)


def _exposed(run: RecordedRun, bins: Bins) -> Chart:
    pairs = bins.ratios(run, exposed_seconds)
    curves = {"all ranks": divided(sum(p for p, _ in pairs), sum(w for _, w in pairs))}
    if len(pairs) > 1:
        each = np.stack([divided(part, whole) for part, whole in pairs])
        curves["highest rank"] = _over_ranks(each, np.fmax)
        curves["lowest rank"] = _over_ranks(each, np.fmin)
    return chart_of(
        "exposed",
        "Exposed communication",
        "ratio",
        f"Share of training time in which training could only wait.{per_point(bins)}",
        bins.steps,
        curves,
    )


def _over_ranks(values: Floats, function: np.ufunc) -> Floats:
    result: Floats = function.reduce(values, axis=0)
    return result


def _throughput(run: RecordedRun, bins: Bins, shared: Collection[str]) -> Chart | None:
    for name in ("tokens", "samples"):
        if name in shared:
            continue
        rate = bins.rate(run, name)
        if np.isfinite(rate).any():
            break
    else:
        return None
    return chart_of(
        "throughput",
        f"{name.capitalize()} per second",
        "per_second",
        f"All ranks together.{per_point(bins)}",
        bins.steps,
        {name: rate},
    )


def _loss(run: RecordedRun, bins: Bins) -> Chart:
    first = next(iter(run.ranks.values()))
    total, count = bins.sums(first, first.column("loss"))
    return chart_of(
        "loss",
        "Loss",
        "",
        f"Of rank {first.rank}.{per_point(bins)}",
        bins.steps,
        {"loss": divided(total, count)},
    )


def _gradient_norm(run: RecordedRun, bins: Bins) -> Chart:
    first = next(iter(run.ranks.values()))
    norms = bins.highest(first, first.column("gradient_norm"))
    return chart_of(
        "gradient_norm",
        "Gradient norm",
        "",
        f"Highest of each point.{per_point(bins)}",
        bins.steps,
        {"gradient norm": norms},
        is_log=bool(np.nanmin(norms) > 0) if np.isfinite(norms).any() else False,
    )


def _by_kind(run: RecordedRun, prefix: str, ending: str) -> dict[str, list[tuple[RankSteps, str]]]:
    """Return the ranks with a reading, and the name of its column, by kind of device."""
    found: dict[str, list[tuple[RankSteps, str]]] = {}
    for steps in run.ranks.values():
        for name in steps.names(prefix):
            if name.endswith(ending):
                found.setdefault(name.split(":")[0].split(".")[0], []).append(
                    (steps, f"{prefix}.{name}")
                )
    return found


def _memory(run: RecordedRun, bins: Bins) -> Chart:
    curves: dict[str, Floats] = {}
    for kind, columns in _by_kind(run, "memory", ".limit").items():
        shares = []
        for steps, limit in columns:
            device = limit.removesuffix(".limit")
            peak = f"{device}.peak_allocated"
            used = steps.column(peak if peak in steps.columns else f"{device}.allocated")
            shares.append(bins.highest(steps, used / steps.columns[limit]))
        curves[f"peak on {kind}"] = _over_ranks(np.stack(shares), np.fmax)
    for kind, columns in _by_kind(run, "oom_risk", "").items():
        risks = [bins.highest(steps, steps.columns[name]) for steps, name in columns]
        curves[f"risk on {kind}"] = _over_ranks(np.stack(risks), np.fmax)
    return chart_of(
        "memory",
        "Memory and out-of-memory risk",
        "ratio",
        "Share of the limit on the fullest rank, and probability of an out-of-memory error within "
        f"50 steps.{per_point(bins)}",
        bins.steps,
        curves,
    )


def _readings(run: RecordedRun, bins: Bins, reading: str) -> dict[str, Floats]:
    """Return the mean over ranks by kind of device, and the lowest and highest rank."""
    curves: dict[str, Floats] = {}
    for kind, columns in _by_kind(run, "device", f".{reading}").items():
        each = np.stack([divided(*bins.sums(s, s.columns[name])) for s, name in columns])
        counts = np.isfinite(each).sum(axis=0)
        curves[kind] = divided(np.nansum(each, axis=0), counts)
        if len(columns) > 1:
            curves[f"{kind}, highest rank"] = _over_ranks(each, np.fmax)
            curves[f"{kind}, lowest rank"] = _over_ranks(each, np.fmin)
    return curves


def _utilization(run: RecordedRun, bins: Bins) -> Chart:
    return chart_of(
        "utilization",
        "Use of devices",
        "ratio",
        f"Share of time in which a device was busy; of the CPU, by each rank.{per_point(bins)}",
        bins.steps,
        _readings(run, bins, "utilization_ratio"),
    )


def _temperature(run: RecordedRun, bins: Bins) -> Chart:
    return chart_of(
        "temperature",
        "Temperature of devices",
        "celsius",
        f"Degrees Celsius.{per_point(bins)}",
        bins.steps,
        _readings(run, bins, "temperature_celsius"),
    )


def _steps_at(run: RecordedRun, unix_seconds: Floats) -> Floats:
    """Return the step, with a fraction, at some times.

    After a restart it stays at the highest step until the repeated steps are over, because a chart
    cannot go back.
    """
    first = next(iter(run.ranks.values()))
    ended_at = first.column("ended_at").astype(float)
    order = np.argsort(ended_at, kind="stable")
    steps: Floats = np.interp(unix_seconds, ended_at[order], first.column("step")[order])
    return np.maximum.accumulate(steps)


def _increases(rank: RankMetrics, name: str, at: Floats, **labels: str) -> Floats:
    """Return the increase of a counter between times; 0 where a restart has reset it."""
    seconds, values = rank.over_time(name, **labels)
    known = np.isfinite(values)
    if not known.any():
        return np.zeros(len(at) - 1)
    growth = np.maximum(0.0, np.diff(values[known], prepend=0.0))
    increases: Floats = np.diff(np.interp(at, seconds[known], np.cumsum(growth), left=0.0))
    return increases


def _without_short_intervals(at: Floats) -> Floats:
    """Return at most MAX_POINTS of at least two times, the last one included."""
    at = at[(len(at) - 1) % -(-len(at) // MAX_POINTS) :: -(-len(at) // MAX_POINTS)]
    intervals = np.diff(at)
    if len(at) > 2 and intervals[-1] < _SHORT_INTERVAL * np.median(intervals):
        at = np.delete(at, -2)
    return at


def _causes(run: RecordedRun, metrics: RecordedMetrics) -> Chart | None:
    name = communication.COMM_CAUSE_SECONDS.name
    ranks = [rank for rank in metrics.ranks.values() if rank.over_time(name)[0].size > 1]
    if not ranks:
        return None
    at = _without_short_intervals(max((rank.over_time(name)[0] for rank in ranks), key=len))
    phase = training.PHASE_SECONDS.name
    whole = sum(
        _increases(rank, phase, at)
        - sum(_increases(rank, phase, at, phase=each) for each in NON_TRAINING_PHASES)
        for rank in ranks
    )
    curves = {
        cause: divided(sum(_increases(rank, name, at, cause=cause) for rank in ranks), whole)
        for cause in CAUSE.values
    }
    return chart_of(
        "causes",
        "Exposed communication by cause",
        "ratio",
        "Share of training time, mean over the ranks with a metrics log.",
        _steps_at(run, at[1:]),
        curves,
        is_stacked=True,
    )


def _mfu(run: RecordedRun, metrics: RecordedMetrics) -> Chart | None:
    found = [rank.over_time(training.MFU.name) for rank in metrics.ranks.values()]
    found = [(seconds, values) for seconds, values in found if np.isfinite(values).any()]
    if not found:
        return None
    at = max((seconds for seconds, _ in found), key=len)
    at = at[:: -(-len(at) // MAX_POINTS)]
    each = [np.interp(at, s[np.isfinite(v)], v[np.isfinite(v)]) for s, v in found]
    return chart_of(
        "mfu",
        "Model FLOPs utilization",
        "ratio",
        "Mean over the ranks with a metrics log.",
        _steps_at(run, at),
        {"MFU": np.mean(each, axis=0)},
    )

"""Compares two recorded runs over the steps that both have: time, communication, memory, loss.

The runs are A, the reference, and B. Of each step the mean over the ranks is taken. The first
common steps, and those after a restart, are left out as warm-up. Steps of the same number are
compared with each other, because both runs may have had the same batch then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import ZerowatchError
from ...metrics.catalog.labels import NON_TRAINING_PHASES, PHASES
from ...metrics.thresholds import COMM_COVERAGE_LOW, THRESHOLDS
from ..common.format_numbers import format_seconds
from .batch_means import MIN_VALUES, mean_error
from .configuration import Difference, RunSource, differences, not_recorded
from .metrics_reader import read_metrics
from .run_charts import CHART_SERIES
from .run_reader import LAST_STEPS, Column, RankSteps, RecordedRun, read_run
from .run_summary import (
    RunSummary,
    exposed_seconds,
    has_collectives,
    shared_work,
    summarize,
    training_seconds,
)

# Raise it if an older reader of `zerowatch compare --json` would misunderstand a change.
SCHEMA_VERSION = 1
LEVEL = 0.05  # probability that an interval does not contain the true change
# By default this part of the common steps is left out as warm-up, within these limits.
WARM_UP_RATIO = 0.1
MIN_WARM_UP_STEPS = 5
MAX_WARM_UP_STEPS = 50
# Steps after a restart that are left out: allocators, caches and data loaders warm up again.
RESTART_WARM_UP_STEPS = 5
# Changes below this share of a step are not significant, whatever the noise: clocks and float32.
MIN_CHANGE = 1e-4
# Causes of less time in a step are rests of rounding.
_MIN_CAUSE_SECONDS = 1e-6
# The verdict names phases that changed by more than this share of a step.
_NOTABLE_RATIO = 0.01
Floats = NDArray[np.float64]
Unit = Literal["seconds", "per_second", "ratio", "bytes", "count", ""]
Group = Literal["throughput", "phases", "communication", "collectives", "memory", "loss"]
Respect = Literal["hardware", "batch", "communication"]


class ComparisonError(ZerowatchError):
    """Two runs cannot be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How a value of B differs from that of A.

    Attributes:
        value: B / A - 1 if `is_relative`, else B - A in the unit of the measure.
        lower: Lower bound; None without an interval.
        upper: Upper bound; None without an interval.
        is_significant: Whether the interval is on one side of 0. None without an interval.
    """

    value: float
    is_relative: bool
    lower: float | None = None
    upper: float | None = None
    is_significant: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A value of both runs.

    Attributes:
        name: Such as "phase.backward".
        title: The same for readers.
        a: Value of A; None if not recorded.
        b: Value of B; None if not recorded.
        change: None if a value is missing, or if the runs are not comparable in this respect.
        not_comparable: In which respect the runs are not comparable; None if they are.
    """

    group: Group
    name: str
    title: str
    unit: Unit
    a: float | None
    b: float | None
    change: Change | None
    not_comparable: Respect | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incomparability:
    """A respect in which two runs are not comparable.

    Attributes:
        sentence: What differs, and what follows.
    """

    respect: Respect
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSteps:
    """Which steps are compared.

    Attributes:
        common: Steps that both runs have.
        warm_up: Common steps left out at the beginning.
        compared: Steps that are compared, without those left out after restarts.
        first: Number of the first compared step.
        last: Number of the last compared step.
        steps_per_value: 1, or more in runs so long that several steps were read as one value.
    """

    common: int
    warm_up: int
    compared: int
    first: int
    last: int
    steps_per_value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """The comparison of two runs.

    Attributes:
        verdict: What is significant, in one or two sentences.
        incomparable: In which respects the runs are not comparable.
        notes: What to know about the intervals, one sentence each.
        measures: Values over the compared steps, and at the end of the runs.
        differences: What differs in configuration, software and hardware.
        figures: Numbers by name, as in `COMPARISON_FIGURES`; None if unknown or not comparable.
        problems: What is missing or damaged, with the run.

    Examples:
        >>> a, b = (read_source(Path("runs") / name) for name in ("before", "after"))
        >>> compare(a, b).verdict
        'B processes 12.3 % more tokens per second than A (95 % interval +10.1 to +14.5 %).'
    """

    schema: int = SCHEMA_VERSION
    a: RunSummary
    b: RunSummary
    verdict: str
    steps: ComparedSteps
    incomparable: tuple[Incomparability, ...]
    notes: tuple[str, ...]
    measures: tuple[Measure, ...]
    differences: tuple[Difference, ...]
    figures: Mapping[str, float | None]
    problems: tuple[str, ...]

    def of(self, *groups: Group) -> list[Measure]:
        """Return the measures of some groups."""
        return [measure for measure in self.measures if measure.group in groups]


COMPARISON_FIGURES: Mapping[str, str] = {
    "throughput_ratio": "throughput of B over that of A: tokens, else samples, else steps",
    "throughput_ratio_lower": "lower bound of its 95 % interval",
    "throughput_ratio_upper": "upper bound of its 95 % interval; below 1, B is certainly slower",
    "step_seconds_ratio": "time of a step of B over that of A",
    "step_seconds_ratio_lower": "lower bound of its 95 % interval",
    "step_seconds_ratio_upper": "upper bound of its 95 % interval",
    "comm_exposed_seconds_ratio": "exposed communication of a step of B over that of A",
    "wire_bytes_ratio": "bytes that a rank sends in a step of B over those of A",
    "memory_peak_bytes_ratio": "highest memory use of B over that of A, GPUs if there are any",
    "loss_ratio": "mean loss of the last common steps of B over that of A; unknown unless both are "
    "finite and above 0",
    "compared_steps": "steps that were compared",
    "configuration_differences": "differences of settings, ds config, software and hardware",
}


def read_source(folder: Path) -> RunSource:
    """Read a run folder for a comparison.

    Raises:
        RunFolderError: There is no such folder, or nothing in it is of a run.
    """
    run, metrics = read_run(folder), read_metrics(folder, CHART_SERIES)
    return RunSource(run=run, metrics=metrics, summary=summarize(run, metrics))


def compare(a: RunSource, b: RunSource, *, warm_up: int | None = None) -> RunComparison:
    """Compare two runs.

    Args:
        a: The reference.
        b: The other run.
        warm_up: Common steps to leave out at the beginning. None for a tenth, from 5 to 50.

    Raises:
        ComparisonError: Both are the same run, one has no steps, or they have no step in common.
    """
    _check(a.run, b.run)
    steps = _StepPairs(a.run, b.run, warm_up)
    changed = differences(a, b, _batches(a, b, steps))
    incomparable = tuple(_incomparable(a, b, changed))
    measures = tuple(_Measures(a, b, steps, {each.respect for each in incomparable}).all())
    by_name = {measure.name: measure for measure in measures}
    return RunComparison(
        a=a.summary,
        b=b.summary,
        verdict=" ".join(
            [
                _verdict(by_name, steps, incomparable),
                *_nonfinite_losses(a.summary, b.summary),
                *_slow_ranks(a.summary, b.summary),
                *_changed_software(changed),
            ]
        ),
        steps=steps.facts,
        incomparable=incomparable,
        notes=tuple(_notes(a, b, steps, by_name)),
        measures=measures,
        differences=changed,
        figures=_figures(by_name, steps, changed),
        problems=(
            *(f"A: {problem}" for problem in a.summary.problems),
            *(f"B: {problem}" for problem in b.summary.problems),
            *not_recorded(a, b),
        ),
    )


def _check(a: RecordedRun, b: RecordedRun) -> None:
    for letter, run in (("A", a), ("B", b)):
        if not run.ranks:
            reasons = "; ".join(run.problems)
            raise ComparisonError(
                f"{run.folder} ({letter}) has no recorded step, so there is nothing to compare: "
                f"{reasons}"
            )
    if a.folder.resolve() == b.folder.resolve() or _identity(a) == _identity(b):
        raise ComparisonError(
            f"{a.folder} and {b.folder} are the same run ({a.run_id}); give two different runs"
        )


def _identity(run: RecordedRun) -> tuple[object, ...]:
    """Return what differs between two runs, also if they have the same run id."""
    first = next(iter(run.ranks.values()))
    return run.run_id, run.attempts[:1], float(first.column("ended_at")[0])


class _StepPairs:
    """Aligns the steps of two runs.

    Args:
        a: The reference.
        b: The other run.
        warm_up: Common steps to leave out at the beginning; None for the default.

    Attributes:
        facts: Which steps are compared.
    """

    def __init__(self, a: RecordedRun, b: RecordedRun, warm_up: int | None) -> None:
        rows = {steps.steps_per_row for run in (a, b) for steps in run.ranks.values()}
        # Rows of different lengths are joined to longer ones, so that they cover about the same.
        self._size = max(rows) if len(rows) == 1 else 4 * max(rows)
        self._runs = (a, b)
        numbers = [self._numbers(run) for run in (a, b)]
        common = np.intersect1d(numbers[0], numbers[1])
        if not common.size:
            spans = [f"{n.min() * self._size:,} to {n.max() * self._size:,}" for n in numbers]
            raise ComparisonError(
                f"{a.folder} and {b.folder} have no step in common: A has steps {spans[0]}, B has "
                f"steps {spans[1]}"
            )
        if warm_up is None:
            warm_up = round(WARM_UP_RATIO * common.size * self._size)
            warm_up = min(max(warm_up, MIN_WARM_UP_STEPS), MAX_WARM_UP_STEPS)
        left_out = math.ceil(warm_up / self._size)
        if left_out >= common.size:
            raise ComparisonError(
                f"{a.folder} and {b.folder} have only {common.size * self._size} steps in common, "
                f"of which {warm_up} are left out as warm-up (--warm-up)"
            )
        self._all = common
        usable = [self._numbers(run, without_restarts=True) for run in (a, b)]
        self._compared = np.intersect1d(common[left_out:], np.intersect1d(usable[0], usable[1]))
        if not self._compared.size:
            self._compared = common[left_out:]
        self.facts = ComparedSteps(
            common=int(common.size) * self._size,
            warm_up=left_out * self._size,
            compared=int(self._compared.size) * self._size,
            first=int(self._compared[0]) * self._size,
            last=int(self._compared[-1]) * self._size,
            steps_per_value=self._size,
        )

    def values(
        self, of: Callable[[RankSteps], Column], *, is_all: bool = False
    ) -> tuple[Floats, Floats]:
        """Return a value of each compared step of A and B, the mean over the ranks.

        NaN where no rank has a value.

        Args:
            of: Returns the column of a rank.
            is_all: Whether to return all common steps, with those of the warm-up.
        """
        chosen = self._all if is_all else self._compared
        a, b = (self._mean(run, of, chosen) for run in self._runs)
        return a, b

    def sums(self, of: Callable[[RankSteps], Column]) -> tuple[Floats, Floats]:
        """Return a value of each compared step of A and B, the sum over the ranks that have it.

        The ranks that record every tenth step, and those without a log, are counted like the
        others. NaN where no rank has a value.

        Args:
            of: Returns the column of a rank.
        """
        a, b = (
            mean * ranks for mean, ranks in zip(self.values(of), self.num_ranks(of), strict=True)
        )
        return a, b

    def num_ranks(self, of: Callable[[RankSteps], Column]) -> tuple[Floats, Floats]:
        """Return how many ranks have a value of each compared step of A and B; see `sums`."""
        shares = self.values(lambda steps: np.isfinite(of(steps)).astype(np.float32))
        sizes = self.values(_column("world_size"))
        return shares[0] * sizes[0], shares[1] * sizes[1]

    def _places(self, steps: RankSteps) -> NDArray[np.int64]:
        places: NDArray[np.int64] = -(-steps.column("step") // self._size)
        return places

    def _numbers(self, run: RecordedRun, *, without_restarts: bool = False) -> NDArray[np.int64]:
        """Return the numbers that at least half of the ranks have that made the step.

        In large jobs, most ranks record every tenth step. The mean over the ranks would then be of
        other ranks at the steps between. Ranks without a log are not counted.
        """
        found, sizes = [], []
        for steps in run.ranks.values():
            places = self._places(steps)
            own, rows = np.unique(places, return_index=True)
            if without_restarts:
                is_kept = ~np.isin(own, places[_is_after_restart(steps, run.attempts)])
                own, rows = own[is_kept], rows[is_kept]
            found.append(own)
            sizes.append(steps.column("world_size")[rows])
        numbers, index, counts = np.unique(
            np.concatenate(found), return_inverse=True, return_counts=True
        )
        world_size = np.zeros_like(numbers)
        np.maximum.at(world_size, index, np.concatenate(sizes))
        chosen: NDArray[np.int64] = numbers[
            2 * counts >= np.searchsorted(list(run.ranks), world_size)
        ]
        return chosen

    def _mean(
        self, run: RecordedRun, of: Callable[[RankSteps], Column], chosen: NDArray[np.int64]
    ) -> Floats:
        total, count = np.zeros(len(chosen)), np.zeros(len(chosen))
        for steps in run.ranks.values():
            values = of(steps).astype(np.float64)
            places = self._places(steps)
            index = np.searchsorted(chosen, places).clip(max=len(chosen) - 1)
            known = (chosen[index] == places) & np.isfinite(values)
            total += np.bincount(index[known], values[known], len(chosen))
            count += np.bincount(index[known], minlength=len(chosen))
        mean: Floats = np.divide(total, count, out=np.full(len(chosen), np.nan), where=count > 0)
        return mean


def _is_after_restart(steps: RankSteps, attempts: Sequence[float]) -> NDArray[np.bool_]:
    """Return which rows are warm-up after a restart.

    Launchers do not count a job that is submitted again, nor nodes that join or leave.

    Args:
        steps: The steps of a rank.
        attempts: When each attempt of the run started, in Unix seconds. An attempt is noted at
            about the end of its first step, so the row before that time is taken too.
    """
    is_start = np.diff(steps.column("attempt")) != 0
    is_start |= np.diff(steps.column("step")) <= 0
    restarts = np.sort(attempts)[1:]
    noted = np.diff(np.searchsorted(restarts, steps.column("ended_at"))) > 0
    is_start |= noted
    is_start[:-1] |= noted[1:]
    starts = np.flatnonzero(is_start) + 1
    rows = math.ceil(RESTART_WARM_UP_STEPS / steps.steps_per_row)
    is_after = np.zeros(steps.num_rows, bool)
    for start in starts:
        is_after[start : start + rows] = True
    return is_after


class _Measures:
    """Computes the measures of two runs.

    Args:
        a: The reference.
        b: The other run.
        steps: The compared steps.
        respects: In which respects the runs are not comparable.
    """

    def __init__(
        self, a: RunSource, b: RunSource, steps: _StepPairs, respects: set[Respect]
    ) -> None:
        self._a, self._b = a, b
        self._steps = steps
        self._work: Respect | None = "batch" if "batch" in respects else None
        self._comm: Respect | None = "communication" if "communication" in respects else self._work
        self._work_is_unknown = _shares_differently(a, b)
        self._seconds = steps.values(training_seconds)
        self._step_seconds = _mean(self._seconds[0]) or 0.0
        # Readers look at the largest changes of the parts of a step, so the intervals of all parts
        # hold together (Bonferroni).
        self._num_parts = len(self._names("phase")) + 2 + len(self._ops())

    def all(self) -> Iterator[Measure]:
        """Yield all measures."""
        yield from self._throughput()
        yield from self._phases()
        yield from self._communication()
        yield from self._collectives()
        yield from self._memory()
        yield from self._loss()

    def _throughput(self) -> Iterator[Measure]:
        shared = shared_work(self._a.run, self._a.metrics)
        has_work = False
        for name in ("tokens", "samples"):
            is_shared = name in shared  # a sum over ranks would count some of it several times
            done = (self._steps.values if is_shared else self._steps.sums)(_column(name))
            if self._work_is_unknown or not all(np.nansum(each) > 0 for each in done):
                continue
            has_work = True
            title = f"{name} per second{' of a rank' if is_shared else ''}"
            yield _rate(name, title, done, self._seconds)
        if not has_work:
            ones = (np.ones_like(self._seconds[0]), np.ones_like(self._seconds[1]))
            yield _rate("steps", "steps per second", ones, self._seconds, not_comparable=self._work)
        yield _relative_measure(
            "throughput", "step_seconds", "time of a step", "seconds", self._seconds,
            not_comparable=self._work,
        )  # fmt: skip
        for quantile in (50, 90, 99):
            # Means of several steps vary less than the steps.
            if len(self._seconds[0]) >= MIN_VALUES and self._steps.facts.steps_per_value == 1:
                values = [float(np.nanpercentile(each, quantile)) for each in self._seconds]
                yield _plain_measure(
                    "throughput", f"step_seconds_p{quantile}",
                    "median time of a step" if quantile == 50 else f"{quantile} % of steps within",
                    "seconds", *values, not_comparable=self._work,
                )  # fmt: skip
        yield self._figure("throughput", "mfu_ratio", "MFU, whole run", "ratio")

    def _phases(self) -> Iterator[Measure]:
        names = self._names("phase")
        for phase in (phase for phase in PHASES if phase in names):
            values = self._steps.values(_column_or_zero(f"phase.{phase}"))
            if phase in NON_TRAINING_PHASES:  # a few long pauses, of which no interval is known
                means = map(_mean, values)
                yield _plain_measure(
                    "phases", f"phase.{phase}", phase, "seconds", *means, not_comparable=self._work
                )
            else:
                yield self._difference("phases", f"phase.{phase}", phase, values, self._work)

        title = "lag of the slowest rank, whole run"
        yield self._figure("phases", "straggler_score_ratio", title, "ratio")

    def _communication(self) -> Iterator[Measure]:
        for name, title, of in (
            ("comm_exposed_seconds", "waited for communication", exposed_seconds),
            ("comm_seconds", "a collective in flight", _column("comm_seconds")),
        ):
            values = self._steps.values(of)
            yield self._difference("communication", name, title, values, self._comm)
        causes = [{share.name: share for share in x.summary.causes} for x in (self._a, self._b)]
        for cause in dict.fromkeys(name for each in causes for name in each):
            found = [each[cause].seconds_per_step if cause in each else None for each in causes]
            if all(seconds is None or seconds < _MIN_CAUSE_SECONDS for seconds in found):
                continue
            yield _plain_measure(
                "communication", f"cause.{cause}", f"cause: {cause}, whole run", "seconds", *found,
                not_comparable=self._comm,
            )  # fmt: skip
        sent = self._steps.values(_wire_bytes)
        yield _plain_measure(
            "communication", "wire_bytes", "sent by a rank", "bytes", *map(_mean, sent),
            not_comparable=self._comm,
        )  # fmt: skip

    def _collectives(self) -> Iterator[Measure]:
        for op in self._ops():
            column = f"collective.{op}"
            calls = self._steps.values(_of_collectives(f"{column}.calls"))
            yield _plain_measure(
                "collectives", f"{column}.calls", f"{op}, calls", "count", *map(_mean, calls),
                not_comparable=self._comm,
            )  # fmt: skip
            sent = self._steps.values(_of_collectives(f"{column}.wire_bytes"))
            yield _plain_measure(
                "collectives", f"{column}.wire_bytes", f"{op}, sent", "bytes", *map(_mean, sent),
                not_comparable=self._comm,
            )  # fmt: skip
            seconds = self._steps.values(_of_collectives(f"{column}.seconds"))
            yield self._difference(
                "collectives", f"{column}.seconds", f"{op}, in flight", seconds, self._comm,
            )  # fmt: skip

    def _memory(self) -> Iterator[Measure]:
        kinds = dict.fromkeys(name.split(".")[0].split(":")[0] for name in self._names("memory"))
        for kind in sorted(kinds, key=lambda kind: (kind == "cpu", kind)):
            peaks = [self._peak(run, kind) for run in (self._a.run, self._b.run)]
            yield _plain_measure(
                "memory", f"memory_peak.{kind}", f"highest use of {kind}", "bytes", *peaks
            )
            ends = [
                next((m for m in x.summary.memory if m.device.split(":")[0] == kind), None)
                for x in (self._a, self._b)
            ]
            for name, title in (
                ("limit_bytes", "limit"),
                ("headroom_bytes", "left at the predicted next peak, at the end"),
            ):
                values = [None if end is None else getattr(end, name) for end in ends]
                yield _plain_measure(
                    "memory", f"memory_{name.split('_')[0]}.{kind}", f"{kind}: {title}", "bytes",
                    *values,
                )  # fmt: skip
            categories = [{} if end is None else end.categories for end in ends]
            for category in dict.fromkeys(name for each in categories for name in each):
                if all(categories):
                    sizes = [each.get(category, 0.0) for each in categories]
                    yield _plain_measure(
                        "memory", f"memory_category.{kind}.{category}",
                        f"{kind}: {category} at a step's peak, at the end", "bytes", *sizes,
                    )  # fmt: skip
        yield self._figure("memory", "oom_risk_ratio", "highest out-of-memory risk", "ratio")

    def _peak(self, run: RecordedRun, kind: str) -> float | None:
        """Return the highest memory use of any rank in the common steps, with the warm-up."""
        last = self._steps.facts.last
        peaks = []
        for steps in run.ranks.values():
            is_common = steps.column("step") <= last
            devices = dict.fromkeys(name.rsplit(".", 1)[0] for name in steps.names("memory"))
            for device in devices:
                if device.split(":")[0] != kind:
                    continue
                for state in ("peak_allocated", "allocated"):
                    values = steps.column(f"memory.{device}.{state}")[is_common]
                    if np.isfinite(values).any():
                        peaks.append(float(np.nanmax(values)))
                        break
        return max(peaks, default=None)

    def _loss(self) -> Iterator[Measure]:
        losses, are_bad = _losses(self._steps)
        known = [np.isfinite(each) | is_bad for each, is_bad in zip(losses, are_bad, strict=True)]
        both = known[0] & known[1]
        if both.any():
            # NaN if one of them was not finite: the mean of the others would hide that.
            size = self._steps.facts.steps_per_value
            rows = min(math.ceil(LAST_STEPS / size), int(both.sum()))
            means = [float(each[both][-rows:].mean()) for each in losses]
            last = [mean if math.isfinite(mean) else None for mean in means]
            title = f"loss, mean of the last {rows * size} common steps"
            yield _plain_measure("loss", "loss", title, "", *last, not_comparable=self._work)
        yield self._figure("loss", "skipped_ratio", "skipped steps, whole run", "ratio")
        title = "steps with nan or inf, whole run"
        yield self._figure("loss", "nonfinite_losses", title, "count")

    def _names(self, prefix: str) -> list[str]:
        """Return the names of columns that a rank of A or B has; see `RankSteps.names`."""
        runs = (self._a.run, self._b.run)
        ranks = (steps for run in runs for steps in run.ranks.values())
        return list(dict.fromkeys(name for steps in ranks for name in steps.names(prefix)))

    def _ops(self) -> list[str]:
        return list(dict.fromkeys(name.rsplit(".", 1)[0] for name in self._names("collective")))

    def _figure(self, group: Group, name: str, title: str, unit: Unit) -> Measure:
        values = (self._a.summary.figures[name], self._b.summary.figures[name])
        return _plain_measure(group, name, title, unit, *values)

    def _difference(
        self,
        group: Group,
        name: str,
        title: str,
        values: tuple[Floats, Floats],
        not_comparable: Respect | None,
    ) -> Measure:
        """Return a measure in seconds with the interval of its difference."""
        both = np.isfinite(values[0]) & np.isfinite(values[1])
        measure = _plain_measure(
            group, name, title, "seconds", *map(_mean, values), not_comparable=not_comparable
        )
        if not both.any() or measure.change is None:
            return measure
        a, b = values[0][both], values[1][both]
        pairs = b - a
        return Measure(
            group=group,
            name=name,
            title=title,
            unit="seconds",
            a=float(a.mean()),
            b=float(b.mean()),
            change=_with_interval(
                float(pairs.mean()),
                pairs,
                level=LEVEL / self._num_parts,
                least=MIN_CHANGE * self._step_seconds,
                is_relative=False,
            ),
        )


def _with_interval(
    mean: float, values: Floats, *, level: float, least: float, is_relative: bool
) -> Change:
    """Return a change with its interval, as far as the values allow one.

    Args:
        mean: The change; a log ratio if it is relative.
        values: A value of each step, whose mean has the same error as the change.
        level: Probability that the interval does not contain the true change.
        least: Changes up to this size are not significant.
        is_relative: Whether the change is a log ratio.
    """
    shown = math.expm1 if is_relative else float
    error = mean_error(values)
    if error is None:
        return Change(value=shown(mean), is_relative=is_relative)
    half = error.half_width(level)
    return Change(
        value=shown(mean),
        is_relative=is_relative,
        lower=shown(mean - half),
        upper=shown(mean + half),
        is_significant=abs(mean) > max(half, least),
    )


def _rate(
    name: str,
    title: str,
    done: tuple[Floats, Floats],
    seconds: tuple[Floats, Floats],
    *,
    not_comparable: Respect | None = None,
) -> Measure:
    """Return a throughput with the interval of its ratio.

    The error of a ratio of means is that of the mean of its linear approximation (the delta
    method). B's values are combined with A's of the same steps.
    """
    is_known = np.isfinite(done[0]) & np.isfinite(done[1])
    is_known &= np.isfinite(seconds[0]) & np.isfinite(seconds[1])
    if not is_known.any():
        return _plain_measure("throughput", f"{name}_per_second", title, "per_second", None, None)
    work = [each[is_known] for each in done]
    time = [each[is_known] for each in seconds]
    rates = [_ratio(float(w.mean()), float(t.mean())) for w, t in zip(work, time, strict=True)]
    change = None
    if not_comparable is None and all(rate > 0 for rate in rates):
        relative = [w / w.mean() - t / t.mean() for w, t in zip(work, time, strict=True)]
        change = _with_interval(
            math.log(rates[1] / rates[0]),
            relative[1] - relative[0],
            level=LEVEL,
            least=MIN_CHANGE,
            is_relative=True,
        )
    return Measure(
        group="throughput",
        name=f"{name}_per_second",
        title=title,
        unit="per_second",
        a=rates[0],
        b=rates[1],
        change=change,
        not_comparable=not_comparable,
    )


def _relative_measure(
    group: Group,
    name: str,
    title: str,
    unit: Unit,
    values: tuple[Floats, Floats],
    *,
    not_comparable: Respect | None,
) -> Measure:
    """Return a measure with the interval of its relative change."""
    both = np.isfinite(values[0]) & np.isfinite(values[1])
    a, b = values[0][both], values[1][both]
    means = (_mean(a), _mean(b))
    change = None
    if not_comparable is None and means[0] and means[1]:
        change = _with_interval(
            math.log(means[1] / means[0]),
            b / means[1] - a / means[0],
            level=LEVEL,
            least=MIN_CHANGE,
            is_relative=True,
        )
    return Measure(
        group=group,
        name=name,
        title=title,
        unit=unit,
        a=means[0],
        b=means[1],
        change=change,
        not_comparable=not_comparable,
    )


def _plain_measure(
    group: Group,
    name: str,
    title: str,
    unit: Unit,
    a: float | None,
    b: float | None,
    *,
    not_comparable: Respect | None = None,
) -> Measure:
    """Return a measure without an interval."""
    change = None
    if a is not None and b is not None and not_comparable is None:
        # Of times and shares the difference is of use, of sizes the ratio.
        is_relative = unit in ("bytes", "per_second", "") and a > 0 and b > 0
        change = Change(value=b / a - 1 if is_relative else b - a, is_relative=is_relative)
    return Measure(
        group=group,
        name=name,
        title=title,
        unit=unit,
        a=a,
        b=b,
        change=change,
        not_comparable=not_comparable,
    )


def _losses(steps: _StepPairs) -> tuple[list[Floats], list[NDArray[np.bool_]]]:
    """Return the losses of all common steps of A and B, and in which steps one was not finite.

    The loss of such a step is NaN, also if it was finite on other ranks.
    """
    values = steps.values(_column("loss"), is_all=True)
    shares = steps.values(_column("nonfinite_loss"), is_all=True)
    are_bad = [share > 0 for share in shares]
    losses = [
        np.where(is_bad, np.nan, value) for value, is_bad in zip(values, are_bad, strict=True)
    ]
    return losses, are_bad


def _column(name: str) -> Callable[[RankSteps], Column]:
    return lambda steps: steps.column(name)


def _column_or_zero(name: str) -> Callable[[RankSteps], Column]:
    """Return what returns a column of a rank; zeros if the rank has none."""
    return lambda steps: steps.columns.get(name, np.zeros(steps.num_rows, np.float32))


def _of_collectives(name: str) -> Callable[[RankSteps], Column]:
    """Return what returns a column of a rank; NaN where its collectives are not recorded."""
    values = _column_or_zero(name)
    return lambda steps: np.where(has_collectives(steps), values(steps), np.nan)


def _wire_bytes(steps: RankSteps) -> Column:
    total = np.zeros(steps.num_rows)
    for name in steps.names("collective"):
        if name.endswith(".wire_bytes"):
            total += steps.column(f"collective.{name}")
    return np.where(has_collectives(steps), total, np.nan)


def _mean(values: Floats) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _batches(a: RunSource, b: RunSource, steps: _StepPairs) -> list[dict[str, float]]:
    """Return the batch of a step of all ranks of A and B, as the step logs have it.

    It is the mean of the compared steps that both have.
    """
    batches: list[dict[str, float]] = [{}, {}]
    for name in ("samples", "tokens", "micro_batches"):
        values, ranks = steps.values(_column(name)), steps.num_ranks(_column(name))
        both = np.isfinite(values[0]) & np.isfinite(values[1])
        if not both.any():
            continue
        for source, batch, each, number in zip((a, b), batches, values, ranks, strict=True):
            mean, usual = float(each[both].mean()), float(np.median(number[both]))
            if name == "micro_batches":
                batch["micro-batches per step"] = round(mean, 3)
            elif name in shared_work(source.run, source.metrics):
                # A sum over ranks would count some of it several times.
                batch[f"{name} per step of a rank"] = round(mean, 3)
            else:
                batch[f"{name} per step"] = round(mean * usual, 3)
    return batches


def _incomparable(
    a: RunSource, b: RunSource, changed: Sequence[Difference]
) -> Iterator[Incomparability]:
    hardware = [each for each in changed if each.source == "hardware"]
    if hardware:
        yield Incomparability(
            respect="hardware",
            sentence=f"The hardware differs ({_listed(hardware)}), so times compare the machines, "
            "not only the configurations.",
        )
    batch = [x for x in changed if x.source == "batch" and x.name != "micro-batches per step"]
    if batch:
        yield Incomparability(
            respect="batch",
            sentence=f"The batch of a step differs ({_listed(batch)}), so times of a step, phases, "
            "collectives and losses are not comparable; throughput is.",
        )
    elif _shares_differently(a, b):
        yield Incomparability(
            respect="batch",
            sentence="In one of the runs, ranks share samples (tensor, sequence or pipeline "
            "parallelism), so the batches of a step and what depends on them are not comparable.",
        )
    coverage = [x.summary.figures["comm_coverage_ratio"] for x in (a, b)]
    known = [each for each in coverage if each is not None]
    if known and min(known) < THRESHOLDS[COMM_COVERAGE_LOW.name]:
        low = "A" if coverage[0] == min(known) else "B"
        yield Incomparability(
            respect="communication",
            sentence=f"Only {100 * min(known):.0f} % of the collectives of {low} were recorded, so "
            "communication is not comparable.",
        )


def _shares_differently(a: RunSource, b: RunSource) -> bool:
    """Whether sums of samples and tokens over the ranks of A and B mean different things."""
    shared = shared_work(a.run, a.metrics)
    return shared != shared_work(b.run, b.metrics) or (
        bool(shared) and a.run.world_size != b.run.world_size
    )


def _listed(changed: Sequence[Difference]) -> str:
    return ", ".join(f"{each.name} {each.a} and {each.b}" for each in changed)


def _main_measure(measures: Mapping[str, Measure]) -> Measure:
    """Return the throughput that the verdict is about."""
    for name in ("tokens_per_second", "samples_per_second"):
        if name in measures:
            return measures[name]
    return measures["steps_per_second"]


def _verdict(
    measures: Mapping[str, Measure],
    steps: _StepPairs,
    incomparable: Sequence[Incomparability],
) -> str:
    respects = {each.respect for each in incomparable}
    machines = "The hardware differs. " if "hardware" in respects else ""
    main = _main_measure(measures)
    change = main.change
    what = main.title.partition(" per second")[0]
    if change is None:
        return (
            f"{machines}The throughput of the runs cannot be compared: their batches differ, and "
            "neither samples nor tokens are recorded."
        )
    more = "more" if change.value > 0 else "fewer"
    size = f"{100 * abs(change.value):.1f} %"
    if change.lower is None or change.upper is None:
        seen = f"{machines}B processed {size} {more} {what} per second than A"
        if steps.facts.compared < MIN_VALUES * steps.facts.steps_per_value:
            return (
                f"{seen}, but {steps.facts.compared} compared steps are too few for an interval; "
                f"{MIN_VALUES} are needed."
            )
        return (
            f"{seen}, but the times of the steps vary so slowly that {steps.facts.compared} of "
            "them show no significance; compare longer runs."
        )
    interval = f"95 % interval {100 * change.lower:+.1f} to {100 * change.upper:+.1f} %"
    if change.is_significant:
        sentence = f"B processes {size} {more} {what} per second than A ({interval})."
    else:
        sentence = (
            f"No significant difference in throughput: B {100 * change.value:+.1f} % {what} per "
            f"second ({interval})."
        )
    return " ".join(filter(None, [f"{machines}{sentence}", _reasons(measures)]))


def _reasons(measures: Mapping[str, Measure]) -> str:
    """Return a sentence about the parts of a step that changed significantly."""
    whole = measures["step_seconds"].a or 0.0
    parts = [
        (measure, measure.change)
        for measure in measures.values()
        if measure.change is not None
        and measure.change.is_significant
        and (measure.group == "phases" or measure.name == "comm_exposed_seconds")
        and abs(measure.change.value) > _NOTABLE_RATIO * whole
    ]
    parts.sort(key=lambda part: -abs(part[1].value))
    texts = [
        f"{'waiting for communication' if m.group == 'communication' else m.title} takes "
        f"{format_seconds(abs(change.value))} {'more' if change.value > 0 else 'less'}"
        for m, change in parts[:3]
    ]
    if not texts:
        return ""
    return f"Per step, {' and '.join(filter(None, [', '.join(texts[:-1]), texts[-1]]))}."


def _nonfinite_losses(a: RunSummary, b: RunSummary) -> Iterator[str]:
    """Yield in which run losses were not finite: the figures of the loss are without these."""
    for letter, run in (("A", a), ("B", b)):
        for finding in run.findings:
            if finding.name == "nonfinite_losses":
                yield f"In {letter}, {finding.sentence[0].lower()}{finding.sentence[1:]}"


def _slow_ranks(a: RunSummary, b: RunSummary) -> Iterator[str]:
    """Yield which rank was slow in one run only: the means over the ranks do not show it."""
    slow = [
        next((each.sentence for each in run.findings if each.name == "straggler"), None)
        for run in (a, b)
    ]
    places = [None if sentence is None else sentence.partition(", by ")[0] for sentence in slow]
    if places[0] == places[1]:
        return
    for letter, sentence in zip("AB", slow, strict=True):
        if sentence is not None:
            yield f"In {letter}, {sentence[0].lower()}{sentence[1:]}"


def _changed_software(changed: Sequence[Difference]) -> Iterator[str]:
    """Yield a sentence on the ds config and the versions that differ."""
    found = [str(each) for each in changed if each.source in ("ds config", "software")]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        yield f"What was changed: {', '.join(found[:3])}{more}."


def _notes(
    a: RunSource, b: RunSource, steps: _StepPairs, measures: Mapping[str, Measure]
) -> Iterator[str]:
    facts = steps.facts
    yield (
        f"Steps {facts.first:,} to {facts.last:,} of both runs are compared, "
        f"{facts.compared:,} of {facts.common:,} common steps; the first {facts.warm_up:,} and "
        f"{RESTART_WARM_UP_STEPS} after each restart are left out as warm-up."
    )
    yield (
        "Intervals are of 95 %, by batch means of successive steps; those of phases, communication "
        "and collectives hold together with 95 %."
    )
    yield (
        "They cover the variation within these two runs. Two runs of the same configuration can "
        "differ by more, such as on another node: repeat a run to see by how much."
    )
    hosts = [sorted(x.summary.facts.hosts) for x in (a, b)]
    if hosts[0] != hosts[1] and not any(x.metrics.ranks and _has_device_names(x) for x in (a, b)):
        yield (
            f"A ran on {_few(hosts[0])}, B on {_few(hosts[1])}; whether these machines are equal "
            "is not recorded."
        )
    if any(x.summary.is_upper_bound for x in (a, b)):
        yield "On GPUs, the time of collectives in flight is an upper bound in most steps."
    if any(d.verdict != "advised" for x in (a, b) for d in x.summary.tuner.decisions):
        yield "The tuner made trials or changes during a run, which are among the compared steps."
    if any(_overlaps(measures, value) for value in (attrgetter("a"), attrgetter("b"))):
        yield (
            "The time of a collective operation is the sum over its calls, some of which were in "
            "flight at the same time."
        )
    losses, _ = _losses(steps)
    if np.array_equal(losses[0], losses[1]):  # not if a loss is unknown, because nan != nan
        yield f"The losses of all {facts.common:,} common steps are equal."


def _overlaps(measures: Mapping[str, Measure], value: Callable[[Measure], float | None]) -> bool:
    """Return whether the calls of an operation took longer than any collective was in flight."""
    whole = measures.get("comm_seconds")
    limit = None if whole is None else value(whole)
    return limit is not None and any(
        (value(each) or 0.0) > 1.01 * limit
        for each in measures.values()
        if each.group == "collectives" and each.unit == "seconds"
    )


def _has_device_names(source: RunSource) -> bool:
    return any(
        key.name.endswith("device_info")
        for rank in source.metrics.ranks.values()
        for key in rank.last
    )


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def _figures(
    measures: Mapping[str, Measure], steps: _StepPairs, changed: Sequence[Difference]
) -> dict[str, float | None]:
    figures: dict[str, float | None] = dict.fromkeys(COMPARISON_FIGURES)
    for name, measure in (
        ("throughput_ratio", _main_measure(measures)),
        ("step_seconds_ratio", measures["step_seconds"]),
    ):
        if (change := measure.change) is not None:
            figures[name] = 1 + change.value
            figures[f"{name}_lower"] = None if change.lower is None else 1 + change.lower
            figures[f"{name}_upper"] = None if change.upper is None else 1 + change.upper
    peak = next((name for name in measures if name.startswith("memory_peak.")), "")
    for name, of in (
        ("comm_exposed_seconds_ratio", "comm_exposed_seconds"),
        ("wire_bytes_ratio", "wire_bytes"),
        ("memory_peak_bytes_ratio", peak),
        ("loss_ratio", "loss"),
    ):
        found = measures.get(of)
        if found is not None and found.change is not None and found.a and found.b is not None:
            figures[name] = found.b / found.a
    loss = measures.get("loss")
    if loss is not None and not ((loss.a or 0.0) > 0 and (loss.b or 0.0) > 0):
        figures["loss_ratio"] = None  # a loss below 0 has no ratio that means anything
    figures["compared_steps"] = float(steps.facts.compared)
    figures["configuration_differences"] = float(len(changed))
    return figures

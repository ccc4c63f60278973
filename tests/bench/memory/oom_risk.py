"""Out-of-memory forecasts on 600 generated runs: recall, lead time, calibration, false alarms.

Half of the runs end out of memory. The bench feeds each run to the forecast reading by reading, and
compares each forecast with the outcome. Two plain rules forecast the same runs for comparison. For
their Brier score, an alarm counts as the probability of an OOM after an alarm, as separate tuning
runs had it; no alarm likewise. OOMs without a warning sign (a burst, a jump, noise alone) count in
the Brier score and among the false alarms, but not in the lead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
from bench.bench_options import Options
from bench.memory.oom_risk_followed import (
    LINE,
    OURS,
    PER_STEPS,
    THRESHOLD,
    Followed,
    false_alarms_per_10k,
    follow,
    leads,
    pooled,
    warnings,
)
from bench.memory.oom_risk_rules import FORECAST_EVERY
from bench.memory.oom_risk_runs import Run, generate
from bench.memory.oom_risk_scores import ALARM, LEAD_STEPS, brier, reliability
from bench.result_table import Row

from zerowatch.runtime.memory.forecast.forecaster import Forecaster

Array = npt.NDArray[np.float64]
NUM_RUNS, QUICK_RUNS = 600, 48
FIRST_SEED = 2000  # those below 1000 are for tuning
TUNING_RUNS = 60
LEAK_GOAL, LENGTH_GOAL, FALSE_ALARM_GOAL = 0.95, 0.95, 1.0


def bench(options: Options) -> Iterator[Row]:
    """Yield Brier scores, leads, false alarms and costs; print the table of reliability."""
    began = time.process_time()
    runs = list(generate(QUICK_RUNS if options.quick else NUM_RUNS, FIRST_SEED))
    followed = [follow(run) for run in runs]
    risks, came = pooled(followed, OURS)
    print(reliability(risks, came) + "\n", flush=True)
    yield _of_runs(followed, time.process_time() - began)
    yield from _brier_rows(followed, QUICK_RUNS if options.quick else TUNING_RUNS)
    for rule in (OURS, THRESHOLD, LINE):
        yield _false_alarm_row(followed, rule)
        yield _lead_row(followed, rule, "leak", has_goal=rule == OURS)
        yield _lead_row(followed, rule, "fragmentation", has_goal=False)
        yield _warning_row(followed, rule)
    yield _batch_row(followed)
    yield from _cost_rows(followed[1].run)


def _of_runs(followed: Sequence[Followed], spent_seconds: float) -> Row:
    causes = [each.run.cause for each in followed if each.run.cause]
    counts = ", ".join(f"{causes.count(cause)} {cause}" for cause in sorted(set(causes)))
    steps = sum(len(each.run.shapes) for each in followed)
    return Row(
        what="generated runs, and how many run out of memory",
        measured=f"{len(followed)}, {len(causes)}",
        spread=f"by cause: {counts}; {steps} steps; {spent_seconds:.0f} s of CPU",
    )


def _brier_rows(followed: Sequence[Followed], tuning_runs: int) -> Iterator[Row]:
    tuned = [follow(run) for run in generate(tuning_runs, 0)]
    risks, came = pooled(followed, OURS)
    ours = brier(risks, came)
    for rule in (THRESHOLD, LINE):
        fitted = brier(_as_tuned(tuned, followed, rule), came)
        plain = brier(pooled(followed, rule)[0], came)
        yield Row(
            what=f"Brier score: {rule}",
            measured=f"{min(fitted, plain):.4f}",
            spread=f"plain {plain:.4f}",
        )
        yield Row(
            what=f"Brier score: {OURS}, against {rule}",
            measured=f"{ours:.4f}",
            spread=f"always saying {came.mean():.3f}: {came.mean() * (1 - came.mean()):.4f}",
            goal=f"< {min(fitted, plain):.4f}",
            met=ours < min(fitted, plain),
        )


def _as_tuned(tuned: Sequence[Followed], followed: Sequence[Followed], rule: str) -> Array:
    """Return the risks of a rule's alarms, each what it was worth on the runs for tuning."""
    risks, came = pooled(tuned, rule)
    values = [float(came[(risks > 0.5) == on].mean()) for on in (False, True)]
    return np.where(pooled(followed, rule)[0] > 0.5, values[1], values[0])


def _false_alarm_row(followed: Sequence[Followed], rule: str) -> Row:
    count, rate = false_alarms_per_10k(followed, rule)
    return Row(
        what=f"false alarms per 10,000 safe steps: {rule}",
        measured=f"{rate:.2f}",
        spread=f"{count} in all",
        goal=f"< {FALSE_ALARM_GOAL:g}" if rule == OURS else "",
        met=rate < FALSE_ALARM_GOAL if rule == OURS else None,
    )


def _lead_row(followed: Sequence[Followed], rule: str, kind: str, *, has_goal: bool) -> Row:
    found = leads(followed, rule, kind)
    early = sum(lead >= LEAD_STEPS for lead in found)
    others = sum(
        each.run.kind == kind and each.run.cause not in ("", "growth") for each in followed
    )
    return Row(
        what=f"{kind} runs with an alarm {LEAD_STEPS} steps before: {rule}",
        measured=_share(early, len(found)),
        spread=f"median lead {np.median(found or [0]):.0f} steps; {others} more ended otherwise",
        goal=f">= {LEAK_GOAL:.0%}" if has_goal else "",
        met=early >= LEAK_GOAL * len(found) if has_goal else None,
    )


def _warning_row(followed: Sequence[Followed], rule: str) -> Row:
    found = warnings(followed, rule)
    return Row(
        what=f"fatal batches known before they ran: {rule}",
        measured=_share(sum(found), len(found)),
        goal=f">= {LENGTH_GOAL:.0%}" if rule == OURS else "",
        met=sum(found) >= LENGTH_GOAL * len(found) if rule == OURS else None,
    )


def _batch_row(followed: Sequence[Followed]) -> Row:
    """Return how often the forecast called a batch fatal that was not."""
    called = sum(int((each.batch_risk[: each.run.oom_step] > ALARM).sum()) for each in followed)
    steps = sum(len(each.run.shapes) for each in followed)
    return Row(
        what="batches called fatal that did fit, per 10,000",
        measured=f"{called * PER_STEPS / steps:.2f}",
        spread=f"{called} in all",
    )


def _cost_rows(run: Run) -> Iterator[Row]:
    """Measure what following a run costs, in CPU time of this thread."""
    forecaster, forecast = Forecaster(), None
    spent_us: dict[str, list[float]] = {"reading": [], "forecast": [], "batch": []}
    for number, point in enumerate(run.points):
        if forecast is not None:
            spent_us["batch"].append(_microseconds(partial(forecast.batch_risk, point.shapes[0])))
        spent_us["reading"].append(_microseconds(partial(forecaster.add, point)))
        if number % FORECAST_EVERY == 0:
            spent_us["forecast"].append(_microseconds(forecaster.forecast))
            forecast = forecaster.forecast()
    for what, goal_us in (("reading", 50), ("forecast", 2000), ("batch", 5)):
        low, median, high = np.percentile(spent_us[what], (5, 50, 95))
        yield Row(
            what=f"CPU time of one {what}",
            measured=f"{median:.1f} us",
            spread=f"{low:.1f} .. {high:.1f} (5th to 95th percentile)",
            goal=f"<= {goal_us} us",
            met=bool(median <= goal_us),
        )


def _microseconds(body: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    body()
    return (time.thread_time_ns() - began) / 1e3


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / max(whole, 1):.0%})"

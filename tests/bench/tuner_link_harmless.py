"""The tuner where little is to be had: a faster link. What it leaves must not be slower."""

from __future__ import annotations

from collections.abc import Iterator

from options import Options
from table import Row
from tuner_link import TUNED, tuned
from tuner_link_found import short
from tuner_link_hosts import missing
from tuner_link_space import START

RATES = {"1 Gbit/s": "1gbit", "not throttled": None}
SECONDS = 100
LEAST = 0.99


def bench(options: Options) -> Iterator[Row]:
    """Yield what is left of the start's throughput, with everything allowed."""
    reason = missing()
    if reason is not None:
        print(f"no link: {reason}")
        return
    widest = TUNED[-1]
    for told, rate in RATES.items():
        run = tuned(widest, rate, {}, options, seconds=SECONDS, rounds=6, steps=6)
        ratios = run.ratios("start")
        unchanged = all(run.found[knob] == value for knob, value in START.items())
        ratio = run.ratio("start")
        yield Row(
            what=f"{widest.name}, {told}: throughput after / before",
            measured=f"{ratio:.3f}" + (", nothing changed" if unchanged else ""),
            spread=f"{min(ratios):.2f} to {max(ratios):.2f}; {short(run.found)}",
            goal=f">= {LEAST}",
            met=unchanged or ratio >= LEAST,
        )
        yield Row(
            what=f"{widest.name}, {told}: cost of exploring",
            measured=f"{run.exploration_seconds:.1f} s of {run.all_seconds:.0f}",
            spread=f"steps made / at the start's pace: {run.ratio_with_exploration:.2f}",
        )

"""Builds series as Prometheus would have scraped them from a run, in promtool's notation.

A stretch is (minutes, value): a counter grows by that value per second, a gauge stands at it.
"""

from __future__ import annotations

from collections.abc import Iterator

# Prometheus 2 counts a sample on the early edge of a window, 3 does not. So scrapes keep out of
# step with evaluations, and figures over what is recorded are such that 20 and 21 samples agree.
SCRAPE_SECONDS = 7
GONE = None  # the scrape failed, or no longer had the value

SCRAPE = SCRAPE_SECONDS / 60  # a stretch with one scrape

Series = dict[str, str]
Stretch = tuple[float, float | None]

# Seconds of a second's training, by phase.
USUAL_PHASES = {"data": 0.02, "forward": 0.3, "backward": 0.6, "optimizer": 0.05, "other": 0.03}


def gauge(*stretches: Stretch, every: float = SCRAPE_SECONDS) -> str:
    """Return the values of a gauge, scraped each `every` seconds."""
    values: list[str] = []
    for value, _ in _scrapes(stretches, every):
        stale = value is GONE and values and values[-1] not in ("stale", "_")
        values.append("stale" if stale else "_" if value is GONE else f"{value:g}")
    return " ".join(values)


def counter(*stretches: Stretch, every: float = SCRAPE_SECONDS) -> str:
    """Return the values of a counter, which starts again at 0 after a gap."""
    values: list[str] = []
    total = 0.0
    for growth, seconds in _scrapes(stretches, every):
        if growth is GONE:
            values.append("stale" if values and values[-1] not in ("stale", "_") else "_")
            total = 0.0
        else:
            total += growth * seconds
            values.append(f"{total:.10g}")
    return " ".join(values)


def _scrapes(stretches: tuple[Stretch, ...], every: float) -> Iterator[tuple[float | None, float]]:
    """Yield the value of each scrape, and the seconds since the scrape before."""
    begun, moment = 0.0, 0.0
    for minutes, value in stretches:
        while moment < begun + 60 * minutes:
            yield value, every if moment else 0
            moment += every
        begun += 60 * minutes


def of_rank(rank: int, metric: str, values: str, **labels: str) -> Series:
    """Return the series of one rank, with the labels that Prometheus adds."""
    known = {
        "job": "zerowatch",
        "instance": f"10.0.0.{rank}:9464",
        "run": "night-7",
        "node": f"node-{rank}",
        "rank": str(rank),
        **labels,
    }
    matchers = ", ".join(f'{name}="{value}"' for name, value in known.items())
    return {f"{metric}{{{matchers}}}": values}


def of_both(metric: str, values: str, **labels: str) -> Series:
    """Return the same series for ranks 0 and 1."""
    return of_rank(0, metric, values, **labels) | of_rank(1, metric, values, **labels)


def answers(*stretches: Stretch, rank: int, every: float = SCRAPE_SECONDS) -> Series:
    """Return the series `up` of a rank, which is 0 where `values` is GONE."""
    reached = tuple((minutes, 0 if value is GONE else 1) for minutes, value in stretches)
    return of_rank(rank, "up", gauge(*reached, every=every))


def training(minutes: float) -> Series:
    """Return the series of two healthy ranks that take two steps per second."""
    series: Series = {}
    for rank in (0, 1):
        series |= training_rank(rank, (minutes, 1))
    return series


def training_rank(rank: int, *stretches: Stretch, every: float = SCRAPE_SECONDS) -> Series:
    """Return the series of one rank: 1 means it trains, 0 that it ended, GONE that it is down."""

    def paced(per_second: float) -> str:
        growths = ((m, v if v is GONE else v * per_second) for m, v in stretches)
        return counter(*growths, every=every)

    def standing(value: float) -> str:
        return gauge(*((m, v if v is GONE else value) for m, v in stretches), every=every)

    series = answers(*stretches, rank=rank, every=every)
    series |= of_rank(rank, "zerowatch_run_active", gauge(*stretches, every=every))
    series |= of_rank(rank, "zerowatch_world_size", standing(2))
    series |= of_rank(rank, "zerowatch_hang_active", standing(0))
    series |= of_rank(rank, "zerowatch_steps_total", paced(2))
    series |= of_rank(rank, "zerowatch_last_activity_timestamp_seconds", paced(1))
    series |= of_rank(rank, "zerowatch_nonfinite_losses_total", paced(0))
    series |= of_rank(rank, "zerowatch_collective_mismatches_total", paced(0))
    series |= of_rank(rank, "zerowatch_comm_exposed_seconds_total", paced(0.05), group="dp")
    for phase, seconds in USUAL_PHASES.items():
        series |= of_rank(rank, "zerowatch_phase_seconds_total", paced(seconds), phase=phase)
    return series

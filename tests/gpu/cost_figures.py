"""The figures of `cost_job.py` that tests of cost record."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from bench.confidence_intervals import ratio_interval
from gpu import probes

# Steps of some ten milliseconds wait for Python. Above this ratio something has gone wrong.
MAX_SHORT_STEP_RATIO = 1.05

Record = Callable[[str, object], None]


def record_times(found: Mapping[str, Any], record_property: Record) -> float:
    """Record what is known of step times and our CPU time; return monitored over unmonitored."""
    plain = [each["seconds"] for each in found["plain"]]
    monitored = [each["seconds"] for each in found["monitored"]]
    step = ratio_interval(probes.ratios_to_neighbours(plain, monitored, plain[1:]))
    floor = ratio_interval(probes.ratios_to_neighbours(plain, plain[1:], plain[2:]))
    record_property("parameters", found["parameters"])
    record_property("step seconds", {"plain": plain, "monitored": monitored})
    record_property("monitored / plain", [step.estimate, step.low, step.high])
    record_property("plain / plain", [floor.estimate, floor.low, floor.high])
    rates = sorted({name for each in found["monitored"] for name in each if name.endswith("ms/s")})
    for name in rates:
        # Our own clock is read once a second, so only the mean of all blocks says something.
        used = statistics.fmean(each.get(name, 0.0) for each in found["monitored"])
        record_property(name, used)
    record_property("hooks: calls, us of CPU and of wall time per step", found["hooks"])
    return step.estimate

"""Names the values of a step record and of the metrics, as a sink gets them.

The name of a value is its path in a line of the run log, such as
`zerowatch/phase_seconds/forward`. A metric is `zerowatch/metrics/`, its name without the prefix of
all metrics, and its label values, such as `zerowatch/metrics/comm_cause_seconds_total/latency`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from ...metrics.catalog.spec import PREFIX
from ...metrics.recorder import Snapshot
from ...metrics.step_record import StepRecord

ROOT = "zerowatch"
STEP = f"{ROOT}/step"
# Not a value of its own: sinks get the time of the record with the values.
_LEFT_OUT = "ended_at_unix_seconds"


def step_values(record: StepRecord) -> dict[str, float]:
    """Return the values of a step by name. An unknown or non-finite value is absent.

    Examples:
        >>> step_values(record)["zerowatch/phase_seconds/forward"]
        0.031
    """
    fields = {name: value for name, value in asdict(record).items() if name != _LEFT_OUT}
    return dict(_numbers(ROOT, fields))


def metric_values(snapshot: Snapshot) -> dict[str, float]:
    """Return the values of the metrics by name; of a histogram its sum and its count."""
    found = {
        _metric_name(spec.name, labels): value
        for spec, series in snapshot.values.items()
        if spec.kind != "info"
        for labels, value in series.items()
    }
    for spec, distributions in snapshot.distributions.items():
        for labels, seen in distributions.items():
            name = _metric_name(spec.name, labels)
            found |= {f"{name}/sum": seen.sum, f"{name}/count": float(seen.count)}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _metric_name(name: str, labels: tuple[str, ...]) -> str:
    return "/".join((ROOT, "metrics", name.removeprefix(PREFIX), *filter(None, labels)))


def _numbers(path: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(f"{path}/{name}", inner)
    elif isinstance(value, int | float) and math.isfinite(value):  # bool is an int
        yield path, float(value)

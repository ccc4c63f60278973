"""The series that a rank has in three kinds of jobs.

Each operation is assumed on each group in each phase, which no job reaches: the numbers of series
are upper limits. Only series of metrics of the catalog exist here, and only those that a healthy
rank has: no leak, no XID error, no end of the run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zerowatch.metrics.catalog import (
    CATALOG,
    across_ranks,
    devices,
    memory,
    overhead,
    training,
    tuner,
    window,
)
from zerowatch.metrics.catalog.spec import Label, MetricSpec

_OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
GPU, HOST = "cuda:0", "cpu"
# About the whole run, so only rank 0 has them.
ON_RANK_ZERO = (
    *tuner.METRICS,
    *window.ON_RANK_ZERO,
    *across_ranks.METRICS,
    training.LAST_CHECKPOINT_BYTES,
)
# Absent in a healthy run that keeps the thresholds and does not compress.
_ABSENT = (
    memory.MEMORY_LEAK,
    overhead.HOOK_FAILURES,
    devices.DEVICE_XID_ERRORS,
    training.RUN_END_INFO,
    training.ALERT_THRESHOLD,
    window.COMPRESSION_ERROR,
)
_USUAL_VALUES = {
    "device": (GPU,),
    "knob": ("reduce_bucket_size", "overlap_comm"),
    "exporter": ("prometheus",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProfile:
    """A kind of job: its name, and the values of labels that depend on it."""

    name: str
    values: Mapping[str, tuple[str, ...]]

    def series(self, *, on_rank_zero: bool) -> Iterator[tuple[MetricSpec, tuple[str, ...]]]:
        """Yield each series of a rank: its metric and label values."""
        for spec in CATALOG:
            if spec not in _ABSENT and (on_rank_zero or spec not in ON_RANK_ZERO):
                for labels in itertools.product(*(self._values(label) for label in spec.labels)):
                    if HOST not in labels or not _is_of_gpus(spec):
                        yield spec, labels

    def _values(self, label: Label) -> tuple[str, ...]:
        known = {**_USUAL_VALUES, **self.values}
        return known.get(label.name) or label.values or (f"some-{label.name}",)


def _is_of_gpus(spec: MetricSpec) -> bool:
    of_any_device = (devices.DEVICE_UTILIZATION, devices.DEVICE_SECONDS)
    return spec in devices.METRICS and spec not in of_any_device


DATA_PARALLEL = JobProfile(name="data parallel", values={"op": _OPS, "group": ("dp", "world")})
THREE_D_PARALLEL = JobProfile(
    name="3D parallel with offload",
    values={
        "op": (*_OPS, "send", "recv"),
        "group": ("dp", "tp", "pp", "world"),
        "device": (GPU, HOST),
    },
)
MIXTURE_OF_EXPERTS = JobProfile(
    name="mixture of experts",
    values={
        "op": (*_OPS, "send", "recv", "all_to_all"),
        "group": ("dp", "tp", "pp", "ep", "sp", "world"),
        "device": (GPU, HOST),
    },
)
PROFILES = (DATA_PARALLEL, THREE_D_PARALLEL, MIXTURE_OF_EXPERTS)

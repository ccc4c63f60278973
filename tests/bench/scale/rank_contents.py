"""Recorder contents of the ranks of a large GPU job, renewed every scrape interval."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from bench.monitoring_cost.scrape_cost_job import label_values

from zerowatch.metrics.catalog import (
    CATALOG,
    communication,
    memory,
    overhead,
    training,
    tuner,
    window,
)
from zerowatch.metrics.catalog.spec import MetricSpec
from zerowatch.metrics.exporters.prometheus import exposition
from zerowatch.metrics.recorder import Recorder

INTERVAL_SECONDS = 15
STEP_SECONDS = 2.5
ANY_RANK = 999_999_999  # the placeholder in a text for the rank that it will be served as
_RANK = f'rank="{ANY_RANK}"'.encode()

# Nothing of this happens in a healthy run.
_NEVER = {
    training.SKIPPED_STEPS,
    training.NONFINITE_LOSSES,
    communication.COLLECTIVE_MISMATCHES,
    communication.EXCHANGE_FAILURES,
    communication.HANGS,
    memory.ALLOC_RETRIES,
    memory.OOMS,
    overhead.HOOK_FAILURES,
    overhead.DROPPED_RECORDS,
    overhead.EXPORTER_FAILURES,
}
_ABSENT = {memory.MEMORY_LEAK}  # as long as nothing leaks
_ON_RANK_ZERO = (*tuner.METRICS, *window.ON_RANK_ZERO)
_PHASE_SHARES = {"data": 0.03, "forward": 0.3, "backward": 0.6, "optimizer": 0.05}
_PER_SECOND = {
    training.STEPS: 1 / STEP_SECONDS,
    training.SAMPLES: 8 / STEP_SECONDS,
    training.TOKENS: 32_768 / STEP_SECONDS,
    training.FLOPS: 4e14,
    communication.COMM_EXPOSED_SECONDS: 0.04,
    communication.COMM_CAUSE_SECONDS: 0.02,
    overhead.WATCH_SECONDS: 0.0005,
}
_LEVELS = {
    training.RUN_ACTIVE: 1.0,
    training.LOSS_SCALE: 65536.0,
    communication.COMM_COVERAGE_RATIO: 1.0,
    communication.STRAGGLER_SCORE: 0.0,
    memory.OOM_RISK: 0.01,
    memory.OOM_NEXT_BATCH_RISK: 0.01,
    memory.OOM_ETA_STEPS: math.inf,
}
_BY_UNIT = (("_bytes", 3e10), ("_ratio", 0.8), ("_seconds", 0.01), ("_per_second", 2e10))


class Contents:
    """Generated values of the recorder of one kind of ranks.

    Args:
        seed: Random seed; other contents have another one.
        on_rank_zero: Whether this is rank 0.
        began: Unix time of the run's start.
    """

    def __init__(self, seed: int, *, on_rank_zero: bool, began: float) -> None:
        self._random = random.Random(seed)
        self._recorder = Recorder()
        self._series = list(_series(on_rank_zero))
        self._now = began
        for spec, labels in self._series:
            if spec.kind == "histogram":
                for bound in spec.buckets:
                    self._recorder.observe(spec, bound, *labels)

    def advance(self) -> None:
        """Advance by one scrape interval of training."""
        self._now += INTERVAL_SECONDS
        for spec, labels in self._series:
            if spec.kind == "counter":
                self._recorder.add(spec, self._growth(spec, labels), *labels)
            elif spec.kind == "gauge":
                self._recorder.set(spec, self._level(spec, labels), *labels)
            elif spec.kind == "info":
                self._recorder.set_info(spec, *labels)
            else:
                self._observe(spec, labels)

    def text(self, accept: str) -> tuple[str, bytes]:
        """Return content type and text; `as_rank` makes it a rank's."""
        return exposition(self._recorder.snapshot(), ANY_RANK, accept)

    def _growth(self, spec: MetricSpec, labels: tuple[str, ...]) -> float:
        if spec in _NEVER:
            return 0.0
        if spec is training.PHASE_SECONDS:
            return INTERVAL_SECONDS * _PHASE_SHARES.get(labels[0], 0.01)
        usual = 1e9 if "_bytes" in spec.name else 0.05 if "_seconds" in spec.name else 2.0
        return INTERVAL_SECONDS * _PER_SECOND.get(spec, usual) * self._random.uniform(0.9, 1.1)

    def _level(self, spec: MetricSpec, labels: tuple[str, ...]) -> float:
        if spec is tuner.TUNER_STATE:
            return float(labels[0] == "frozen")
        if spec.name.endswith("_timestamp_seconds"):
            return self._now
        if spec in _LEVELS:
            return _LEVELS[spec]
        usual = next((level for unit, level in _BY_UNIT if spec.name.endswith(unit)), 100.0)
        return usual * self._random.uniform(0.95, 1.05)

    def _observe(self, spec: MetricSpec, labels: tuple[str, ...]) -> None:
        for _ in range(round(INTERVAL_SECONDS / STEP_SECONDS)):
            middle = STEP_SECONDS if spec is training.STEP_DURATION else 0.01
            self._recorder.observe(spec, middle * self._random.lognormvariate(0, 0.3), *labels)


def as_rank(text: bytes, rank: int) -> bytes:
    return text.replace(_RANK, b'rank="%d"' % rank)


def _series(on_rank_zero: bool) -> Iterator[tuple[MetricSpec, tuple[str, ...]]]:
    for spec in CATALOG:
        if spec not in _ABSENT and (on_rank_zero or spec not in _ON_RANK_ZERO):
            yield from ((spec, labels) for labels in label_values(spec))

"""Recorder contents of the ranks of a large GPU job, renewed every scrape interval."""

from __future__ import annotations

import math
import random

from bench.scale.job_profiles import JobProfile

from zerowatch.metrics.catalog import (
    across_ranks,
    communication,
    devices,
    memory,
    overhead,
    training,
    tuner,
    window,
)
from zerowatch.metrics.catalog.spec import MetricSpec
from zerowatch.metrics.exporters.detail import served
from zerowatch.metrics.exporters.prometheus import exposition
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import Detail

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
    devices.DEVICE_THROTTLED_SECONDS,
    devices.DEVICE_ECC_ERRORS,
    devices.DEVICE_LINK_ERRORS,
    overhead.DROPPED_RECORDS,
    overhead.EXPORTER_FAILURES,
    window.WINDOW_REPLAYS,
    window.REPLAY_SECONDS,
    window.RESTARTS,
}
_PHASE_SHARES = {"data": 0.03, "forward": 0.3, "backward": 0.6, "optimizer": 0.05}
_PER_SECOND = {
    training.STEPS: 1 / STEP_SECONDS,
    training.SAMPLES: 8 / STEP_SECONDS,
    training.TOKENS: 32_768 / STEP_SECONDS,
    training.FLOPS: 4e14,
    training.PRODUCTIVE_SECONDS: 0.97,
    training.CHECKPOINTS: 1 / 1800,
    training.CHECKPOINT_SECONDS: 0.01,
    communication.COMM_EXPOSED_SECONDS: 0.04,
    communication.COMM_CAUSE_SECONDS: 0.02,
    overhead.WATCH_SECONDS: 0.0005,
}
_LEVELS = {
    training.RUN_ACTIVE: 1.0,
    training.RUN_ATTEMPT: 0.0,
    training.LOSS_SCALE: 65536.0,
    training.MFU: 0.45,
    communication.COMM_COVERAGE_RATIO: 1.0,
    communication.STRAGGLER_SCORE: 0.0,
    communication.HANG_ACTIVE: 0.0,
    memory.MEMORY_LIMIT: 8e10,
    memory.OOM_RISK: 0.01,
    memory.OOM_NEXT_BATCH_RISK: 0.01,
    memory.OOM_ETA_STEPS: math.inf,
    devices.DEVICE_TEMPERATURE: 60.0,
    devices.DEVICE_TEMPERATURE_LIMIT: 90.0,
    devices.DEVICE_REMAPPED_ROWS: 0.0,
    devices.DEVICE_ROW_REMAP: 0.0,
    devices.DEVICE_LOST: 0.0,
    overhead.DEAD_THREADS: 0.0,
    across_ranks.RANKS_EXPOSED_COMM_RATIO: 0.04,
    across_ranks.RANKS_OOM_RISK: 0.01,
}
_BY_UNIT = (("_bytes", 3e10), ("_ratio", 0.8), ("_seconds", 0.01), ("_per_second", 2e10))


class Contents:
    """Generated values of the recorder of one kind of ranks.

    Args:
        seed: Random seed; other contents have another one.
        profile: The kind of job.
        detail: What is served of it.
        ranks: Number of ranks of the run.
        on_rank_zero: Whether this is rank 0.
        began: Unix time of the run's start.
    """

    def __init__(
        self,
        seed: int,
        profile: JobProfile,
        detail: Detail,
        *,
        ranks: int,
        on_rank_zero: bool,
        began: float,
    ) -> None:
        self._random = random.Random(seed)
        self._recorder = Recorder()
        self._series = list(profile.series(on_rank_zero=on_rank_zero))
        self._detail: Detail = detail
        self._fixed = {
            training.WORLD_SIZE: float(ranks),
            training.RUN_START_TIMESTAMP: began,
            across_ranks.RANKS_REPORTING: float(ranks),
            **_LEVELS,
        }
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
            elif spec.kind in ("gauge", "summary"):
                self._recorder.set(spec, self._level(spec, labels), *labels)
            elif spec.kind == "info":
                self._recorder.set_info(spec, *labels)
            else:
                self._observe(spec, labels)

    def text(self, accept: str) -> tuple[str, bytes]:
        """Return content type and text; `as_rank` makes it a rank's."""
        snapshot = served(self._recorder.snapshot(), self._detail)
        return exposition(snapshot, ANY_RANK, accept, with_process=self._detail == "full")

    def _growth(self, spec: MetricSpec, labels: tuple[str, ...]) -> float:
        if spec in _NEVER or "failed" in labels:
            return 0.0
        if spec is training.PHASE_SECONDS:
            return INTERVAL_SECONDS * _PHASE_SHARES.get(labels[0], 0.01)
        usual = 1e9 if "_bytes" in spec.name else 0.05 if "_seconds" in spec.name else 2.0
        return INTERVAL_SECONDS * _PER_SECOND.get(spec, usual) * self._random.uniform(0.9, 1.1)

    def _level(self, spec: MetricSpec, labels: tuple[str, ...]) -> float:
        if spec is tuner.TUNER_STATE:
            return float(labels[0] == "frozen")
        if spec in self._fixed:
            return self._fixed[spec]
        if spec.name.endswith("_timestamp_seconds"):
            return self._now
        if spec is training.STEP_DURATION_QUANTILE:
            return STEP_SECONDS * (1 + float(labels[0]) / 10) * self._random.uniform(0.98, 1.02)
        usual = next((level for unit, level in _BY_UNIT if spec.name.endswith(unit)), 100.0)
        return usual * self._random.uniform(0.95, 1.05)

    def _observe(self, spec: MetricSpec, labels: tuple[str, ...]) -> None:
        for _ in range(round(INTERVAL_SECONDS / STEP_SECONDS)):
            middle = STEP_SECONDS if spec is training.STEP_DURATION else 0.01
            self._recorder.observe(spec, middle * self._random.lognormvariate(0, 0.3), *labels)


def as_rank(text: bytes, rank: int) -> bytes:
    return text.replace(_RANK, b'rank="%d"' % rank)


def series_names(profile: JobProfile, detail: Detail, *, on_rank_zero: bool) -> list[str]:
    """Return the name of each series that a rank serves in a kind of job."""
    contents = Contents(0, profile, detail, ranks=1, on_rank_zero=on_rank_zero, began=0.0)
    contents.advance()
    lines = contents.text("")[1].decode().splitlines()
    return [line.partition("{")[0] for line in lines if not line.startswith("#")]

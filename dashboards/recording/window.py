"""Micro-batches, batch shares, compression error and the cost of replayed windows."""

from __future__ import annotations

from ...metrics.catalog import training, window
from ..promql import by, rate, ratio
from .rule import TRAINING_PHASES, RecordingRule, aggregated, recorded


def _share_of_first_rank(operation: str, *, long: bool) -> RecordingRule:
    """Divide by the training time of rank 0, the only rank that exports the time of replays."""

    def expression(time_range: str) -> str:
        whole = rate(training.PHASE_SECONDS, time_range, TRAINING_PHASES, 'rank="0"')
        return ratio(by("sum", rate(window.REPLAY_SECONDS, time_range)), by("sum", whole))

    return recorded(
        window.REPLAY_SECONDS,
        operation,
        lambda timing: expression(timing.long if long else timing.short),
    )


MICRO_BATCH_SAMPLES = aggregated(window.MICRO_BATCH_SAMPLES, "max")
LARGEST_SHARE = aggregated(window.BATCH_SHARE, "max")
SMALLEST_SHARE = aggregated(window.BATCH_SHARE, "min")
EVEN_SHARE = aggregated(window.BATCH_SHARE, "avg")
COMPRESSION_ERROR = aggregated(window.COMPRESSION_ERROR, "max", "codec")
REPLAY_RATIO = _share_of_first_rank("ratio_rate5m", long=False)
REPLAY_RATIO_LONG = _share_of_first_rank("ratio_rate30m", long=True)

RULES = (
    MICRO_BATCH_SAMPLES,
    LARGEST_SHARE,
    SMALLEST_SHARE,
    EVEN_SHARE,
    COMPRESSION_ERROR,
    REPLAY_RATIO,
    REPLAY_RATIO_LONG,
)

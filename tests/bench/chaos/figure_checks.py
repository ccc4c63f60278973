"""Checks the answers of /metrics: no value is NaN, and no counter falls within a process."""

from __future__ import annotations

import math

from prometheus_client.openmetrics.parser import text_string_to_metric_families

RISING_TYPES = ("counter", "histogram", "summary")
RISING_SUFFIXES = ("_total", "_count", "_sum", "_bucket")


class FigureChecks:
    """Compares each answer with the last one of the same process.

    Attributes:
        wrong: What was wrong so far.
    """

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self._last: dict[tuple[int, str], float] = {}

    def add(self, rank: int, pid: int, text: str) -> None:
        """Check the answer of a rank's process."""
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if math.isnan(sample.value):
                    self._note(f"rank {rank}: {sample.name} is NaN")
                if family.type in RISING_TYPES and sample.name.endswith(RISING_SUFFIXES):
                    series = pid, f"{sample.name}{sorted(sample.labels.items())}"
                    if sample.value < self._last.get(series, -math.inf):
                        self._note(f"rank {rank}: {sample.name} fell")
                    self._last[series] = sample.value

    def _note(self, text: str) -> None:
        if text not in self.wrong:
            self.wrong.append(text)

"""Publishes minimum, median and maximum over ranks of what each rank reports, on rank 0."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

from ...metrics.catalog.across_ranks import RANKS_EXTREME, RANKS_REPORTING, STATISTICS
from ...metrics.catalog.spec import MetricSpec
from ...metrics.recorder import Recorder
from ..common.gil_pauses import let_training_run
from .rank_figures import Figures


class RankStatistics:
    """Publishes the statistics over ranks. A figure that no rank has is not served.

    Attributes:
        figures: The last figures by rank.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.figures: Mapping[int, Figures] = {}
        self._recorder = recorder

    def publish(self, figures: Mapping[int, Figures]) -> None:
        """Publish the statistics over some ranks.

        Args:
            figures: The figures by rank. Ranks that are not in it are left out.
        """
        self.figures = figures
        ranks = sorted(figures)
        columns = zip(*(figures[rank].tolist() for rank in ranks), strict=True)
        # By rank, without the ranks that do not know the figure. Plain Python is faster than numpy
        # for a few ranks, and fast enough for a thousand.
        known: list[dict[int, float]] = []
        for column in columns if ranks else [()] * len(STATISTICS):
            by_rank = zip(ranks, column, strict=True)
            known.append({rank: value for rank, value in by_rank if not math.isnan(value)})
            let_training_run()
        with self._recorder.commit():
            for (figure, spec), values in zip(STATISTICS.items(), known, strict=False):
                self._recorder.set(RANKS_REPORTING, len(values), figure)
                self._publish_figure(figure, spec, values)

    def _publish_figure(self, figure: str, spec: MetricSpec, values: Mapping[int, float]) -> None:
        if not values:
            for stat in ("min", "median", "max"):
                self._recorder.remove(spec, stat)
                self._recorder.remove(RANKS_EXTREME, figure, stat)
            return
        self._recorder.set(spec, median(values.values()), "median")
        for stat, choose in (("min", min), ("max", max)):
            rank = choose(values, key=values.__getitem__)
            self._recorder.set(spec, values[rank], stat)
            self._recorder.set(RANKS_EXTREME, rank, figure, stat)

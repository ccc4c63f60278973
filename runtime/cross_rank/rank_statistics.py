"""Publishes minimum, median and maximum over ranks of what each rank reports, on rank 0."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ...metrics.catalog.across_ranks import RANKS_EXTREME, RANKS_REPORTING, STATISTICS
from ...metrics.catalog.spec import MetricSpec
from ...metrics.recorder import Recorder
from .rank_figures import NUM_FIGURES, Figures


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
        ranks = np.array(sorted(figures), np.int64)
        rows = [figures[rank] for rank in ranks.tolist()]
        columns = np.array(rows, np.float64).reshape(-1, NUM_FIGURES).T
        with self._recorder.commit():
            statistics = columns[: len(STATISTICS)]
            for (figure, spec), column in zip(STATISTICS.items(), statistics, strict=True):
                is_known = ~np.isnan(column)
                self._recorder.set(RANKS_REPORTING, int(is_known.sum()), figure)
                self._publish_figure(figure, spec, ranks[is_known], column[is_known])

    def _publish_figure(
        self,
        figure: str,
        spec: MetricSpec,
        ranks: npt.NDArray[np.int64],
        values: npt.NDArray[np.float64],
    ) -> None:
        if not len(values):
            for stat in ("min", "median", "max"):
                self._recorder.remove(spec, stat)
                self._recorder.remove(RANKS_EXTREME, figure, stat)
            return
        self._recorder.set(spec, float(np.median(values)), "median")
        for stat, row in (("min", values.argmin()), ("max", values.argmax())):
            self._recorder.set(spec, float(values[row]), stat)
            self._recorder.set(RANKS_EXTREME, int(ranks[row]), figure, stat)

"""Panels of minimum, median and maximum over all ranks, which rank 0 serves.

Their queries read a few series for any number of ranks.
"""

from __future__ import annotations

from ...metrics.catalog import across_ranks
from ..grafana.panels import CELSIUS, COUNT, PLAIN, RATIO, SECONDS, Column, Query, Table, TimeSeries
from ..promql import by
from .queries import of_first_rank
from .shared_panels import sized

COLORS = {"min": "blue", "median": "text", "max": "orange"}
# By figure: the title, what to conclude from a wide spread, and the unit.
_PANELS = {
    "step_duration": ("step time", "A rank that is slow on its own shows in **data**.", SECONDS),
    "exposed_comm": (
        "exposed communication",
        "Ranks that wait for others have more of it than the rank that they wait for.",
        RATIO,
    ),
    "comm_wait": (
        "waiting in collectives",
        "The rank with the minimum is the one that the others wait for.",
        RATIO,
    ),
    "data": ("waiting for data", "Check the disk of a rank far above the median.", RATIO),
    "memory_peak": (
        "memory peak over limit",
        "Ranks with longer samples or an uneven partition are above the median.",
        RATIO,
    ),
    "oom_risk": ("out-of-memory risk", "The dashboard Memory shows what fills memory.", RATIO),
    "device_utilization": (
        "utilization",
        "A device that works less than the others waits for them, or has less to do.",
        RATIO,
    ),
    "device_temperature": (
        "temperature",
        "One hot device may be lowering its clock: see the dashboard Devices.",
        CELSIUS,
    ),
    "mfu": ("model FLOPs utilization", "It differs if ranks have different work.", RATIO),
    "samples_per_second": (
        "samples per second",
        "It differs if ranks have different shares of the batch.",
        COUNT,
    ),
}

SPREAD = (
    *(
        panel
        for figure, (what, conclusion, unit) in _PANELS.items()
        for panel in sized(
            6,
            7,
            TimeSeries(
                title=f"Spread of {what}",
                description=f"Minimum, median and maximum over all ranks. {conclusion} The table "
                "of extreme ranks names the ranks.",
                queries=(Query(of_first_rank(across_ranks.STATISTICS[figure]), "{{stat}}"),),
                unit=unit,
                minimum=0,
                colors=COLORS,
            ),
        )
    ),
    Table(
        title="Extreme ranks",
        description="The rank that has the minimum and the one that has the maximum of each "
        "figure now, and the number of ranks of which the figure is known. Ranks that have not "
        "reported for 20 seconds are left out.",
        labels={"figure": "Figure"},
        columns=(
            Column(
                title="Minimum on rank",
                expression=by(
                    "max", of_first_rank(across_ranks.RANKS_EXTREME, 'stat="min"'), "figure"
                ),
                unit=PLAIN,
            ),
            Column(
                title="Maximum on rank",
                expression=by(
                    "max", of_first_rank(across_ranks.RANKS_EXTREME, 'stat="max"'), "figure"
                ),
                unit=PLAIN,
            ),
            Column(
                title="Ranks",
                expression=by("max", of_first_rank(across_ranks.RANKS_REPORTING), "figure"),
                unit=PLAIN,
            ),
        ),
        width=12,
        height=7,
    ),
)

"""What can be chosen at the top of every dashboard: data source, job, run and ranks."""

from __future__ import annotations

from typing import Any

from grafanalib import core as grafanalib

from ...metrics.catalog.training import RUN_ACTIVE
from ..promql import select
from .clean import STALE_OF_VARIABLE, Json, cleaned
from .target import PROMETHEUS

# Grafana's numbers.
_SORTED, _NEWEST_FIRST, _BY_NUMBER = 1, 2, 3
_ON_TIME_RANGE_CHANGE = 2  # runs and ranks come and go
_LABEL_VALUES = 1
# What all ranks are: `.*` keeps queries short where Grafana would name a thousand of them.
_ALL_RANKS = ".*"


def variables() -> list[Json]:
    """Return the variables in the order in which one depends on the other.

    Runs are named by the time they began, so the last by name is the newest, and the one shown.
    """
    job, run = 'job=~"$job"', 'run=~"$run"'
    return [
        _data_source(),
        _label("job", "Job", select(RUN_ACTIVE), sort=_SORTED),
        _label("run", "Run", select(RUN_ACTIVE, job), sort=_NEWEST_FIRST),
        _label(
            "rank",
            "Rank",
            select(RUN_ACTIVE, job, run),
            sort=_BY_NUMBER,
            multi=True,
            includeAll=True,
            allValue=_ALL_RANKS,
        ),
    ]


def _data_source() -> Json:
    made = grafanalib.Template(
        name="datasource", label="Data source", type="datasource", query="prometheus", regex=""
    )
    return cleaned(made, STALE_OF_VARIABLE)


def _label(name: str, title: str, of: str, **more: Any) -> Json:
    """Offer the values that a label has in a metric's series."""
    query = f"label_values({of}, {name})"
    made = grafanalib.Template(
        name=name,
        label=title,
        query=query,
        dataSource=PROMETHEUS,
        refresh=_ON_TIME_RANGE_CHANGE,
        regex="",
        **more,
    )
    json = cleaned(made, STALE_OF_VARIABLE)
    json["definition"] = query
    json["query"] = {"qryType": _LABEL_VALUES, "query": query, "refId": f"variable-{name}"}
    if more.get("includeAll"):
        json["current"] = {"selected": True, "text": ["All"], "value": ["$__all"]}
    return json

"""Where a panel's values come from."""

from __future__ import annotations

import string
from typing import Any

from grafanalib import core as grafanalib

from .clean import STALE_OF_TARGET, Json, cleaned
from .style import Query

PROMETHEUS = {"type": "prometheus", "uid": "${datasource}"}
_FORMATS = {"series": "time_series", "now": "time_series", "buckets": "heatmap", "table": "table"}


def target(query: Query, index: int) -> Json:
    """Return a query's JSON; the first of a panel is A, the next B and so on."""
    return _target(
        query.expression,
        index,
        shape=query.shape,
        legendFormat=query.legend,
        exemplar=query.exemplars or None,
    )


def table_target(expression: str, index: int) -> Json:
    """Return the JSON of a query whose values now become a table's column."""
    return _target(expression, index, shape="table", legendFormat="__auto")


def letter(index: int) -> str:
    """Name a panel's query."""
    return string.ascii_uppercase[index]


def _target(expression: str, index: int, *, shape: str, **more: Any) -> Json:
    is_instant = shape in {"now", "table"}
    made = grafanalib.Target(
        expr=expression,
        refId=letter(index),
        format=_FORMATS[shape],
        instant=is_instant,
        legendFormat=more["legendFormat"],
        datasource=PROMETHEUS,
    )
    of_today = {
        "editorMode": "code",
        "exemplar": more.get("exemplar"),
        "range": not is_instant,
    }
    return cleaned({**cleaned(made, STALE_OF_TARGET), **of_today})

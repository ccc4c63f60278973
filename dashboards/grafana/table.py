"""A table of several queries: a line for each combination of labels, a column for each query."""

from __future__ import annotations

from collections.abc import Mapping

from ..promql import IDENTITY
from .clean import Json
from .field import override
from .panels import Column, Table
from .target import letter, table_target


def targets(panel: Table) -> list[Json]:
    """Return a query for each column."""
    return [table_target(column.expression, index) for index, column in enumerate(panel.columns)]


def transformations(panel: Table) -> list[Json]:
    """Merge the columns' answers by their labels, name the columns and put them in order."""
    values = _names_of_values(panel)
    titles = [column.title for column in panel.columns]
    heads = {**panel.labels, **dict(zip(values, titles, strict=True))}
    return [
        {"id": "merge", "options": {}},
        {
            "id": "organize",
            "options": {
                "excludeByName": dict.fromkeys(_hidden(heads), True),
                "indexByName": {name: index for index, name in enumerate(heads)},
                "renameByName": {name: head for name, head in heads.items() if head},
            },
        },
    ]


def order(panel: Table) -> list[Json]:
    """Return by which column the lines are sorted."""
    return [{"displayName": panel.sort_by, "desc": not panel.least_first}] if panel.sort_by else []


def overrides(panel: Table) -> list[Json]:
    """Return each column's unit and colours."""
    return [override(column.title, _look(column)) for column in panel.columns if column.title]


def _look(column: Column) -> Json:
    look: Json = {"unit": column.unit}
    if column.decimals is not None:
        look["decimals"] = column.decimals
    if column.thresholds:
        steps = [{"color": step.color, "value": step.value} for step in column.thresholds]
        look["thresholds"] = {"mode": "absolute", "steps": steps}
        look["custom.cellOptions"] = {"type": "color-text"}
    return look


def _names_of_values(panel: Table) -> list[str]:
    """Return what Grafana calls the values of each query; a lone one has no letter."""
    if len(panel.columns) == 1:
        return ["Value"]
    return [f"Value #{letter(index)}" for index in range(len(panel.columns))]


def _hidden(heads: Mapping[str, str]) -> list[str]:
    """Return the fields that are no column, such as what is the same in all lines."""
    return ["Time", *IDENTITY, *(name for name, head in heads.items() if not head)]

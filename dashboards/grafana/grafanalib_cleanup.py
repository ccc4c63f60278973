"""grafanalib's output made into what Grafana reads today.

grafanalib 0.7.1 was written for older Grafanas. What it leaves behind is not refused but changes a
dashboard silently: at most 100 points a graph, half the resolution, a reading as of Grafana 6.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

# Of grafanalib, and no longer Grafana's. maxDataPoints is, but not 100 for every panel.
STALE_OF_PANEL = (
    "cacheTimeout",
    "editable",
    "error",
    "height",
    "hideTimeOverride",
    "maxDataPoints",
    "minSpan",
    "span",
)
STALE_OF_TARGET = ("hide", "interval", "intervalFactor", "metric", "query", "step", "target")
STALE_OF_VARIABLE = (
    "auto",
    "auto_count",
    "auto_min",
    "current",  # what is chosen at first: without, Grafana takes the first it finds
    "tagsQuery",
    "tagValuesQuery",
    "useTags",
)
STALE_IN_DASHBOARD = ("__inputs", "gnetId", "hideControls", "rows", "sharedCrosshair", "style")
KEPT_WHERE_NULL = "value"  # of the lowest threshold, which Grafana wants to be null


def cleaned(grafanalib_object: Any, stale: tuple[str, ...] = ()) -> Json:
    """Return an object's JSON without nulls, and at the top without the `stale` keys."""
    json: Json = _plain(grafanalib_object)
    return {key: value for key, value in json.items() if key not in stale}


def _plain(value: Any) -> Any:
    if hasattr(value, "to_json_data"):
        return _plain(value.to_json_data())
    if isinstance(value, dict):
        return {
            key: _plain(inner)
            for key, inner in value.items()
            if inner is not None or key == KEPT_WHERE_NULL
        }
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value

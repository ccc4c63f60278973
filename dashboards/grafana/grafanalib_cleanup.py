"""Removes obsolete keys from the JSON that grafanalib generates.

grafanalib 0.7.1 was written for older versions of Grafana. Current versions accept its obsolete
keys without an error, but the dashboard changes: for example, each graph has at most 100 points.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

# Keys that current Grafana no longer uses, by the object that has them. It still uses
# maxDataPoints, but grafanalib sets it to 100 for every panel.
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
    "current",  # the initial choice; without the key, Grafana chooses the first value
    "tagsQuery",
    "tagValuesQuery",
    "useTags",
)
STALE_IN_DASHBOARD = ("__inputs", "gnetId", "hideControls", "rows", "sharedCrosshair", "style")
KEPT_WHERE_NULL = "value"  # Grafana expects null as the value of the lowest threshold


def cleaned(grafanalib_object: Any, stale: tuple[str, ...] = ()) -> Json:
    """Return a grafanalib object as JSON, without null values and obsolete keys.

    Args:
        grafanalib_object: An object of grafanalib, or its JSON.
        stale: The keys to remove at the top level.
    """
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

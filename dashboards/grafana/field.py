"""How a panel's values look, as Grafana's field configuration."""

from __future__ import annotations

from collections.abc import Iterable

from .clean import Json
from .panels import Panel
from .style import Named


def defaults(panel: Panel) -> Json:
    """Return what holds for all of a panel's values."""
    return {
        "unit": panel.unit,
        "min": panel.minimum,
        "max": panel.maximum,
        "decimals": panel.decimals,
        "noValue": panel.empty or None,
    }


def overrides_by_color(panel: Panel) -> list[Json]:
    """Return the fixed colours of series, by their legend."""
    return [
        _override(legend, {"color": {"mode": "fixed", "fixedColor": color}})
        for legend, color in sorted(panel.colors.items())
    ]


def override(name: str, properties: Json) -> Json:
    """Return what holds for the field of that name."""
    return _override(name, properties)


def _override(name: str, properties: Json) -> Json:
    return {
        "matcher": {"id": "byName", "options": name},
        "properties": [{"id": key, "value": value} for key, value in properties.items()],
    }


def value_mappings(named: Iterable[Named]) -> list[Json]:
    """Return the mapping of values to texts."""
    options = {
        str(name.value): {"text": name.text, "color": name.color, "index": index}
        for index, name in enumerate(named)
    }
    return [{"type": "value", "options": options}] if options else []

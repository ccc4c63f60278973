"""What is marked in every graph: alerts that fire, the tuner's decisions, starts of runs."""

from __future__ import annotations

from ...metrics.catalog.training import RUN_ACTIVE
from ...metrics.catalog.tuner import TUNER_DECISIONS
from ..promql import select
from .clean import Json
from .target import PROMETHEUS

_RUN = ('job=~"$job"', 'run=~"$run"')
_FIRST_RANK = (*_RUN, 'rank="0"')
_STEP = "15s"  # between two looks; Grafana takes more where a graph has fewer points

BUILT_IN: Json = {
    "builtIn": 1,
    "datasource": {"type": "grafana", "uid": "-- Grafana --"},
    "enable": True,
    "hide": True,
    "iconColor": "rgba(0, 211, 255, 1)",
    "name": "Annotations & Alerts",
    "type": "dashboard",
}


def marks() -> list[Json]:
    """Return what Grafana looks for; each can be switched off at the top of a dashboard."""
    first_rank = select(RUN_ACTIVE, *_FIRST_RANK)
    return [
        BUILT_IN,
        _annotation(
            "Alerts",
            f'ALERTS{{{", ".join(_RUN)}, alertstate="firing"}}',
            color="red",
            title="{{alertname}}",
            text="{{severity}} {{rank}}",
            tags="component,severity",
        ),
        _annotation(
            "Tuner",
            f"changes({select(TUNER_DECISIONS, *_FIRST_RANK)}[$__rate_interval]) > 0",
            color="purple",
            title="Tuner: {{verdict}}",
            text="See the dashboard Tuner for what it changed.",
            tags="verdict",
        ),
        _annotation(
            "Starts",
            f"{first_rank} == 1 unless {first_rank} offset 1m",
            color="blue",
            title="Run starts",
            text="{{run}}",
            tags="node",
        ),
    ]


def _annotation(
    name: str, expression: str, *, color: str, title: str, text: str, tags: str
) -> Json:
    return {
        "datasource": PROMETHEUS,
        "enable": True,
        "expr": expression,
        "hide": False,
        "iconColor": color,
        "name": name,
        "step": _STEP,
        "tagKeys": tags,
        "textFormat": text,
        "titleFormat": title,
    }

"""Turns the series of a promtool test into those that lean detail serves."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import zip_longest

from zerowatch.metrics.catalog import CATALOG

_BY_NAME = {spec.name: spec for spec in CATALOG}
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def lean_series(series: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """Leave out the series that lean leaves out, and add up those that it adds up."""
    kept: dict[str, str] = {}
    for each in series:
        name, _, rest = each["series"].partition("{")
        spec = _BY_NAME.get(name)
        labels = dict(_LABEL.findall(rest))
        if spec is not None:
            if spec.lean is None:
                continue
            if any(labels[label] not in values for label, values in spec.lean.only.items()):
                continue
            labels = {key: text for key, text in labels.items() if key not in spec.lean.without}
        elif name.startswith("zerowatch_") and name.endswith("_bucket"):
            continue
        matchers = ", ".join(f'{key}="{text}"' for key, text in labels.items())
        text = f"{name}{{{matchers}}}"
        kept[text] = _added(kept[text], each["values"]) if text in kept else each["values"]
    return [{"series": text, "values": values} for text, values in kept.items()]


def _added(one: str, other: str) -> str:
    """Add two rows of values; where one of them has no value, the other counts."""
    pairs = zip_longest(one.split(), other.split(), fillvalue="_")
    return " ".join(
        f"{float(a) + float(b):.10g}"
        if a not in ("_", "stale") and b not in ("_", "stale")
        else (b if a in ("_", "stale") else a)
        for a, b in pairs
    )

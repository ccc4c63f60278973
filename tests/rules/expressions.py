"""What a PromQL expression selects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser

from zerowatch.dashboards.recording import GROUPS
from zerowatch.metrics.catalog import CATALOG

# From Prometheus and from /targets: each series has them.
IDENTITY = {"job", "instance", "run", "node", "rank"}
HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")


@dataclass(frozen=True)
class Selector:
    name: str
    labels: frozenset[str]


def selectors(expression: str) -> set[Selector]:
    """Parse an expression; return what it selects."""
    return set(_selectors(promql_parser.parse(expression)))


def _selectors(node: Any) -> Iterator[Selector]:
    selector = getattr(node, "vector_selector", node)
    if isinstance(selector, promql_parser.VectorSelector):
        matchers = selector.matchers.matchers
        yield Selector(selector.name or "", frozenset(matcher.name for matcher in matchers))
        return
    children = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "param")]
    for child in (*children, *getattr(node, "args", ())):
        if child is not None:
            yield from _selectors(child)


def known_labels() -> dict[str, set[str]]:
    """Return the labels of all that may be selected, by name."""
    known = {"up": set(IDENTITY)}
    for spec in CATALOG:
        names = {*IDENTITY, *spec.label_names}
        if spec.kind == "histogram":
            known |= {spec.name + part: names for part in HISTOGRAM_PARTS}
            known[f"{spec.name}_bucket"] = {*names, "le"}
        else:
            known[spec.name] = names
    for rules in GROUPS.values():
        known |= {rule.name: {"job", *rule.labels} for rule in rules}
    return known


def unknown(expression: str) -> list[str]:
    """Say what an expression selects that does not exist."""
    known = known_labels()
    return [
        f"{one.name}: {', '.join(sorted(one.labels - known.get(one.name, set()))) or 'no metric'}"
        for one in selectors(expression)
        if one.name not in known or not one.labels <= known[one.name]
    ]

"""Checks that a PromQL expression selects only existing metrics and labels."""

from __future__ import annotations

from dataclasses import dataclass

import promql_parser
from promql_parts import TARGET_LABELS, known_series, nodes

KNOWN = {"up": TARGET_LABELS, **known_series()}


@dataclass(frozen=True)
class Selector:
    name: str
    labels: frozenset[str]


def selectors(expression: str) -> set[Selector]:
    """Return the selectors of a PromQL expression."""
    return {
        Selector(node.name or "", frozenset(matcher.name for matcher in node.matchers.matchers))
        for node in nodes(promql_parser.parse(expression))
        if isinstance(node, promql_parser.VectorSelector)
    }


def unknown(expression: str) -> list[str]:
    """Return the metrics and labels that an expression selects but that do not exist."""
    return [
        f"{one.name}: {', '.join(sorted(one.labels - KNOWN.get(one.name, set()))) or 'no metric'}"
        for one in selectors(expression)
        if one.name not in KNOWN or not one.labels <= KNOWN[one.name]
    ]

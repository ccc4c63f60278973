"""What a PromQL expression selects."""

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
    """Parse an expression; return what it selects."""
    return {
        Selector(node.name or "", frozenset(matcher.name for matcher in node.matchers.matchers))
        for node in nodes(promql_parser.parse(expression))
        if isinstance(node, promql_parser.VectorSelector)
    }


def unknown(expression: str) -> list[str]:
    """Say what an expression selects that does not exist."""
    return [
        f"{one.name}: {', '.join(sorted(one.labels - KNOWN.get(one.name, set()))) or 'no metric'}"
        for one in selectors(expression)
        if one.name not in KNOWN or not one.labels <= KNOWN[one.name]
    ]

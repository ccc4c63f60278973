"""Parses a PromQL expression: the series that it reads, and its comparisons."""

from __future__ import annotations

from collections.abc import Iterator

import promql_parser
from promql_parser import BinaryExpr, NumberLiteral, StringLiteral, VectorSelector

from zerowatch.dashboards.recording_rules import GROUPS
from zerowatch.metrics.catalog import CATALOG

# From Prometheus and from /targets: each series that is scraped has them.
TARGET_LABELS = frozenset({"job", "instance", "run", "node", "rank"})
_HISTOGRAM_PARTS = {"_bucket": {"le"}, "_sum": set(), "_count": set()}
_CHOOSING = {"==", "!=", ">", "<", ">=", "<=", "and", "or", "unless"}
_CHILDREN = ("lhs", "rhs", "expr", "param", "args", "vector_selector")


def known_series() -> dict[str, set[str]]:
    """Return the labels of all series that we make: those of the ranks, and what is recorded."""
    recorded = {rule.name: {"job", *rule.labels} for rules in GROUPS.values() for rule in rules}
    return series_of_ranks() | recorded


def series_of_ranks() -> dict[str, set[str]]:
    """Return the labels of all series that a rank serves: catalog and process."""
    served = {
        spec.name + part: {*TARGET_LABELS, *spec.label_names, *own}
        for spec in CATALOG
        for part, own in (_HISTOGRAM_PARTS if spec.kind == "histogram" else {"": set()}).items()
    }
    served["process_start_time_seconds"] = {*TARGET_LABELS}  # by prometheus_client
    return served


def selectors(expression: str) -> list[tuple[str, frozenset[str]]]:
    """Name the series that an expression reads, each with its matchers' texts."""
    return [
        (node.name or "", frozenset(str(matcher) for matcher in node.matchers.matchers))
        for node in nodes(promql_parser.parse(expression))
        if isinstance(node, VectorSelector)
    ]


def operands(expression: str) -> list[str]:
    """Return the parts that have values also where comparisons leave none of the whole."""
    return [part.prettify() for part in _operands(promql_parser.parse(expression))]


def _operands(node: promql_parser.Expr) -> Iterator[promql_parser.Expr]:
    if isinstance(node, NumberLiteral | StringLiteral):
        return
    chooses = any(isinstance(n, BinaryExpr) and str(n.op) in _CHOOSING for n in nodes(node))
    if not chooses:
        yield node
        return
    for child in children(node):
        yield from _operands(child)


def nodes(node: promql_parser.Expr) -> Iterator[promql_parser.Expr]:
    """Walk a syntax tree."""
    yield node
    for child in children(node):
        yield from nodes(child)


def children(node: promql_parser.Expr) -> Iterator[promql_parser.Expr]:
    """Yield the operands of a node of a syntax tree."""
    for name in _CHILDREN:
        inner = getattr(node, name, None)
        for child in inner if isinstance(inner, list) else [inner]:
            if hasattr(child, "prettify"):
                yield child

"""Finds the panels of the dashboards that given series cannot fill.

A query can be filled if the series that it reads exist, directly or by recording rules. Whether it
returns any depends on the values too: a panel of stragglers is empty if there are none.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
from promql_parser import (
    AggregateExpr,
    BinaryExpr,
    Call,
    MatchOp,
    MatrixSelector,
    ParenExpr,
    SubqueryExpr,
    UnaryExpr,
    VectorSelector,
)

from .recording_rules import GROUPS
from .timing import Timing

_CHOSEN = "$"  # stands for a value that the viewer of a dashboard chooses
_RULES = {rule.name: rule.expression(Timing()) for rules in GROUPS.values() for rule in rules}

Matcher = tuple[str, MatchOp, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyPanel:
    """A panel, or an annotation, that cannot be filled, or a part of it.

    Attributes:
        dashboard: Title of the dashboard.
        panel: Title of the panel.
        missing: The metrics that its queries lack.
        is_partly_filled: Whether other queries of the panel can be filled.
    """

    dashboard: str
    panel: str
    missing: tuple[str, ...]
    is_partly_filled: bool


def empty_panels(
    dashboards: Path, series: Iterable[tuple[str, Mapping[str, str]]]
) -> list[EmptyPanel]:
    """Return the panels that these series, and what our rules record from them, do not fill.

    Args:
        dashboards: Folder with the JSON files of the dashboards.
        series: Name and labels of each series.
    """
    known = _KnownSeries(series)
    found = []
    for path in sorted(dashboards.glob("*.json")):
        dashboard = json.loads(path.read_text(encoding="utf-8"))
        for title, queries in _queries(dashboard):
            lacks = [known.lacks(query) for query in queries]
            if any(lacks):
                panel = EmptyPanel(
                    dashboard=dashboard["title"],
                    panel=title,
                    missing=tuple(sorted(set().union(*lacks))),
                    is_partly_filled=not all(lacks),
                )
                found.append(panel)
    return found


class _KnownSeries:
    """The series that exist, and the recorded ones that follow from them."""

    def __init__(self, series: Iterable[tuple[str, Mapping[str, str]]]) -> None:
        self._labels: dict[str, list[Mapping[str, str]]] = defaultdict(list)
        for name, labels in series:
            self._labels[name].append(labels)

    def lacks(self, query: str) -> set[str]:
        """Return the metrics without which a query returns nothing; empty if it can be filled."""
        return self._lacks(promql_parser.parse(_without_variables(query)), ())

    def _lacks(self, node: promql_parser.Expr, matchers: tuple[Matcher, ...]) -> set[str]:
        """Return what an expression lacks.

        Args:
            node: The expression.
            matchers: Matchers of the recorded series that the expression makes, for its own series.
        """
        match node:
            case VectorSelector():
                own = tuple((each.name, each.op, each.value) for each in node.matchers.matchers)
                return self._lacks_series(node.name or "", own, matchers)
            case MatrixSelector():
                return self._lacks(node.vector_selector, matchers)
            case BinaryExpr():
                left, right = self._lacks(node.lhs, matchers), self._lacks(node.rhs, matchers)
                if str(node.op) == "or":
                    return left | right if left and right else set()
                return left if str(node.op) == "unless" else left | right
            case AggregateExpr() | ParenExpr() | SubqueryExpr() | UnaryExpr():
                return self._lacks(node.expr, matchers)
            case Call():
                if node.func.name in ("absent", "absent_over_time"):
                    return set()
                return set().union(*(self._lacks(each, matchers) for each in node.args))
        return set()  # a number or a text

    def _lacks_series(
        self, name: str, own: tuple[Matcher, ...], of_result: tuple[Matcher, ...]
    ) -> set[str]:
        if name in _RULES and name not in self._labels:
            return self._lacks(promql_parser.parse(_RULES[name]), (*of_result, *own))
        known = self._labels.get(name, [])
        # A rule may give its result labels that the series which it reads do not have.
        there = {label for labels in known for label in labels}
        matchers = (*own, *(matcher for matcher in of_result if matcher[0] in there))
        found = any(all(_matches(labels, each) for each in matchers) for labels in known)
        return set() if found else {name}


def _matches(labels: Mapping[str, str], matcher: Matcher) -> bool:
    label, operation, pattern = matcher
    if _CHOSEN in pattern:
        return True
    value = labels.get(label, "")
    is_equal = (
        value == pattern
        if operation in (MatchOp.Equal, MatchOp.NotEqual)
        else re.fullmatch(pattern, value) is not None
    )
    return is_equal == (operation in (MatchOp.Equal, MatchOp.Re))


def _without_variables(query: str) -> str:
    """Replace Grafana's variables in a query by texts that the parser accepts."""
    query = re.sub(r"\$__(interval|rate_interval|range)\b", "1m", query)
    return re.sub(r"\$\w+|\$\{\w+(:\w+)?\}", _CHOSEN, query)


def _queries(dashboard: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield the title and the queries of each panel and annotation."""
    for panel in dashboard["panels"]:
        for each in (panel, *panel.get("panels", ())):
            yield each.get("title", ""), [t["expr"] for t in each.get("targets", ()) if t["expr"]]
    for annotation in dashboard["annotations"]["list"]:
        query = annotation.get("expr") or annotation.get("target", {}).get("expr")
        yield f"annotation {annotation['name']}", [query] if query else []

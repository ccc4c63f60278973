"""Lint rules for dashboards that types cannot express: queries, texts, layout and links."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
from promql_parts import TARGET_LABELS, children, known_series, nodes

from zerowatch.dashboards.definitions import DASHBOARDS
from zerowatch.dashboards.grafana.dashboard_json import dashboard_json
from zerowatch.dashboards.timing import Timing
from zerowatch.metrics.catalog import CATALOG

Json = dict[str, Any]

# The variables of dashboards about a run, all runs and two runs; the details follow where used.
VARIABLES = (
    ["datasource", "runbook", "job", "run"],
    ["datasource", "runbook", "job"],
    ["datasource", "runbook", "job", "run_a", "run_b"],
)
DETAILS = ("node", "rank")
SCRAPES = ("up", "scrape_duration_seconds", "scrape_samples_scraped")
ALERTS = ("ALERTS", "ALERTS_FOR_STATE")
ALERT_LABELS = {"alertname", "alertstate", "severity", "component"}
OTHERS = {  # series that are Prometheus' own
    "ALERTS": {*TARGET_LABELS, *ALERT_LABELS, "device"},
    "ALERTS_FOR_STATE": {*TARGET_LABELS, *ALERT_LABELS, "device"},
    **dict.fromkeys(SCRAPES, TARGET_LABELS),
}
# The matchers of a run on a dashboard about two, without the marks of variables.
RUNS_TO_COMPARE = {'run="run_a"', 'run="run_b"', 'run=~"run_a|run_b"'}
COLUMNS = 24
# Grafana's own variables, as a query would have them.
MACROS = {"$__rate_interval": "1m", "$__interval": "15s", "$__range": "1h"}

SERIES = {**OTHERS, **known_series()}
UIDS = {dashboard.uid: dashboard for dashboard in DASHBOARDS}


def faults(dashboard: Json) -> list[str]:
    """Return the faults of a dashboard; empty if there are none."""
    names = variable_names(dashboard)
    found = [*frame_faults(dashboard), *place_faults(dashboard), *link_faults(dashboard)]
    for panel in panels(dashboard):
        found += [f"{panel['title']}: {fault}" for fault in panel_faults(panel, names)]
    for annotation in dashboard["annotations"]["list"]:
        if "expr" in annotation:
            of_it = query_faults(annotation["expr"], names)
            found += [f"annotation {annotation['name']}: {fault}" for fault in of_it]
    return found


def variable_names(dashboard: Json) -> list[str]:
    """Return the names of the variables at the top of a dashboard."""
    return [variable["name"] for variable in dashboard["templating"]["list"]]


def panels(dashboard: Json) -> Iterator[Json]:
    """Yield all panels except headings, also those of collapsed rows."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def expressions(dashboard: Json) -> Iterator[str]:
    """Yield the queries of all panels."""
    for panel in panels(dashboard):
        yield from (target["expr"] for target in panel.get("targets", []))


def frame_faults(dashboard: Json) -> Iterator[str]:
    """Yield the faults of the dashboard apart from its panels."""
    if dashboard["graphTooltip"] != 1:
        yield "no shared crosshair"
    if not dashboard.get("description"):
        yield "no description"
    names = variable_names(dashboard)
    used = [
        name for name in DETAILS if any(f"${name}" in query for query in expressions(dashboard))
    ]
    if not any(names == [*first, *used] for first in VARIABLES):
        yield f"variables are {names}, and {used} are used"
    ids = [panel["id"] for panel in dashboard["panels"] if panel["type"] == "row"]
    ids += [panel["id"] for panel in panels(dashboard)]
    if len(set(ids)) != len(ids):
        yield f"panels share ids: {ids}"


def place_faults(dashboard: Json) -> Iterator[str]:
    """Yield the panels that overlap, or lie outside of the grid."""
    yield from grid_faults(dashboard["panels"])
    for panel in dashboard["panels"]:
        yield from grid_faults(panel.get("panels", []))


def grid_faults(on_a_grid: list[Json]) -> Iterator[str]:
    placed = [(panel["title"], panel["gridPos"]) for panel in on_a_grid]
    for index, (title, place) in enumerate(placed):
        if place["x"] < 0 or place["x"] + place["w"] > COLUMNS:
            yield f"{title}: leaves the grid"
        for other, neighbor in placed[index + 1 :]:
            if overlap(place, neighbor):
                yield f"{title}: lies over {other}"


def link_faults(dashboard: Json) -> Iterator[str]:
    """Yield the links that have no target, or drop the chosen variables."""
    is_about_a_run = "run" in variable_names(dashboard)
    for link in dashboard["links"]:
        if link["type"] == "dashboards" and not {*link["tags"]} <= {*dashboard["tags"]}:
            yield "its links to dashboards with its tags do not find itself"
        kept = link["includeVars"] and link["keepTime"]
        if link["type"] == "dashboards" and kept != is_about_a_run:
            yield "its links to dashboards lose variables or time"
    for panel in panels(dashboard):
        for link in panel.get("links", []):
            uid, _, kept = link["url"].removeprefix("/d/").partition("?")
            if uid not in UIDS:
                yield f"{panel['title']}: no dashboard is {uid}"
            if kept != "${__all_variables}&${__url_time_range}":
                yield f"{panel['title']}: its link loses variables or time"
        for url in data_links(panel):
            yield from (f"{panel['title']}: {fault}" for fault in data_link_faults(url))


def data_links(panel: Json) -> Iterator[str]:
    """Yield the addresses to which series and cells link."""
    if "fieldConfig" not in panel:
        return
    holders = [panel["fieldConfig"]["defaults"]]
    for override in panel["fieldConfig"]["overrides"]:
        holders += [{one["id"]: one["value"]} for one in override["properties"]]
    for holder in holders:
        yield from (link["url"] for link in holder.get("links", []))


def data_link_faults(url: str) -> Iterator[str]:
    """Yield the faults of a link to a dashboard: no such dashboard, or a variable it lacks."""
    if not url.startswith("/d/"):
        return
    uid, _, query = url.removeprefix("/d/").partition("?")
    if "$" in uid:
        return  # the dashboard is named by a cell
    if uid not in UIDS:
        yield f"no dashboard is {uid}"
        return
    if not query.endswith(("${__url_time_range}", "now")) and "to=${" not in query:
        yield f"the link {url} loses the time"
    known = variable_names(dashboard_json(UIDS[uid]))
    for name in re.findall(r"var-(\w+)=|\$\{(\w+):queryparam\}", query):
        if not {*name} & {*known}:
            yield f"the link {url} sets {name}, which its dashboard lacks"


def overlap(one: Json, other: Json) -> bool:
    """Whether two positions overlap."""
    return all(
        one[start] < other[start] + other[length] and other[start] < one[start] + one[length]
        for start, length in (("x", "w"), ("y", "h"))
    )


def panel_faults(panel: Json, variables: list[str]) -> Iterator[str]:
    """Yield the faults of one panel of a dashboard with these variables."""
    if not panel["title"]:
        yield "no title"
    if len(panel.get("description", "")) < 20:
        yield "no description that helps"
    if panel["datasource"]["uid"] != "${datasource}":
        yield "its data source is not the chosen one"
    if panel["type"] == "text":
        return
    if not panel["fieldConfig"]["defaults"].get("unit"):
        yield "no unit"
    if not panel.get("targets"):
        yield "no query"
    for target in panel.get("targets", []):
        if target["datasource"]["uid"] != "${datasource}":
            yield "a query's data source is not the chosen one"
        yield from query_faults(target["expr"], variables)
        yield from legend_faults(target)
        if target["format"] == "table" and keeps_name(parsed(target["expr"])):
            yield "a table's query keeps its metric's name: columns would not join by label"
    yield from override_faults(panel)


def override_faults(panel: Json) -> Iterator[str]:
    """Yield the overrides whose names no series or column can have."""
    looks = panel["fieldConfig"]["overrides"]
    names = {look["matcher"]["options"] for look in looks}
    possible = {name for target in panel.get("targets", []) for name in series_names(target)}
    for change in panel.get("transformations", []):
        possible |= set(change["options"].get("renameByName", {}).values())
    if names and not names & possible:
        yield f"no series is called {' or '.join(sorted(names))}"


def series_names(target: Json) -> Iterator[str]:
    """Yield the names of series under a legend that is a word or a single label."""
    legend = target.get("legendFormat", "")
    label = re.fullmatch(r"{{(\w+)}}", legend)
    yield legend
    for spec in CATALOG if label else ():
        for known in spec.labels:
            if known.name == label[1]:
                yield from known.values


def legend_faults(target: Json) -> Iterator[str]:
    """Yield the labels of a legend that the query's series cannot have."""
    names = SERIES.keys() & set(re.findall(r"[\w:]+", target["expr"]))
    labels = {label for name in names for label in SERIES[name]}
    for label in re.findall(r"{{(\w+)}}", target.get("legendFormat", "")):
        if label not in labels:
            yield f"the legend names {label}, which no series of the query has"


def query_faults(expression: str, variables: list[str]) -> Iterator[str]:
    """Yield the faults of a query on a dashboard with these variables."""
    try:
        tree = parsed(expression)
    except ValueError as error:
        yield f"is no PromQL: {error}"
        return
    for node in nodes(tree):
        if isinstance(node, promql_parser.VectorSelector):
            yield from selector_faults(node, variables)
        elif isinstance(node, promql_parser.AggregateExpr):
            yield from grouping_faults(node)
    yield from (f"{name} lacks a choice of ranks" for name in unlimited(tree))
    for call, window in re.findall(r"\b(rate|irate|increase|changes)\(.*?\[([^\]]+)\]", expression):
        if window not in ("$__rate_interval", Timing().short):
            yield f"{call} over {window}: only $__rate_interval is sure to hold two scrapes"


def unlimited(node: Any) -> Iterator[str]:
    """Yield the series of all ranks that a query neither aggregates nor selects by rank."""
    if isinstance(node, promql_parser.AggregateExpr):
        return
    if isinstance(node, promql_parser.VectorSelector):
        matched = {matcher.name for matcher in node.matchers.matchers}
        is_of_rank = "rank" in SERIES.get(node.name, ()) and node.name not in ALERTS
        if is_of_rank and "rank" not in matched:
            yield node.name
        return
    sides = [list(unlimited(child)) for child in children(node)]
    chooses = isinstance(node, promql_parser.BinaryExpr) and str(node.op) in ("and", "unless")
    if not chooses:
        yield from itertools.chain(*sides)
    elif all(sides):
        yield from sides[0]


def parsed(expression: str) -> Any:
    return promql_parser.parse(substituted(expression))


def keeps_name(node: Any) -> bool:
    """Whether the series of a query keep the name of a metric."""
    if isinstance(node, promql_parser.ParenExpr):
        return keeps_name(node.expr)
    if isinstance(node, promql_parser.BinaryExpr):
        return keeps_name(node.lhs)
    if isinstance(node, promql_parser.AggregateExpr):
        return str(node.op) in ("topk", "bottomk") and keeps_name(node.expr)
    return isinstance(node, promql_parser.VectorSelector)


def substituted(expression: str) -> str:
    """Replace the variables of Grafana by values."""
    for macro, value in MACROS.items():
        expression = expression.replace(macro, value)
    return re.sub(r"\$\{?(\w+)(:\w+)?\}?", r"\1", expression)


def selector_faults(selector: Any, variables: list[str]) -> Iterator[str]:
    """Yield a fault for each unknown series or label, and for each missing variable."""
    if selector.name not in SERIES:
        yield f"nobody writes {selector.name}"
        return
    for label in {matcher.name for matcher in selector.matchers.matchers} - SERIES[selector.name]:
        yield f"{selector.name} has no label {label}"
    matchers = {str(matcher) for matcher in selector.matchers.matchers}
    # Grafana escapes a value for `=~` only if several can be chosen.
    chosen = ('job="job"', 'run="run"') if "run" in variables else ('job=~"job"',)
    for matcher in chosen:
        if matcher not in matchers:
            yield f"{selector.name} lacks {matcher}"
    if "run_a" in variables and not matchers & RUNS_TO_COMPARE:
        yield f"{selector.name} lacks a choice of run A or B"


def grouping_faults(aggregation: Any) -> Iterator[str]:
    """Yield the labels of an aggregation that none of its series has."""
    modifier = aggregation.modifier
    if modifier is None:
        return
    below = {
        label
        for node in nodes(aggregation.expr)
        if isinstance(node, promql_parser.VectorSelector)
        for label in SERIES.get(node.name, ())
    }
    for label in set(modifier.labels) - below:
        yield f"aggregates by {label}, which no series has"

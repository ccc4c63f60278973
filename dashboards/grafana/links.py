"""The links of dashboards: to other dashboards, traces, reports and the runbook.

A link to a dashboard keeps the data source, job, run and time range. The links that a series or a
row offers follow from its labels: see `links_of_label`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import quote

from .dashboard import PREFIX, uid_of
from .panels import Link

TEMPO = {"type": "tempo", "uid": "tempo"}
LOKI = {"type": "loki", "uid": "loki"}
RUNBOOK = "runbook"  # the hidden variable with the address of the runbook
# The labels that have links.
JOB, RUN, NODE, RANK = "job", "run", "node", "rank"
PAGE = "page"  # the name of a dashboard, such as "communication"
RUNBOOK_PAGE = "runbook_page"  # the name of an alert
# The heading of the column of a table that has the label `run`. Links of a table with this column
# lead to the run of their row.
RUN_HEADING = "Run"
JOB_HEADING = "Job"
_CELL = "${__value.raw}"


@dataclass(frozen=True, slots=True)
class Here:
    """The dashboard that has a link, and the variables that can be chosen at its top."""

    uid: str
    variables: Collection[str] = ()


def dashboard_url(uid: str, *, time: str = "${__url_time_range}", **chosen: str) -> str:
    """Return the address of a dashboard, for the same run and by default the same time.

    Args:
        uid: The dashboard.
        time: The time range, such as "from=now-30m&to=now".
        chosen: Values of variables, such as rank="5". Data source, job and run keep their values
            unless they are given.
    """
    kept = [f"${{{name}:queryparam}}" for name in ("datasource", JOB, RUN) if name not in chosen]
    given = [f"var-{name}={value}" for name, value in chosen.items()]
    return f"/d/{uid}?{'&'.join((*kept, *given, time))}"


def traces_url(query: str) -> str:
    """Return the address of a search for traces in Tempo over the time range shown.

    Args:
        query: The search in TraceQL, with Grafana's variables such as `$run`.
    """
    return _explore(TEMPO, query, limit=20, queryType="traceql", tableType="traces")


def reports_url(query: str) -> str:
    """Return the address of a search for reports of a run in Loki over the time range shown.

    Args:
        query: The search in LogQL, with Grafana's variables such as `$run`.
    """
    return _explore(LOKI, query, queryType="range")


def _explore(source: Mapping[str, str], query: str, **more: str | int) -> str:
    """Return the address of Grafana's Explore with a query."""
    pane = {
        "datasource": source["uid"],
        "queries": [{"datasource": source, "query": query, "expr": query, "refId": "A", **more}],
        "range": {"from": "$__from", "to": "$__to"},
    }
    panes = quote(json.dumps({"zerowatch": pane}, separators=(",", ":")), safe="$")
    # Grafana replaces its variables before it decodes the address, so they are not escaped.
    panes = re.sub(r"\$%7B([\w.]+)%7D", r"${\1}", panes)
    return f"/explore?schemaVersion=1&panes={panes}"


def links_of_series(labels: Collection[str], here: Here) -> tuple[Link, ...]:
    """Return the links of a series whose legend names `labels`."""
    return tuple(
        link
        for label in (RANK, NODE)
        if label in labels
        for link in links_of_label(label, f"${{__field.labels.{label}}}", here, {})
    )


def links_of_cell(label: str, headings: Collection[str], here: Here) -> tuple[Link, ...]:
    """Return the links of a cell of a table in the column of `label`.

    Args:
        label: The label.
        headings: The headings of all columns of labels.
        here: The dashboard that has the table.
    """
    columns = {JOB: JOB_HEADING, RUN: RUN_HEADING}
    row = {
        name: f"${{__data.fields.{heading}}}"
        for name, heading in columns.items()
        if heading in headings
    }
    return links_of_label(label, _CELL, here, row)


def links_of_label(label: str, value: str, here: Here, run: dict[str, str]) -> tuple[Link, ...]:
    """Return the links of a label, by its name.

    Args:
        label: The name of the label.
        value: Grafana's variable with the value of the label.
        here: The dashboard that has the link.
        run: Grafana's variables with the job and run, where they are not those chosen at the top.
    """
    if label == RANK:
        of_run = run.get(RUN, "$run")
        traces = f'{{ .zerowatch.run = "{of_run}" && .zerowatch.rank = {value} }}'
        reports = f'{{run="{of_run}", rank="{value}"}}'
        return (
            Link(f"Rank {value}", _narrowed(here, RANK, value, "step_anatomy", run)),
            Link(f"Traces of rank {value}", traces_url(traces)),
            Link(f"Reports of rank {value}", reports_url(reports)),
        )
    if label == NODE:
        return (Link(f"Node {value}", _narrowed(here, NODE, value, "devices", run)),)
    if label == RUNBOOK_PAGE:
        return (Link("What to do", f"${{{RUNBOOK}}}#{value}"),)
    if label == PAGE:
        return (Link("The dashboard with details", dashboard_url(PREFIX + value, **run)),)
    if label == RUN:
        overview = uid_of("overview")
        whole = "from=${__data.fields.Started.numeric}&to=${__data.fields.Seen.numeric}"
        chosen = {**run, RUN: value}
        return (
            Link("Overview, last 30 minutes", dashboard_url(overview, time=_NOW, **chosen)),
            Link("Overview, whole run", dashboard_url(overview, time=whole, **chosen)),
        )
    return ()


_NOW = "from=now-30m&to=now"


def _narrowed(here: Here, variable: str, value: str, otherwise: str, run: dict[str, str]) -> str:
    """Return this dashboard for one rank or node, or another if this one cannot choose it."""
    uid = here.uid if variable in here.variables and not run else uid_of(otherwise)
    return dashboard_url(uid, **{**run, variable: value})

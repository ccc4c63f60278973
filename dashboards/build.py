"""Writes the generated files: dashboards, rules, alerts and Kubernetes objects.

Also checks whether the committed copies in `rendered/` are up to date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ..metrics.thresholds import Threshold
from .alerts.alert import Links
from .definitions import DASHBOARDS
from .grafana.dashboard import PREFIX
from .grafana.dashboard_json import dashboard_json
from .kubernetes_files import kubernetes_files
from .prometheus_files import NOTE, rule_files
from .stack.alert_log import RUNBOOK_PATH
from .stack.stack_ports import ALERT_LOG
from .timing import Timing

_BUILD = "run `zerowatch dashboards build`"


def rendered_files(
    links: Links | None = None, thresholds: Mapping[str, float] | None = None
) -> dict[str, str]:
    """Return the text of each generated file, by its path relative to the output folder.

    Args:
        links: The base addresses of the links in alerts and dashboards; by default those of the
            shipped files.
        thresholds: Values in place of the defaults in `metrics/thresholds.py`, by name.
    """
    rules = rule_files(timing=Timing(), links=links, thresholds=thresholds)
    files = {**dashboard_files(links, thresholds), **rules}
    return dict(sorted({**files, **kubernetes_files(files)}.items()))


def dashboard_files(
    links: Links | None = None, thresholds: Mapping[str, float] | None = None
) -> dict[str, str]:
    """Return the JSON text of each dashboard, by its path relative to the output folder.

    Args:
        links: The base addresses of the links in alerts and dashboards. Without them, dashboards
            link to the runbook that the stack serves.
        thresholds: Values in place of the defaults, by name, from which colors change. A limit that
            is drawn as a line comes from Prometheus, and so is the one of the run.
    """
    runbook = (links or Links()).runbook or f"{ALERT_LOG.url}{RUNBOOK_PATH}"
    return {
        f"grafana/{dashboard.uid}.json": _json_text(
            _replaced(dashboard_json(dashboard, runbook), thresholds or {})
        )
        for dashboard in DASHBOARDS
    }


def _replaced(node: object, thresholds: Mapping[str, float]) -> object:
    """Return a copy of JSON in which each threshold is a plain number, changed if it is given."""
    match node:
        case dict():
            return {name: _replaced(each, thresholds) for name, each in node.items()}
        case list() | tuple():
            return [_replaced(each, thresholds) for each in node]
        case Threshold():
            return thresholds.get(node.name, float(node))
    return node


def build(
    out: Path, links: Links | None = None, thresholds: Mapping[str, float] | None = None
) -> list[Path]:
    """Write all generated files below the folder `out`, and return their paths.

    Files of an earlier build that are no longer generated are removed; other files are kept.
    `links` and `thresholds` are those of `rendered_files`.

    Raises:
        OSError: A file cannot be written or removed.
    """
    files = rendered_files(links, thresholds)
    for path in _not_generated(out, files):
        if _is_from_a_build(out / path):
            (out / path).unlink()
    for path, text in files.items():
        file = out / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return [out / path for path in files]


def stale(folder: Path) -> list[str]:
    """Return a message for each file in `folder` that differs from what a build would write.

    The message names the file and says what to do. The list is empty if all is up to date.
    """
    files = rendered_files()
    messages = [_fault(folder / path, text) for path, text in files.items()]
    messages += [
        f"{folder / path}: nothing generates it. Move it elsewhere, or {_BUILD}, which removes "
        "what an earlier build left."
        for path in _not_generated(folder, files)
    ]
    return sorted(filter(None, messages))


def _fault(file: Path, text: str) -> str:
    if not file.is_file():
        return f"{file}: missing. Please {_BUILD}."
    if file.read_text(encoding="utf-8") != text:
        return (
            f"{file}: differs from what its source makes. It is generated, and edits in it are "
            f"lost: change dashboards/ instead, then {_BUILD}."
        )
    return ""


def _not_generated(folder: Path, files: dict[str, str]) -> list[str]:
    """Return the files that are not generated but lie in a subfolder of generated ones."""
    subfolders = {path.partition("/")[0] for path in files if "/" in path}
    there = {
        file.relative_to(folder).as_posix()
        for subfolder in subfolders
        for file in (folder / subfolder).rglob("*")
        if file.is_file()
    }
    return sorted(there - files.keys())


def _is_from_a_build(file: Path) -> bool:
    """Whether an earlier build wrote the file, judged by its name or its first line."""
    if file.suffix == ".json":
        return file.name.startswith(PREFIX)
    return file.read_text(encoding="utf-8", errors="replace").startswith(NOTE)


def _json_text(content: object) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"

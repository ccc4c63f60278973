"""Writes and checks what is generated: dashboards, rules, alerts, Kubernetes objects."""

from __future__ import annotations

import json
from pathlib import Path

from .alerts.alert import Links
from .definitions import DASHBOARDS
from .grafana.dashboard import PREFIX
from .grafana.dashboard_json import dashboard_json
from .kubernetes_files import kubernetes_files
from .prometheus_files import NOTE, rule_files
from .timing import Timing

_BUILD = "run `zerowatch dashboards build`"


def rendered_files(links: Links | None = None) -> dict[str, str]:
    """Return the text of each generated file by its path, sorted by path.

    Args:
        links: Where the alerts' links lead; by default as in the files that are shipped.
    """
    files = {**dashboard_files(), **rule_files(timing=Timing(), links=links)}
    return dict(sorted({**files, **kubernetes_files(files)}.items()))


def dashboard_files() -> dict[str, str]:
    """Return each dashboard's JSON by its path."""
    return {
        f"grafana/{dashboard.uid}.json": _json_text(dashboard_json(dashboard))
        for dashboard in DASHBOARDS
    }


def build(out: Path, links: Links | None = None) -> list[Path]:
    """Write all files below `out`, and return their paths.

    It removes files of an earlier build that are no longer generated, and no other files.

    Raises:
        OSError: A file cannot be written or removed.
    """
    files = rendered_files(links)
    for path in _beside(out, files):
        if _is_ours(out / path):
            (out / path).unlink()
    for path, text in files.items():
        file = out / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return [out / path for path in files]


def stale(folder: Path) -> list[str]:
    """Say of each file in `folder` that is not what would be generated, what to do about it."""
    files = rendered_files()
    messages = [_fault(folder / path, text) for path, text in files.items()]
    messages += [
        f"{folder / path}: nothing generates it. Move it elsewhere, or {_BUILD}, which removes "
        "what an earlier build left."
        for path in _beside(folder, files)
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


def _beside(folder: Path, files: dict[str, str]) -> list[str]:
    """Return the files next to generated ones, in subfolders, that are not generated."""
    subfolders = {path.partition("/")[0] for path in files if "/" in path}
    there = {
        file.relative_to(folder).as_posix()
        for subfolder in subfolders
        for file in (folder / subfolder).rglob("*")
        if file.is_file()
    }
    return sorted(there - files.keys())


def _is_ours(file: Path) -> bool:
    """Whether a build wrote it: by the name of a dashboard, else by its first line."""
    if file.suffix == ".json":
        return file.name.startswith(PREFIX)
    return file.read_text(encoding="utf-8", errors="replace").startswith(NOTE)


def _json_text(content: dict[str, object]) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"

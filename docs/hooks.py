"""Generates parts of the documentation when the site is built, so that they cannot be outdated.

A line `<!-- generated: NAME -->` in a page is replaced by what the function of that name returns.
MkDocs loads this file as a hook (https://www.mkdocs.org/user-guide/configuration/#hooks).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel

from zerowatch.__main__ import commands
from zerowatch.dashboards.alerts import alerts
from zerowatch.dashboards.timing import Timing
from zerowatch.metrics.catalog import CATALOG
from zerowatch.metrics.catalog.spec import MetricSpec
from zerowatch.metrics.settings import ENVIRONMENT_PREFIX, Settings
from zerowatch.metrics.thresholds import THRESHOLDS

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / ".build" / "docs-sources" / "zerowatch"
PACKAGE = ("__init__.py", "errors.py", "metrics", "runtime")
REPOSITORY_LINK = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)+((?:runtime|metrics|dashboards|docker|tests)/[^)#]*|[A-Z]+\.md)(?:#[^)]*)?\)"
)
# A paragraph for readers of the repository, where the generated parts are missing.
REPOSITORY_NOTE = re.compile(r"^\*In the repository.*?\n\n", re.MULTILINE | re.DOTALL)
MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def on_startup(**_: Any) -> None:
    """Make a package of links, so that the API reference does not read tests and environments."""
    SOURCES.mkdir(parents=True, exist_ok=True)
    for name in PACKAGE:
        link = SOURCES / name
        if not link.is_symlink():
            link.symlink_to(ROOT / name)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages whose sources are elsewhere: the runbook of the package, and the changelog."""
    for page, source in (("runbook.md", "dashboards/runbook.md"), ("changelog.md", "CHANGELOG.md")):
        content = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what is generated; name files of the repository without a link to them."""
    markdown = REPOSITORY_NOTE.sub("", markdown)
    markdown = MARKER.sub(lambda found: GENERATED[found[1]](), markdown)
    return REPOSITORY_LINK.sub(r"\1 (`\2`)", markdown)


def metrics() -> str:
    """Return a table of all metrics, by the file of the catalog that defines them."""
    rows = [
        f"| `{spec.name}` | {spec.kind} "
        f"| {', '.join(f'`{name}`' for name in spec.label_names) or '-'} | {_lean(spec)} "
        f"| {spec.help} | {spec.usual} |"
        for spec in CATALOG
    ]
    titles = ("metric", "type", "labels", "lean", "meaning", "usual values, and when to worry")
    head = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    return "\n".join([*head, *rows])


def _lean(spec: MetricSpec) -> str:
    """Describe what `serve.detail = "lean"` serves of a metric."""
    if spec.lean is None:
        return "-"
    if spec.buckets:
        return "sum, count"
    summed = [f"without `{name}`" for name in spec.lean.without]
    chosen = [f"`{name}` {', '.join(values)}" for name, values in spec.lean.only.items()]
    return "; ".join([*summed, *chosen]) or "yes"


def settings() -> str:
    """Return a table of all settings for each section."""
    sections: dict[str, list[str]] = {}
    for option, default, meaning in _options(Settings):
        variable = ENVIRONMENT_PREFIX + "_".join(option).upper()
        row = f"| `{'.'.join(option)}` | `{variable}` | {_shown(default)} | {meaning} |"
        sections.setdefault(option[0] if len(option) > 1 else "general", []).append(row)
    head = ["| option | environment variable | default | meaning |", "|---|---|---|---|"]
    return "\n".join(
        "\n".join([f"### {name}", "", *head, *rows, ""]) for name, rows in sections.items()
    )


def _options(
    section: type[BaseModel], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object, str]]:
    for name, field in section.model_fields.items():
        option = (*path, name)
        if isinstance(field.default, BaseModel):
            yield from _options(type(field.default), option)
        else:
            yield option, field.default, " ".join((field.description or "").split())


def _shown(default: object) -> str:
    """Write a default as a user would type it."""
    if default is None:
        return "not set"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default.as_posix() if isinstance(default, Path) else default}`"


def command_line() -> str:
    """Return the help text of each command."""
    return "\n".join(_help_of(commands, click.Context(commands, info_name="zerowatch")))


def _help_of(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None, name
            yield from _help_of(inner, click.Context(inner, parent=context, info_name=name))


def alert_table() -> str:
    """Return a table of all alerts, with links to their pages in the runbook."""
    rows = [
        f"| [{alert.name}](../runbook.md#{alert.name.lower()}) | {alert.severity} "
        f"| {alert.for_seconds / 60:g} min | {alert.summary} |"
        for alert in alerts(Timing())
    ]
    return "\n".join(["| alert | severity | after | meaning |", "|---|---|---|---|", *rows])


def thresholds() -> str:
    """Return a table of the thresholds of alerts."""
    rows = [
        f"| `{name}` | {threshold:.4g} | {threshold.unit} | {threshold.meaning} |"
        for name, threshold in THRESHOLDS.items()
    ]
    return "\n".join(["| threshold | default | unit | meaning |", "|---|---|---|---|", *rows])


GENERATED = {
    "metrics": metrics,
    "settings": settings,
    "command_line": command_line,
    "alerts": alert_table,
    "thresholds": thresholds,
}

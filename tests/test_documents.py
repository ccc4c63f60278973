"""What the documents say of files, settings and sizes is true."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from package_tree import ROOT
from pydantic import BaseModel

from zerowatch.metrics.catalog import CATALOG
from zerowatch.metrics.settings import ENVIRONMENT_PREFIX, Settings

DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "METRICS.md", "SETTINGS.md")
MAX_LINES = 200
TREE_PATH = re.compile(r"(?<![\w/.-])(?:runtime|metrics|dashboards|docker|tests)/[\w/.-]*\w")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_a_document_names_exists(document: str) -> None:
    text = (ROOT / document).read_text()

    named = {*TREE_PATH.findall(text), *LINK.findall(text)}

    assert named != set()
    assert {name for name in named if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_stays_short(document: str) -> None:
    assert len((ROOT / document).read_text().splitlines()) <= MAX_LINES


def test_every_setting_is_listed_as_it_is() -> None:
    document = (ROOT / "SETTINGS.md").read_text().splitlines()

    listed = [
        line for line in document if f"`{ENVIRONMENT_PREFIX}" in line and line.startswith("| ")
    ]

    assert listed == list(setting_rows(Settings))


def test_every_metric_is_listed_as_it_is() -> None:
    document = (ROOT / "METRICS.md").read_text()
    table = document.partition("## All metrics")[2].splitlines()

    listed = [line for line in table if line.startswith("| `")]

    assert listed == [
        f"| `{spec.name}` | {spec.kind} "
        f"| {', '.join(f'`{name}`' for name in spec.label_names) or '-'} | {spec.help} |"
        for spec in CATALOG
    ]


def setting_rows(section: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the line of each setting: option, environment variable, default, meaning."""
    for name, field in section.model_fields.items():
        option = (*path, name)
        if isinstance(field.default, BaseModel):
            yield from setting_rows(type(field.default), option)
            continue
        variable = ENVIRONMENT_PREFIX + "_".join(option).upper()
        meaning = " ".join((field.description or "").split())
        yield f"| `{'.'.join(option)}` | `{variable}` | {shown(field.default)} | {meaning} |"


def shown(default: object) -> str:
    """Write a default as one would type it."""
    if default is None:
        return "not set"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default.as_posix() if isinstance(default, Path) else default}`"

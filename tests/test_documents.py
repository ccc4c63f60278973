"""Every file that a document names exists, and has the names that ARCHITECTURE.md lists for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from package_tree import ROOT

DOCUMENTS = sorted(
    str(file.relative_to(ROOT))
    for pattern in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/**/*.md")
    for file in ROOT.glob(pattern)
)
TREE_PATH = re.compile(r"(?<![\w/.-])(?:runtime|metrics|dashboards|docker|tests)/[\w/.-]*\w")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
WHERE_TO_CHANGE = re.compile(
    r"^\| [^|]+ \| ([^|]*`(?:runtime|metrics|dashboards)/[^|]*) \| ([^|]*) \|$", re.M
)
CODE = re.compile(r"`([^`]+)`")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_a_document_names_exists(document: str) -> None:
    text = (ROOT / document).read_text()

    missing = {name for name in TREE_PATH.findall(text) if not (ROOT / name).exists()}
    links = {
        link for link in LINK.findall(text) if not (ROOT / document).parent.joinpath(link).exists()
    }

    assert missing == set()
    assert links == set()


def test_the_names_to_look_for_are_in_the_files_of_their_row() -> None:
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("## Where do I change")[2]
    rows = WHERE_TO_CHANGE.findall(table.partition("\n## ")[0])

    missing = {
        name
        for paths, names in rows
        for name in CODE.findall(names)
        if not any(is_named_in(ROOT / path, name) for path in CODE.findall(paths))
    }

    assert len(rows) > 20
    assert missing == set()


def is_named_in(path: Path, name: str) -> bool:
    """Whether a file, or a file below a folder, contains a name or is called so."""
    files = [path] if path.is_file() else path.rglob("*.py")
    return (path / name).exists() or any(
        re.search(rf"\b{name}\b", file.read_text()) for file in files
    )

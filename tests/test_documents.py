"""Every file that a document names exists."""

from __future__ import annotations

import re

import pytest
from package_tree import ROOT

DOCUMENTS = sorted(
    str(file.relative_to(ROOT))
    for pattern in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/**/*.md")
    for file in ROOT.glob(pattern)
)
TREE_PATH = re.compile(r"(?<![\w/.-])(?:runtime|metrics|dashboards|docker|tests)/[\w/.-]*\w")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


MADE_BY_THE_READER = {"docker/.env"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_a_document_names_exists(document: str) -> None:
    text = (ROOT / document).read_text()

    missing = {name for name in TREE_PATH.findall(text) if not (ROOT / name).exists()}
    links = {
        link for link in LINK.findall(text) if not (ROOT / document).parent.joinpath(link).exists()
    }

    assert missing - MADE_BY_THE_READER == set()
    assert links == set()

"""Every file that a document names exists."""

from __future__ import annotations

import re

import pytest
from package_tree import ROOT

DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
TREE_PATH = re.compile(r"(?<![\w/.-])(?:runtime|metrics|dashboards|docker|tests)/[\w/.-]*\w")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_a_document_names_exists(document: str) -> None:
    text = (ROOT / document).read_text()

    named = {*TREE_PATH.findall(text), *LINK.findall(text)}

    assert named != set()
    assert {name for name in named if not (ROOT / name).exists()} == set()

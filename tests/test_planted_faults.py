"""The list of planted faults still fits the code: `tests/bench/mutations/planted_faults.py`."""

from __future__ import annotations

import ast

import pytest
from bench.mutations.planted_faults import FAULTS, PlantedFault
from package_tree import ROOT

PACKAGES = {
    *(f"runtime/{path.parent.name}" for path in (ROOT / "runtime").glob("*/__init__.py")),
    *("metrics/catalog", "metrics/exporters", "dashboards/alerts"),
}


def test_there_are_planted_faults_in_all_packages() -> None:
    assert {fault.package for fault in FAULTS} == PACKAGES


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.file)
def test_the_text_of_a_planted_fault_occurs_once_and_its_replacement_is_valid_code(
    fault: PlantedFault,
) -> None:
    source = (ROOT / fault.file).read_text()

    assert source.count(fault.old) == 1
    ast.parse(source.replace(fault.old, fault.new))

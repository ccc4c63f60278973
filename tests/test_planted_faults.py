"""Tests of the list of planted faults, and of how faults are drawn: `tests/bench/mutations`."""

from __future__ import annotations

import ast
import random

import pytest
from bench.mutations.drawn_faults import (
    DROPPED_CALL,
    NUM_CANDIDATES,
    NUM_FAULTS,
    OFF_BY_ONE,
    SIGN,
    WRONG_LABEL,
    changes_of,
    draw,
    package_of,
)
from bench.mutations.planted_faults import FAULTS, PlantedFault
from package_tree import ROOT, package_files

PACKAGES = {package_of(str(file)) for file in package_files() if len(file.parts) > 1}


def test_there_are_planted_faults_in_all_packages() -> None:
    assert {fault.package for fault in FAULTS} == PACKAGES


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.file)
def test_the_text_of_a_planted_fault_occurs_once_and_its_replacement_is_valid_code(
    fault: PlantedFault,
) -> None:
    source = (ROOT / fault.file).read_text()

    assert source.count(fault.old) == 1
    ast.parse(source.replace(fault.old, fault.new))


@pytest.mark.parametrize(
    ("line", "kind", "changed"),
    [
        ("a = b - (c + d)", SIGN, ["a = b + (c + d)", "a = b - (c - d)"]),
        ("a += 5", SIGN, ["a -= 5"]),
        ("a = -b", SIGN, ["a = b"]),
        ("a = 'b' + c", SIGN, []),
        ("a = 1 < b >= c", OFF_BY_ONE, ["a = 1 <= b >= c", "a = 1 < b > c", "a = 2 < b >= c"]),
        ("a = True", OFF_BY_ONE, []),
        ("a.close()", DROPPED_CALL, ["pass"]),
        ("a = b.close()", DROPPED_CALL, []),
        ("a = {'seconds': 'a text', 'rank': b}", WRONG_LABEL, ['{"rank": ', '"seconds": b']),
        ("def a(b: int = -1) -> 'rank': ...", WRONG_LABEL, []),
        ("a = f'{b + 1}'", SIGN, []),
    ],
)
def test_the_changes_of_a_line(line: str, kind: str, changed: list[str], seed: int) -> None:
    found = [each for each in changes_of("file.py", f"{line}\n", random.Random(seed))]

    assert all(each.old == f"{line}\n" and each.line == 1 for each in found)
    own = sorted(each.new for each in found if each.kind == kind)
    assert len(own) == len(changed)
    assert all(any(text in each for each in own) for text in changed)


def test_each_package_has_a_fault_and_a_seed_always_draws_the_same() -> None:
    sources = {
        f"{package}/{name}.py": f"def {name}(x):\n    print(x)\n    return x - {len(package)}\n"
        for package in ("metrics", "runtime/cli", "runtime/trainer/deeper")
        for name in ("one", "two", "three")
    }

    drawn = draw(3, sources)

    assert len(drawn) == NUM_FAULTS
    assert all(len(candidates) == NUM_CANDIDATES for candidates in drawn)
    packages = [package_of(candidates[0].file) for candidates in drawn]
    assert packages == sorted(packages)
    assert set(packages) == {"metrics", "runtime/cli", "runtime/trainer"}
    assert drawn == draw(3, sources) != draw(4, sources)
    for fault in (one for candidates in drawn for one in candidates):
        assert fault.old in sources[fault.file]
        assert fault.new != fault.old

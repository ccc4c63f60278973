"""The parts of the mutation check that need no run of tests: `tests/bench/mutations/`."""

from __future__ import annotations

import ast

from bench.mutations.mutation_check import failed_tests
from bench.mutations.recorded_tests import lines_in_functions, named_test

SOURCE = """\
LIMIT = 1

def first(size=2):
    \"\"\"Double it.\"\"\"
    return size * 2

RULES = (
    "name",
    lambda size: size,
)
"""


def test_only_the_bodies_of_functions_are_not_executed_by_an_import() -> None:
    assert lines_in_functions(ast.parse(SOURCE)) == {4, 5, 9}


def test_a_context_names_the_test_of_the_process_or_of_the_forked_rank() -> None:
    own = named_test("tests/metrics/test_a.py::test_b[x|y] (call)")
    forked = named_test("tests/runtime/test_a.py::test_b (setup)|tests/runtime/test_c.py::test_d")

    assert own == "tests/metrics/test_a.py::test_b[x|y]"
    assert forked == "tests/runtime/test_c.py::test_d"
    assert named_test("") == ""


def test_failed_tests_are_read_from_the_summary_of_pytest() -> None:
    output = (
        "FAILED tests/test_a.py::test_b[a b] - assert 1 == 2\n"
        "ERROR tests/test_c.py\n"
        "SKIPPED [1] tests/test_d.py:3: no GPU\n"
        "2 failed in 0.1s\n"
    )

    assert failed_tests(output) == ["tests/test_a.py::test_b[a b]", "tests/test_c.py"]

"""Tests that draw their data take the seed from `--seed`, and print it if they fail."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from package_tree import ROOT

SEEDED = {"Random", "RandomState", "default_rng", "manual_seed", "seed"}
# The package's tests; a job's script fixes its seeds, so that its test's id repeats it.
TESTS = [
    file
    for file in sorted((ROOT / "tests").rglob("test_*.py"))
    if not file.is_relative_to(ROOT / "tests" / "gpu")
]
DRAWING = """
import random

def test_drawing(seed):
    assert random.Random(seed).random() == seed

def test_not_drawing():
    assert False
"""


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tests")
    (folder / "test_drawing.py").write_text(DRAWING)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--seed", "7"]

    ended = subprocess.run(
        [*command, "-p", "conftest", "--rootdir", str(folder), "-c", "/dev/null", str(folder)],
        cwd=folder,
        env={"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'tests' / 'support'}"},
        capture_output=True,
        text=True,
        timeout=600,
    )

    assert ended.returncode == 1, ended.stdout + ended.stderr
    return ended.stdout


def test_a_failed_test_prints_its_seed_and_how_to_run_it_again(failed: str) -> None:
    line = "seed 7; rerun: .venv/bin/python -m pytest --seed 7 'test_drawing.py::test_drawing'"

    assert line in failed.splitlines()


def test_a_failed_test_that_draws_nothing_prints_no_seed(failed: str) -> None:
    assert "2 failed" in failed
    assert failed.count("rerun: ") == 1


def test_no_test_seeds_a_generator_with_a_number_of_its_own() -> None:
    strays = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in TESTS
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in SEEDED
        and all(isinstance(argument, ast.Constant) for argument in node.args)
    ]

    assert TESTS
    assert strays == []

"""Records which test executes which line of the package, in child processes too.

coverage starts in every process by its own `.pth` file, as COVERAGE_PROCESS_START names a
configuration. A child takes its test from PYTEST_CURRENT_TEST; ranks that `rank_server.py` forks do
so when they begin. A process that is killed leaves no data.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".build" / "mutations"
SOURCES = ("runtime", "metrics", "dashboards")
DATA, _CONFIG = FOLDER / "coverage", FOLDER / "settings.ini"
_TESTS, _FINGERPRINT = FOLDER / "tests.json", FOLDER / "fingerprint"
# Contexts need the C tracer. A warning would fail tests of clean output.
_SETTINGS = """[run]
data_file = {data}
parallel = true
core = ctrace
context = ${{PYTEST_CURRENT_TEST-}}
source = {sources}
patch = _exit
disable_warnings = no-data-collected,module-not-imported,module-not-measured,already-imported
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTest:
    """One test of the recording.

    Attributes:
        seconds: Duration, fixtures included.
        is_job: Whether it has the marker `jobs`.
        is_slow: Whether it has the marker `slow`; `make test` leaves those out.
        passed: Whether it passed; a test that failed or was skipped finds nothing.
    """

    seconds: float
    is_job: bool
    is_slow: bool
    passed: bool


class Recording:
    """What each test executed, and how long it took, as of the last `record`.

    Attributes:
        tests: The tests by pytest's id.

    Raises:
        RuntimeError: There is no recording, or the package or its tests have changed since.
    """

    def __init__(self) -> None:
        if not is_current():
            raise RuntimeError(
                "no tests are recorded for this state of the package and its tests; run "
                "mutation_check.py --record, which takes longer than make test-all"
            )
        tests = json.loads(_TESTS.read_text())
        self.tests = {name: RecordedTest(**test) for name, test in tests.items()}

    def covering(self, file: str, lines: Iterable[int]) -> set[str] | None:
        """Return the tests that execute a line; None if all lines run when the file is imported."""
        inside = lines_in_functions(ast.parse((ROOT / file).read_text())) & set(lines)
        if not inside:
            return None
        executed = self.tests_by_line(file)
        return {name for line in inside for name in executed.get(line, ())} & self.tests.keys()

    def tests_by_line(self, file: str) -> dict[int, set[str]]:
        """Return the tests that executed each line; "" stands for imports outside of tests."""
        contexts = self._data.contexts_by_lineno(str(ROOT / file))
        return {line: set(map(named_test, names)) for line, names in contexts.items()}

    @cached_property
    def _data(self) -> CoverageData:
        from coverage import CoverageData

        data = CoverageData(str(DATA))
        data.read()
        return data


def record(arguments: Sequence[str]) -> None:
    """Run the tests that pytest selects by `arguments`, and store what each of them executes.

    Raises:
        RuntimeError: coverage is missing.
    """
    if importlib.util.find_spec("coverage") is None:
        raise RuntimeError("coverage is missing; install it: .venv/bin/pip install -e '.[dev]'")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    sources = ",".join(str(ROOT / source) for source in SOURCES)
    _CONFIG.write_text(_SETTINGS.format(data=DATA, sources=sources))
    before = fingerprint()
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = Path(__file__).with_name("pytest_with_contexts.py")
    subprocess.run(
        [sys.executable, script, _TESTS, *arguments],
        cwd=ROOT,
        env={**inherited, "COVERAGE_PROCESS_START": str(_CONFIG)},
        check=True,
    )
    combine = ("coverage", "combine", "-q", f"--rcfile={_CONFIG}")
    subprocess.run([sys.executable, "-m", *combine], cwd=ROOT, check=True)
    _FINGERPRINT.write_text(before)


def is_current() -> bool:
    """Whether the recording is of the present state of the package and its tests."""
    return _FINGERPRINT.exists() and _FINGERPRINT.read_text() == fingerprint()


def fingerprint() -> str:
    """Return a hash of the source files of the package and its tests, without the benches."""
    digest = hashlib.sha256()
    for source in (*SOURCES, "tests"):
        for file in sorted((ROOT / source).rglob("*.py")):
            if not file.is_relative_to(ROOT / "tests" / "bench"):
                digest.update(file.read_bytes())
    return digest.hexdigest()


def lines_in_functions(tree: ast.Module) -> set[int]:
    """Return the lines of the bodies of functions and lambdas, which no import executes."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            lines.update(range(node.body.lineno, (node.body.end_lineno or 0) + 1))
        elif isinstance(node, ast.FunctionDef):
            lines.update(range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1))
    return lines


def named_test(context: str) -> str:
    """Return the test of a context: that of its process, and after "|" that of a forked rank."""
    before, forked, last = context.rpartition("|tests/")
    test = f"tests/{last}" if forked and before else context
    for stage in (" (setup)", " (call)", " (teardown)"):
        test = test.removesuffix(stage)
    return test

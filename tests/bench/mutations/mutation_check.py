"""Mutation check: how many of the planted faults `make test` finds.

.venv/bin/python tests/bench/mutations/mutation_check.py [--record] [--fault N]...

`make bench ARGS=mutations` records once and checks all faults. A fault is planted in a copy of the
repository. There the tests that execute its lines run, cheapest first: single tests, then files of
jobs, as a job often runs in a fixture of the file. If they all pass, the whole `make test` runs.
A test that fails counts if it passes without the fault. Results are kept in `.build/mutations`, and
a check that is interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ == "__main__":
    _TESTS = Path(__file__).resolve().parents[2]  # for `bench`
    sys.path[:1] = [str(_TESTS), str(_TESTS / "support")]

from bench.bench_options import Options
from bench.mutations.faulty_copy import faulty_copy, python_of
from bench.mutations.planted_faults import FAULTS, PlantedFault
from bench.mutations.recorded_tests import FOLDER, ROOT, Recording, is_current, record
from bench.result_table import Row, render
from scripts.optimizers import use_own_compiler

GOAL = 27
SELECTION = ("-m", "not slow")  # as in the Makefile
EVERYTHING = ("-n", "2")  # of make test-all
QUICK, QUICK_PACKAGE = ("tests/metrics/test_catalog.py",), "metrics/catalog"
# This test fails by any fault of the list.
_OF_THE_LIST = "tests/test_planted_faults.py"
_RESULTS = FOLDER / "results.json"
_WHOLE_RUN_SECONDS = 3 * 3600.0
_NO_TESTS = 5  # pytest's exit code if all are deselected
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result for one fault.

    Attributes:
        found_by: The test that found it; None if none did.
        seconds: Duration of the check.
        whole_run: Whether the whole `make test` was needed.
        covering: Number of tests that execute its lines; all if an import does.
    """

    found_by: str | None
    seconds: float
    whole_run: bool
    covering: int


def bench(options: Options) -> Iterator[Row]:
    """Yield the test that found each fault, and how many were found."""
    if not is_current():
        record(QUICK if options.quick else EVERYTHING)
    recording = Recording()
    results = _stored()
    for fault in FAULTS:
        if options.quick and fault.package != QUICK_PACKAGE:
            continue
        if fault.file not in results:
            results[fault.file] = check(fault, recording, may_run_all=not options.quick)
            _RESULTS.write_text(
                json.dumps({name: asdict(one) for name, one in results.items()}, indent=2)
            )
        yield _row(fault, results[fault.file])
    found = sum(result.found_by is not None for result in results.values())
    if not options.quick:
        yield Row(
            what="planted faults that make test finds",
            measured=f"{found} of {len(FAULTS)}",
            goal=f">= {GOAL}",
            met=found >= GOAL,
        )


def check(fault: PlantedFault, recording: Recording, *, may_run_all: bool = True) -> Result:
    """Plant a fault, and run the tests that execute its lines, and all tests if those pass."""
    start = time.monotonic()
    covering = _covering(fault, recording)
    whole_run = False
    with faulty_copy(fault) as copy:
        found = _first_failure(copy, covering, recording)
        if found is None and may_run_all:
            whole_run = True
            found = _failure_of_make_test(copy)
    return Result(
        found_by=found,
        seconds=time.monotonic() - start,
        whole_run=whole_run,
        covering=len(covering),
    )


def _covering(fault: PlantedFault, recording: Recording) -> set[str]:
    """Return the tests to run: if an import executes the lines, all that start no job."""
    source = (ROOT / fault.file).read_text()
    first = source[: source.index(fault.old)].count("\n") + 1
    lines = range(first, first + fault.old.rstrip("\n").count("\n") + 1)
    covering = recording.covering(fault.file, lines)
    # Faults have to be found by `make test`.
    tests = {name: test for name, test in recording.tests.items() if not test.is_slow}
    if covering is None:
        covering = {name for name, test in tests.items() if not test.is_job}
    return {
        name
        for name in covering & tests.keys()
        if tests[name].passed and _file_of(name) != _OF_THE_LIST
    }


def _first_failure(copy: Path, covering: set[str], recording: Recording) -> str | None:
    """Return the test that finds the fault: single tests come first, then files of jobs."""
    tests = recording.tests
    seconds_of: dict[str, float] = {}
    for name, test in tests.items():
        seconds_of[_file_of(name)] = seconds_of.get(_file_of(name), 0.0) + test.seconds
    in_order = [name for name in tests if name in covering and not tests[name].is_job]
    single = sorted(in_order, key=lambda name: (seconds_of[_file_of(name)], _file_of(name)))
    job_files = {_file_of(name) for name in covering if tests[name].is_job}
    groups = [single] if single else []
    groups += [[file] for file in sorted(job_files, key=lambda file: seconds_of[file])]
    for group in groups:
        expected = sum(tests[name].seconds if name in tests else seconds_of[name] for name in group)
        if (found := _failing(copy, group, 300 + 5 * expected)) is not None:
            return found
    return None


def _failing(copy: Path, names: Sequence[str], limit_seconds: float) -> str | None:
    """Run tests until one fails that passes without the fault; return it."""
    excluded: list[str] = []
    while True:
        chosen = copy / ".build" / "chosen-tests"
        chosen.parent.mkdir(exist_ok=True)
        chosen.write_text("\n".join(names) + "\n")
        deselected = [f"--deselect={name}" for name in excluded]
        command = [str(python_of(copy)), "-m", "pytest", "-q", "-x", *SELECTION, *deselected]
        failed = _failed_tests([*command, f"@{chosen}"], copy, limit_seconds)
        if failed is None:
            return f"{names[0]} (did not end within {limit_seconds:.0f} s)"
        if not failed:
            return None
        if _passes_without_fault(failed[0]):
            return failed[0]
        excluded.append(failed[0])


def _failure_of_make_test(copy: Path) -> str | None:
    command = ["make", "test", f"ARGS=-q --deselect={_OF_THE_LIST}"]
    failed = _failed_tests(command, copy, _WHOLE_RUN_SECONDS)
    if failed is None:
        return f"make test (did not end within {_WHOLE_RUN_SECONDS:.0f} s)"
    return next((name for name in failed if _passes_without_fault(name)), None)


def _passes_without_fault(name: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", *SELECTION, name]
    return _failed_tests(command, ROOT, _WHOLE_RUN_SECONDS) == []


def _failed_tests(command: Sequence[str], folder: Path, limit_seconds: float) -> list[str] | None:
    """Run pytest, and return the tests that failed; None if it does not end in time.

    Raises:
        RuntimeError: It failed without the name of a test, so that nothing can be concluded.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=limit_seconds)[0]
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    failed = failed_tests(output)
    if process.returncode not in (0, _NO_TESTS) and not failed:
        raise RuntimeError(f"{' '.join(command)} failed:\n{output[-3000:]}")
    return failed


def failed_tests(output: str) -> list[str]:
    """Return the failed tests of pytest's summary; a file that cannot be collected is one."""
    return _FAILED.findall(output)


def _file_of(name: str) -> str:
    return name.partition("::")[0]


def _stored() -> dict[str, Result]:
    """Return the results since the last recording."""
    stored = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
    return {file: Result(**result) for file, result in stored.items()}


def _row(fault: PlantedFault, result: Result) -> Row:
    whole = ", whole run" if result.whole_run else ""
    return Row(
        what=f"{fault.file}: {fault.kind}",
        measured=result.found_by or "MISSED",
        spread=f"{result.covering} tests, {result.seconds:.0f} s{whole}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Check how many planted faults the tests find.")
    parser.add_argument("--record", action="store_true", help="record what the tests execute")
    parser.add_argument(
        "--fault", type=int, action="append", metavar="N", help=f"of 1 to {len(FAULTS)}"
    )
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no test is left behind
    use_own_compiler()  # or each copy would compile DeepSpeed's optimizers again
    if asked.record:
        record(EVERYTHING)
    for number in asked.fault or ():
        fault = FAULTS[number - 1]
        print(render([_row(fault, check(fault, Recording()))]), flush=True)
    if not asked.record and not asked.fault:
        print(render(list(bench(Options(steps=0, quick=False)))), flush=True)


if __name__ == "__main__":
    main()

"""Makes tables of the results of `make verify-gpu`: for the console and for the documents.

README.md, docs/trust.md and docs/reference/metrics.md have a table each, between two comments. The
tables are written from `tests/gpu/results/`; without a result for a check they say "not yet".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu.checks import CHECKS, SUBJECTS, Check

NOT_YET = "not yet"
BEGIN, END = "<!-- written by tests/gpu/verify.py publish -->", "<!-- end -->"
_BLOCK = re.compile(f"(?<={BEGIN}\\n).*?(?={END})", re.DOTALL)

Result = Mapping[str, Any]
Results = Mapping[str, Result]


def console_table(result: Mapping[str, Any]) -> str:
    """Return the result of a part as text: a line for each check, its figures, and its failures."""
    lines = [f"{'check':22}{'outcome':12}{'seconds':>8}  tests"]
    for name, check in result["checks"].items():
        tests = check.get("tests", [])
        passed = sum(test["outcome"] == "passed" for test in tests)
        said = f"{passed} of {len(tests)} passed" if tests else check.get("reason", "")
        lines.append(f"{name:22}{check['outcome']:12}{check.get('seconds', 0):8.1f}  {said}")
        if tests and "reason" in check:
            lines.append(f"    {check['reason']}")
        for test in tests:
            if test["outcome"] == "failed":
                last = test.get("message", "").strip().splitlines()[-1:]
                lines.append(f"    FAILED {test['test']}: {''.join(last)}")
            if test.get("figures"):
                lines.append(f"    {test['test']}: {json.dumps(test['figures'], default=str)}")
    lines.append(f"{sum(1 for _ in result['checks'])} checks in {result['seconds']:.0f} s")
    return "\n".join(lines)


def published(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result without outputs and messages, which have paths of the machine."""
    kept = {"test", "outcome", "seconds", "figures"}
    checks = {
        name: {
            key: [{k: v for k, v in test.items() if k in kept} for test in value]
            if key == "tests"
            else value
            for key, value in check.items()
            if key != "output"
        }
        for name, check in result["checks"].items()
    }
    return {**result, "checks": checks}


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the last result of each check, with the machine of its part."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("part-*.json")):
        part = json.loads(file.read_text())
        for name, check in part["checks"].items():
            found[name] = {**check, "machine": part["machine"]}
    return found


def full_table(results: Results) -> str:
    """Return a table of all checks."""
    rows = [
        f"| {check.subject} | {check.shows} | {_verdict(check, results.get(check.name))} |"
        for check in CHECKS
    ]
    return "\n".join(["| subject | checked | verified on |", "|---|---|---|", *rows])


def subject_table(results: Results) -> str:
    """Return a table with a row for each subject."""
    rows = [
        f"| {subject} | {_of_subject([c for c in CHECKS if c.subject == subject], results)} |"
        for subject in SUBJECTS
    ]
    return "\n".join(["| subject | verified on |", "|---|---|", *rows])


# The table of each document.
DOCUMENTS = {
    "README.md": subject_table,
    "docs/trust.md": full_table,
    "docs/reference/metrics.md": subject_table,
}


def with_table(text: str, table: str) -> str:
    """Return a document with a new table between its two comments.

    Raises:
        ValueError: The document does not have exactly one pair of comments.
    """
    replaced, count = _BLOCK.subn(lambda _: f"\n{table}\n\n", text)
    if count != 1:
        raise ValueError(f"{count} places for a table, between {BEGIN!r} and {END!r}; give it one")
    return replaced


def write_documents(root: Path, results_folder: Path) -> None:
    """Write the tables of all documents."""
    results = read_results(results_folder)
    for name, table in DOCUMENTS.items():
        file = root / name
        file.write_text(with_table(file.read_text(), table(results)))


def _verdict(check: Check, result: Result | None) -> str:
    """Describe where and when a check has passed, or why it has not."""
    if result is None:
        return NOT_YET
    outcomes = [test["outcome"] for test in result.get("tests", ())]
    match result["outcome"]:
        case "passed":
            skipped = outcomes.count("skipped")
            rest = f"; {skipped} of {len(outcomes)} tests skipped" if skipped else ""
            return _place(check, result) + rest
        case "failed":
            failed = outcomes.count("failed")
            return f"failed: {failed} of {len(outcomes)} tests ({_place(check, result)})"
        case "skipped" | "not run":
            return f"{NOT_YET}: {result['reason']}"
    return f"{result['outcome']} ({_place(check, result)})"


def _of_subject(checks: Sequence[Check], results: Results) -> str:
    """Describe on which machines the checks of a subject have passed, and which have not."""
    places, open_checks, failed = [], [], []
    for check in checks:
        result = results.get(check.name)
        if result is None or result["outcome"] in ("skipped", "not run"):
            open_checks.append(f"{NOT_YET}: {check.shows}")
        elif result["outcome"] == "passed":
            places.append(_place(check, result))
        else:
            failed.append(f"{check.name}: {result['outcome']}")
    if not places and not failed:
        return NOT_YET
    return "; ".join(dict.fromkeys([*places, *failed, *open_checks]))


def _place(check: Check, result: Result) -> str:
    """Describe the machine and the date of a result."""
    machine = result["machine"]
    times = f"{check.num_gpus} x " if check.num_gpus > 1 else ""
    return f"{times}{machine['gpu']}, torch {machine['torch']}, {result['date']}"

"""Report and comparison of real jobs: figures and pages have the values of the logs.

The values are computed again from the lines of the run log and from the last line of /metrics, by
the definitions in the documents. Covers `run_summary.py` and `run_comparison.py` on what ranks
write.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_page import chromium, opened
from scripts.launching import TIMEOUT_SECONDS, ZEROWATCH, environment

from zerowatch.metrics.catalog.communication import COMM_CAUSE_SECONDS, COMM_EXPOSED_SECONDS
from zerowatch.metrics.catalog.training import PHASE_SECONDS, STEPS
from zerowatch.runtime.reports.metrics_reader import read_metrics

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

NUM_STEPS, WARM_UP = 40, 5
Record = dict[str, Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The run folders of two jobs of two ranks, with ZeRO 2 and 3."""
    folder = tmp_path_factory.mktemp("jobs")
    for stage in (2, 3):
        subprocess.run(
            [ZEROWATCH, "demo", "--steps", str(NUM_STEPS), "--stage", str(stage)],
            cwd=folder,
            env=environment(ZEROWATCH_RUN_ID=f"stage-{stage}", ZEROWATCH_SERVE_PORT="0"),
            check=True,
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
        )
    return folder / "runs/stage-2", folder / "runs/stage-3"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def records_of(folder: Path) -> list[list[Record]]:
    """The records of each rank."""
    logs = sorted(folder.glob("rank-*.jsonl"))
    return [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]


def training_seconds(record: Record) -> float:
    phases = record["phase_seconds"]
    return float(record["seconds"] - phases.get("eval", 0.0) - phases.get("checkpoint", 0.0))


def command(*arguments: object) -> str:
    done = subprocess.run(
        [ZEROWATCH, *map(str, arguments)], check=True, capture_output=True, text=True
    )
    return done.stdout


def test_the_report_has_the_values_of_the_run_log_and_of_the_metrics(
    runs: tuple[Path, Path], browser: Any
) -> None:
    folder = runs[0]
    ranks = records_of(folder)
    everything = [record for records in ranks for record in records]

    def share(part: Callable[[Record], float]) -> float:
        return sum(map(part, everything)) / sum(map(training_seconds, everything))

    def exposed(record: Record) -> float:
        outside = record["comm_exposed_phase_seconds"]
        return float(
            record["comm_exposed_seconds"]
            - outside.get("eval", 0.0)
            - outside.get("checkpoint", 0.0)
        )

    sent = [c["wire_bytes"] for record in everything for c in record["collectives"].values()]
    expected = {
        "steps": NUM_STEPS,
        "step_seconds": statistics.fmean(map(training_seconds, everything)),
        "step_seconds_p50": statistics.median(map(training_seconds, ranks[0])),
        "comm_exposed_ratio": share(exposed),
        "comm_wire_bytes_per_step": sum(sent) / len(everything),
        "tokens_per_second": sum(
            sum(record["tokens"] for record in records) / sum(map(training_seconds, records))
            for records in ranks
        ),
        **{
            f"{phase}_ratio": share(lambda record, phase=phase: record["phase_seconds"][phase])  # type: ignore[misc]
            for phase in ("forward", "backward", "optimizer")
        },
    }

    report = json.loads(command("report", folder, "--json"))
    command("report", folder, "--html")
    with opened(browser, (folder / "report.html").as_uri()) as (page, seen):
        shown = page.eval_on_selector_all(
            "[data-figure]", "all => all.map(e => [e.dataset.figure, Number(e.dataset.value)])"
        )

    assert {name: report["figures"][name] for name in expected} == {
        name: pytest.approx(value, rel=1e-5) for name, value in expected.items()
    }
    assert len(shown) >= 5
    assert all(report["figures"][name] == value for name, value in shown)
    assert [row["steps"] for row in report["ranks"]] == [NUM_STEPS] * 2
    assert (report["status"], seen) == ("completed", [])
    metrics = read_metrics(folder, frozenset()).ranks
    assert {rank.total(STEPS.name) for rank in metrics.values()} == {NUM_STEPS}
    causes = {each["name"]: each["seconds"] for each in report["causes"]}
    assert sum(causes.values()) == pytest.approx(
        statistics.fmean(sum(map(exposed, records)) for records in ranks), rel=1e-5
    )
    for cause, seconds in causes.items():
        if cause != "unknown":
            totals = [rank.total(COMM_CAUSE_SECONDS.name, cause=cause) for rank in metrics.values()]
            assert seconds == pytest.approx(
                statistics.fmean(total or 0.0 for total in totals), rel=1e-5
            )
    for rank, records in zip(metrics.values(), ranks, strict=True):
        assert rank.total(PHASE_SECONDS.name) == pytest.approx(
            sum(record["seconds"] for record in records), rel=1e-5
        )
        assert rank.total(COMM_EXPOSED_SECONDS.name) == pytest.approx(
            sum(map(exposed, records)), rel=1e-5
        )


def test_the_comparison_has_the_values_of_both_run_logs(
    runs: tuple[Path, Path], browser: Any
) -> None:
    expected = {}
    for letter, folder in zip("ab", runs, strict=True):
        compared = [
            record for records in records_of(folder) for record in records[WARM_UP:NUM_STEPS]
        ]
        seconds = statistics.fmean(map(training_seconds, compared))
        sent = [c["wire_bytes"] for record in compared for c in record["collectives"].values()]
        expected[letter] = {
            "step_seconds": seconds,
            "tokens_per_second": 2 * statistics.fmean(r["tokens"] for r in compared) / seconds,
            "phase.forward": statistics.fmean(r["phase_seconds"]["forward"] for r in compared),
            "wire_bytes": sum(sent) / len(compared),
        }

    options = ("--warm-up", WARM_UP)
    compared_json = json.loads(command("compare", *runs, *options, "--json"))
    command("compare", *runs, *options, "--html")
    with opened(browser, (runs[1] / "compare.html").as_uri()) as (page, seen):
        shown = dict(
            page.eval_on_selector_all(
                "[data-measure]", "all => all.map(e => [e.dataset.measure, e.dataset.value])"
            )
        )

    measures = {measure["name"]: measure for measure in compared_json["measures"]}
    for letter, values in expected.items():
        assert {name: measures[name][letter] for name in values} == {
            name: pytest.approx(value, rel=1e-4) for name, value in values.items()
        }
    change = expected["b"]["tokens_per_second"] / expected["a"]["tokens_per_second"] - 1
    assert float(shown["tokens_per_second"]) == pytest.approx(change, abs=1e-4)
    assert any(each["name"] == "zero_optimization.stage" for each in compared_json["differences"])
    assert seen == []

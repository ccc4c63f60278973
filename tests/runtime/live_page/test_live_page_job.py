"""The live page of a real job: its figures are those of /metrics and of the run log."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from browser import Visit, open_browser
from fakes.scraper import eventually, get
from prometheus_client.parser import text_string_to_metric_families
from scripts.launching import TIMEOUT_SECONDS, ZEROWATCH, environment

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

STEPS = 40
# Counters that only grow, so that a value on the page lies between those of two scrapes.
COUNTERS = {
    "training.steps": "zerowatch_steps_total",
    "communication.exposed_seconds": "zerowatch_comm_exposed_seconds_total",
    "communication.seconds": "zerowatch_comm_union_seconds_total",
    "communication.wire_bytes": "zerowatch_collective_wire_bytes_total",
    "phases.forward": ("zerowatch_phase_seconds_total", "forward"),
    "phases.backward": ("zerowatch_phase_seconds_total", "backward"),
    "phases.optimizer": ("zerowatch_phase_seconds_total", "optimizer"),
    "causes.imbalance": ("zerowatch_comm_cause_seconds_total", "imbalance"),
    "causes.bandwidth": ("zerowatch_comm_cause_seconds_total", "bandwidth"),
    "causes.latency": ("zerowatch_comm_cause_seconds_total", "latency"),
    "causes.redundancy": ("zerowatch_comm_cause_seconds_total", "redundancy"),
}


@pytest.fixture
def job(tmp_path):
    variables = {"ZEROWATCH_RUN_ID": "live", "ZEROWATCH_SERVE_PORT": "0"}
    command = [ZEROWATCH, "demo", "--steps", str(STEPS)]
    with (tmp_path / "output").open("w") as output:
        running = subprocess.Popen(
            command, cwd=tmp_path, env=environment(**variables), stdout=output, stderr=output
        )
        yield running
        running.terminate()
        running.wait(TIMEOUT_SECONDS)


def sums_of(address: str) -> dict[object, float]:
    """The sums of the samples of /metrics by name, and by name and each value of a label."""
    sums: dict[object, float] = {}
    for family in text_string_to_metric_families(get(address)[2]):
        for sample in family.samples:
            for key in (sample.name, *((sample.name, v) for v in sample.labels.values())):
                sums[key] = sums.get(key, 0.0) + sample.value
    return sums


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "rank-0.jsonl").read_text().splitlines()]


def address_of(folder: Path) -> str | None:
    """The address of rank 0, once both ranks have published theirs."""
    try:
        targets = json.loads((folder / "targets.json").read_text())
    except (OSError, ValueError):
        return None
    return targets[0]["targets"][0] if len(targets) == 2 else None


def test_the_page_of_a_job_agrees_with_its_metrics_and_its_run_log(job, tmp_path):
    folder = tmp_path / "runs" / "live"
    assert eventually(lambda: address_of(folder) is not None, TIMEOUT_SECONDS, 0.2)
    address = address_of(folder)

    with open_browser() as browser:
        visit = Visit(browser)
        visit.page.goto(f"http://{address}/")
        visit.page.wait_for_function(
            "() => Number(document.querySelector('[data-key=\"training.steps\"]')"
            "?.dataset.value) >= 12"
        )
        before = sums_of(address)
        steps = before["zerowatch_steps_total"]
        visit.page.wait_for_function(
            "steps => Number(document.querySelector('[data-key=\"training.steps\"]')"
            ".dataset.value) > steps",
            arg=steps,
        )
        shown = visit.figures()
        after = sums_of(address)

        for key, name in COUNTERS.items():
            assert before[name] <= shown[key] <= after[name], key
        assert shown["memory.cpu.limit"] == after[("zerowatch_memory_limit_bytes", "cpu")]
        points = json.loads(get(address, "/live/state")[2])["points"]
        logged = {record["step"]: record for record in records(folder)}
        single = [index for index, steps in enumerate(points["steps"]) if steps == 1]
        for index in single:
            record = logged[points["step"][index]]
            assert points["loss"][index] == pytest.approx(record["loss"], rel=1e-5)
            backward = record["phase_seconds"]["backward"]
            assert points["phases"]["backward"][index] == pytest.approx(backward, rel=1e-5)

        assert visit.problems == []
        visit.page.wait_for_selector("#status:text('completed')", timeout=1000 * TIMEOUT_SECONDS)
        last = visit.figures()

    assert last["training.steps"] == STEPS == len(records(folder))
    assert last["training.loss"] == pytest.approx(records(folder)[-1]["loss"])

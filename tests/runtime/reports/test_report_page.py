"""Tests of the report in a browser: values, charts, light and dark, and a narrow screen.

Covers `report_page.py`, `page_parts.py`, `run_charts.py` and the files in `assets/`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from browser_page import chromium, opened
from recorded_metrics import RecordedRank
from recorded_runs import run_of_attempts, step_record, write_run

from zerowatch.metrics.catalog import communication, memory, training
from zerowatch.metrics.step_record import StepRecord
from zerowatch.runtime.reports.metrics_reader import read_metrics
from zerowatch.runtime.reports.report_page import facts_of, page_html, without_decisions
from zerowatch.runtime.reports.run_charts import CHART_SERIES, MAX_POINTS, Chart, charts_of
from zerowatch.runtime.reports.run_reader import read_run
from zerowatch.runtime.reports.run_summary import (
    DeviceFigures,
    Incident,
    RunSummary,
    TunerSummary,
    summary_of,
)
from zerowatch.runtime.reports.write_report import make_report

CHARTS = ("phases", "exposed", "causes", "throughput", "loss", "gradient_norm", "memory")


def recorded(folder: Path, *, steps: int = 60) -> Path:
    """A run of two ranks, of which the second is slower in forward from the middle on."""

    def record(rank: int, step: int) -> StepRecord:
        late = 0.05 if rank and step > steps / 2 else 0.0
        return step_record(
            step,
            seconds=0.5 + late,
            phase_seconds={"forward": 0.1 + late, "backward": 0.35, "optimizer": 0.05},
            comm_exposed_seconds=0.15 - late,
        )

    write_run(folder, steps=steps, record=record)
    for number in range(2):
        with RecordedRank(folder, number, metrics_interval_seconds=5.0) as rank:
            for count in range(1, 6):
                rank.recorder.add(training.STEPS, steps / 5)
                rank.recorder.add(training.PHASE_SECONDS, 5.0, "forward")
                rank.recorder.add(communication.COMM_EXPOSED_SECONDS, 1.0, "dp")
                rank.recorder.add(communication.COMM_CAUSE_SECONDS, 0.8, "imbalance")
                rank.recorder.add(communication.COMM_CAUSE_SECONDS, 0.05 * count, "latency")
                rank.recorder.set(training.MFU, 0.3)
                rank.recorder.set(memory.MEMORY_CATEGORY_BYTES, 100e6, "cpu", "activations")
                rank.tick()
    return folder


def test_the_facts_of_one_process_without_deepspeed_name_neither_a_stage_nor_a_backend(
    tmp_path: Path,
) -> None:
    write_run(tmp_path, ranks=1)
    with RecordedRank(tmp_path, 0, metrics_interval_seconds=5.0) as rank:
        rank.recorder.set_info(
            training.RUN_INFO, "run", "0.1.0", "2.13.0", "none", "none", "cpu", "none", "1"
        )
        rank.tick()

    ranks, hardware, *_, versions = facts_of(summary_of(tmp_path))

    assert (ranks, hardware, versions) == ("1 rank", "cpu", "torch 2.13.0, zerowatch 0.1.0")


def test_a_log_whose_facts_are_damaged_has_a_report(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=1)
    with RecordedRank(tmp_path, 0) as rank:
        rank.recorder.set_info(
            training.RUN_INFO, "run", "0.1.0", "2.13.0", "0.19.8", "gloo", "cpu", "2", "1"
        )
    log = tmp_path / "metrics-0.jsonl"
    log.write_text(log.read_text().replace("deepspeed", "deep peed"))

    *_, versions = facts_of(summary_of(tmp_path))

    assert versions == "torch 2.13.0, zerowatch 0.1.0"


def charts_by_name(folder: Path) -> dict[str, Chart]:
    charts = charts_of(read_run(folder), read_metrics(folder, CHART_SERIES))
    return {chart.name: chart for chart in charts}


def curves(chart: Chart) -> dict[str, list[float | None]]:
    return {curve.name: list(curve.values) for curve in chart.curves}


def test_a_short_run_has_a_point_for_each_step(tmp_path: Path) -> None:
    charts = charts_by_name(recorded(tmp_path / "run"))

    phases = curves(charts["phases"])
    assert charts["phases"].steps == list(range(1, 61))
    assert phases["forward"][:30] == [pytest.approx(0.1)] * 30
    assert phases["forward"][30:] == [pytest.approx(0.125)] * 30
    exposed = curves(charts["exposed"])
    assert exposed["all ranks"][0] == pytest.approx(0.3)
    assert exposed["lowest rank"][-1] == pytest.approx(0.1 / 0.55)
    assert exposed["highest rank"][-1] == pytest.approx(0.15 / 0.5)
    assert curves(charts["loss"])["loss"][9] == pytest.approx(0.5)
    assert curves(charts["throughput"])["tokens"][0] == pytest.approx(2 * 1024 / 0.5)
    assert curves(charts["memory"])["peak on cpu"][0] == pytest.approx(650e6 / 2e9)


def test_causes_over_time_are_shares_of_training_time(tmp_path: Path) -> None:
    chart = charts_by_name(recorded(tmp_path / "run"))["causes"]

    shares = curves(chart)
    assert set(shares) == {"imbalance", "latency"}
    # No time passes between the last record and the one at the end.
    assert shares["imbalance"] == [pytest.approx(0.16)] * 4 + [None]
    assert shares["latency"][0] == pytest.approx(0.02)
    assert list(chart.steps) == sorted(chart.steps)


def test_a_long_run_has_few_points_with_the_same_mean(tmp_path: Path) -> None:
    charts = charts_by_name(recorded(tmp_path / "run", steps=3000))

    chart = charts["phases"]
    forward = [value for value in curves(chart)["forward"] if value is not None]
    assert len(chart.steps) <= MAX_POINTS
    assert chart.steps[-1] == 3000
    assert math.fsum(forward) / len(forward) == pytest.approx(0.1125)
    assert "6 steps" in chart.note


def test_steps_without_a_value_are_left_out_of_shares_and_rates(tmp_path: Path) -> None:
    def record(rank: int, step: int) -> StepRecord:
        known = step % 2 == 0
        return step_record(
            step, comm_exposed_seconds=0.05 if known else None, tokens=1024 if known else None
        )

    folder = write_run(tmp_path / "run", ranks=1, steps=2 * MAX_POINTS, record=record)
    charts = charts_by_name(folder)

    exposed, tokens = curves(charts["exposed"])["all ranks"], curves(charts["throughput"])["tokens"]
    assert exposed == [pytest.approx(0.1)] * MAX_POINTS
    assert tokens == [pytest.approx(1024 / 0.5)] * MAX_POINTS


@pytest.mark.parametrize("steps", [400, 1300, 1900])
def test_the_throughput_of_a_large_job_is_that_of_all_ranks_at_each_point(
    tmp_path: Path, steps: int
) -> None:
    folder = run_of_attempts(tmp_path / "run", (96, steps))

    tokens = curves(charts_by_name(folder)["throughput"])["tokens"]

    figure = summary_of(folder).figures["tokens_per_second"]
    assert figure == pytest.approx(96 * 1024 / 0.5)
    assert tokens == [pytest.approx(figure)] * len(tokens)


def test_the_throughput_of_an_elastic_job_follows_the_number_of_ranks(tmp_path: Path) -> None:
    folder = run_of_attempts(tmp_path / "run", (16, 20), (8, 60), (16, 80))
    (folder / "rank-3.jsonl").unlink()

    tokens = curves(charts_by_name(folder)["throughput"])["tokens"]

    expected = [16] * 20 + [8] * 40 + [16] * 20
    assert tokens == [pytest.approx(ranks * 1024 / 0.5) for ranks in expected]


@pytest.mark.parametrize("steps", [700, 2600])
def test_checkpoints_at_steps_that_more_ranks_record_count_once(tmp_path: Path, steps: int) -> None:
    def record(rank: int, step: int) -> StepRecord:
        phases = {"forward": 0.5, "checkpoint": 0.0 if step % 100 else 60.0}
        return step_record(step, seconds=sum(phases.values()), phase_seconds=phases)

    folder = run_of_attempts(tmp_path / "run", (72, steps), record=record)

    chart = charts_by_name(folder)["phases"]
    values = [value or 0.0 for value in curves(chart)["checkpoint"]]
    sizes = [after - before for before, after in pairwise([0.0, *chart.steps])]
    total = math.fsum(value * size for value, size in zip(values, sizes, strict=True))
    (share,) = [each for each in summary_of(folder).phases if each.name == "checkpoint"]
    assert total / steps == pytest.approx(share.seconds_per_step) == pytest.approx(0.6)


def test_steps_that_a_restart_repeats_are_joined(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ranks=1)
    log = folder / "rank-0.jsonl"
    log.write_bytes(log.read_bytes() + b"".join(log.read_bytes().splitlines(keepends=True)[5:]))

    chart = charts_by_name(folder)["phases"]

    assert chart.steps == list(range(1, 11))
    assert curves(chart)["forward"] == [pytest.approx(0.1)] * 10


def test_charts_over_time_do_not_go_back_at_a_restart(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ranks=1, steps=100)
    log = folder / "rank-0.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    for number, record in enumerate(records[50:]):
        record.update(step=21 + number, attempt=1)
    log.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    with RecordedRank(folder, metrics_interval_seconds=2.0) as rank:
        for _ in range(25):
            rank.recorder.add(training.PHASE_SECONDS, 2.0, "forward")
            rank.recorder.add(communication.COMM_CAUSE_SECONDS, 0.5, "latency")
            rank.recorder.set(training.MFU, 0.3)
            rank.tick()

    charts = charts_by_name(folder)

    for name in ("causes", "mfu"):
        assert list(charts[name].steps) == sorted(charts[name].steps)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = recorded(tmp_path_factory.mktemp("runs") / "night")
    (folder / "report.html").write_text(make_report(folder)[1])
    return folder


def address(folder: Path) -> str:
    return (folder / "report.html").as_uri()


@pytest.mark.slow
def test_the_page_shows_the_values_of_the_logs_and_requests_nothing(
    browser: Any, folder: Path
) -> None:
    figures = summary_of(folder).figures
    with opened(browser, address(folder)) as (page, seen):
        cards = page.eval_on_selector_all(
            "[data-figure]", "all => all.map(e => [e.dataset.figure, e.dataset.value])"
        )
        drawn = page.eval_on_selector_all(
            ".chart canvas",
            "all => all.map(e => [e.closest('.chart').id, new Set(e.getContext('2d')"
            ".getImageData(0, 0, e.width, e.height).data).size > 8])",
        )
        forward = page.text_content("#chart-phases .u-legend .u-series:nth-child(2) .u-value")
        causes = page.text_content("#why-communication-was-waited-for table")

    assert {name: float(value) for name, value in cards} == {
        name: figures[name] for name, _ in cards
    }
    assert figures["comm_exposed_ratio"] == pytest.approx(16.5 / 61.5)
    assert {name.removeprefix("chart-") for name, is_drawn in drawn if is_drawn} >= set(CHARTS)
    assert forward == "125 ms"  # of the last step, mean over the ranks
    assert "imbalance: another rank was late" in causes
    assert seen == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_its_screen_in_light_and_dark(
    browser: Any, folder: Path, scheme: str, width: int
) -> None:
    viewport = {"width": width, "height": 800}
    with opened(browser, address(folder), viewport=viewport, color_scheme=scheme) as (page, seen):
        needed = page.evaluate("document.documentElement.scrollWidth")
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        clipped = page.eval_on_selector_all(
            "p, li, .verdict, .card", "all => all.filter(e => e.scrollWidth > e.clientWidth).length"
        )
        chart_width = page.evaluate("document.querySelector('.chart canvas').clientWidth")

    assert needed == width
    assert clipped == 0
    assert chart_width <= width
    brightness = sum(map(int, background.removeprefix("rgb(").removesuffix(")").split(",")))
    assert (brightness > 400) == (scheme == "light")
    assert seen == []


@pytest.mark.slow
def test_charts_follow_the_width_and_the_theme(browser: Any, folder: Path) -> None:
    width = "document.querySelector('.uplot').clientWidth"
    with opened(browser, address(folder), viewport={"width": 1200, "height": 800}) as (page, seen):
        page.set_viewport_size({"width": 420, "height": 800})
        page.wait_for_function(f"{width} < 420")
        page.emulate_media(color_scheme="dark")
        page.wait_for_function("document.querySelectorAll('.uplot').length > 5")
        one_each = page.evaluate(
            "[...document.querySelectorAll('.chart')].every("
            "e => e.querySelectorAll('.uplot').length === 1)"
        )

    assert one_each
    assert seen == []


@pytest.mark.slow
def test_the_table_of_ranks_is_sorted_by_a_click(browser: Any, folder: Path) -> None:
    with opened(browser, address(folder)) as (page, _):
        page.click("#ranks th button:text-is('step time')")
        first = page.text_content("#ranks tbody tr td")
        page.click("#ranks th button:text-is('step time')")
        then = page.text_content("#ranks tbody tr td")

    assert (first, then) == ("1", "0")


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "empty", "one step"])
def test_a_damaged_run_opens_without_an_error(browser: Any, tmp_path: Path, damage: str) -> None:
    folder = recorded(tmp_path / "run", steps=1 if damage == "one step" else 10)
    for path in folder.glob("*-*.jsonl"):
        if damage == "empty":
            path.write_bytes(b"")
        elif damage == "cut":
            path.write_bytes(path.read_bytes()[:-30])
    (folder / "report.html").write_text(make_report(folder)[1])

    with opened(browser, address(folder)) as (page, seen):
        missing = page.text_content("#what-is-missing")

    assert seen == []
    assert ("rank-0.jsonl" in missing) == (damage != "one step")


def test_the_curves_in_the_page_are_json(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    text = page.split('id="charts">')[1].split("</script>")[0]

    charts = json.loads(text)

    assert {chart["name"] for chart in charts} >= set(CHARTS)


def summary_with(tmp_path: Path, **tuner: Any) -> RunSummary:
    """The summary of a run of 20 steps, 30 s and a tuner."""
    folder = write_run(
        tmp_path / "run",
        steps=20,
        record=lambda rank, step: step_record(step, seconds=1.5),
    )
    given: dict[str, Any] = {"mode": "advise", "state": "observe", "symptoms": {}, "decisions": ()}
    return replace(summary_of(folder), tuner=TunerSummary(**{**given, **tuner}))


@pytest.mark.parametrize(
    ("tuner", "text"),
    [
        ({"mode": "off"}, "The tuner was off."),
        (
            {"symptoms": None},
            "No decision or advice was recorded. The tuner was in the mode advise.",
        ),
        ({"symptoms": None, "mode": None}, "No decision or advice was recorded."),
        (
            {"symptoms": None, "mode": "auto", "discarded_observations": 17},
            "No decision or advice: step times changed 17 times in 30 s; each change restarts the "
            "observation. The tuner was in the mode auto.",
        ),
        (
            {},
            "No decision or advice. The tuner was in the mode advise. It found nothing that holds "
            "the run back. Last state: observe.",
        ),
        (
            {"symptoms": {"memory_idle": 0.7}, "state": None},
            "No decision or advice. The tuner was in the mode advise. It found nothing that holds "
            "the run back.",
        ),
        (
            {"symptoms": {"data_bound": 0.3, "memory_idle": 0.7, "host_bound": 0.05}},
            "No decision or advice. The tuner was in the mode advise. Symptoms: data_bound 30 %, "
            "host_bound 5.0 %. Last state: observe.",
        ),
    ],
)
def test_why_the_tuner_decided_nothing_is_said_as_far_as_it_is_known(
    tmp_path: Path, tuner: dict[str, Any], text: str
) -> None:
    assert without_decisions(summary_with(tmp_path, **tuner)) == text


@pytest.mark.parametrize(("name", "value"), [("seconds", 29.9), ("steps", 19.0)])
def test_a_short_run_has_no_diagnosis(tmp_path: Path, name: str, value: float) -> None:
    summary = summary_with(tmp_path)
    short = replace(summary, figures={**summary.figures, name: value})

    assert "too short for a diagnosis" in without_decisions(short)
    assert "too short" not in without_decisions(summary)


def page_of(tmp_path: Path, **changes: Any) -> str:
    summary = replace(summary_of(write_run(tmp_path / "run")), **changes)
    return page_html(summary, ()).replace("\N{NO-BREAK SPACE}", " ")


def test_each_reading_of_a_device_has_its_unit(tmp_path: Path) -> None:
    readings = {
        "sm_active_ratio": 0.456,
        "memory_bytes": 3 * 2**30,
        "clock_hertz": 1.98e9,
        "temperature_celsius": 61.25,
        "power_watts": 1234.5,
        "energy_joules": 7.0,
        "age_seconds": 8.0,
    }
    figures = DeviceFigures(
        device="cuda",
        readings={name: (value, value, value) for name, value in readings.items()},
        events={},
    )

    page = page_of(tmp_path, devices=(figures,))

    rows = re.findall(r"<tr><td>cuda: ([\w ]+)</td><td>([^<]+)</td>", page)
    assert rows == [
        ("sm active", "46 %"),
        ("memory", "3.00 GiB"),
        ("clock", "1.98 GHz"),
        ("temperature", "61.25 °C"),
        ("power", "1,234 W"),
        ("energy", "7 J"),
        ("age", "8 seconds"),
    ]
    assert "On the CPU, a rank measures only its own use." in page


def test_the_texts_of_reports_fill_a_megabyte_and_no_more(tmp_path: Path) -> None:
    incidents = tuple(
        Incident(kind="hang", path=f"hang-{n}.txt", rank=n, headline="", text=letter * size)
        for n, (letter, size) in enumerate([("a", 600_000), ("b", 400_001), ("c", 399_999)])
    )

    page = page_of(tmp_path, incidents=incidents)

    assert (page.count("a" * 600_000), page.count("c" * 399_999)) == (1, 0)
    assert page.count("The text is in the run folder.") == 2
    enough = page_of(tmp_path, incidents=(incidents[0], replace(incidents[1], text="b" * 400_000)))
    assert "The text is in the run folder." not in enough


def test_an_empty_run_says_what_was_not_recorded(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{}")

    page = page_html(summary_of(tmp_path), ())

    for words in (
        "No step was recorded.",
        "Communication was not recorded.",
        "Memory: not recorded.",
        "Devices: not recorded.",
        "Loss: not recorded.",
        "No decision or advice was recorded.",
        "No report on an error, a leak or a hang.",
        "No rank has recorded a step.",
        "Cost: not recorded.",
        "No figure is beyond its usual limit.",
    ):
        assert words in page


@pytest.mark.parametrize(("last_seconds", "steps"), [(4.0, [20, 48]), (6.0, [20, 40, 52])])
def test_a_last_interval_of_less_than_half_is_joined_with_the_one_before(
    tmp_path: Path, last_seconds: float, steps: list[float]
) -> None:
    folder = write_run(tmp_path / "run", ranks=1, steps=100)  # a step ends each half of a second
    with RecordedRank(folder, metrics_interval_seconds=1.0) as rank:
        for seconds in (10.0, 10.0, last_seconds):
            rank.recorder.add(training.PHASE_SECONDS, 4.0, "forward")
            rank.recorder.add(communication.COMM_CAUSE_SECONDS, 1.0, "latency")
            rank.tick(seconds)

    assert charts_by_name(folder)["causes"].steps == steps


def test_the_mfu_over_time_is_the_mean_of_the_ranks(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=40)
    for number in range(2):
        with RecordedRank(folder, number, metrics_interval_seconds=5.0) as rank:
            for count in range(4):
                rank.recorder.set(training.MFU, (0.2, 0.4)[number] + 0.1 * count)
                rank.tick()

    chart = charts_by_name(folder)["mfu"]

    assert curves(chart)["MFU"][:4] == [pytest.approx(0.3 + 0.1 * count) for count in range(4)]
    assert chart.steps[:4] == [1, 10, 20, 30]
    assert (chart.title, chart.unit) == ("Model FLOPs utilization", "ratio")

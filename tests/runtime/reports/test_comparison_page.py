"""Tests of the page of a comparison in a browser: values, charts, light and dark, narrow screens.

Covers `comparison_page.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser_page import chromium, opened
from recorded_metrics import RecordedRank
from recorded_runs import run_of_attempts, step_record, write_run

from zerowatch.metrics.catalog import communication
from zerowatch.metrics.step_record import StepRecord
from zerowatch.runtime.reports.comparison_page import comparison_page
from zerowatch.runtime.reports.run_comparison import compare, read_source

pytestmark = pytest.mark.slow


def recorded(folder: Path, *, seed: int, backward: float, **more: Any) -> Path:
    noise = np.random.default_rng(seed).normal(scale=0.01, size=(2, 301))

    def record(rank: int, step: int) -> StepRecord:
        phases = {
            "forward": 0.1 + float(noise[0, step]),
            "backward": backward + float(noise[1, step]),
            "optimizer": 0.05,
        }
        return step_record(
            step,
            seconds=sum(phases.values()),
            phase_seconds=phases,
            comm_exposed_seconds=phases["backward"] / 4,
            loss=5 / (1 + step**0.3),
        )

    return write_run(folder, steps=300, record=record, **more)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    config = {"zero_optimization": {"stage": 2, "overlap_comm": False}}
    return (
        recorded(folder / "before", seed=1, backward=0.35, ds_config=config),
        recorded(
            folder / "after",
            seed=2,
            backward=0.3,
            ds_config={"zero_optimization": {"stage": 2, "overlap_comm": True}},
        ),
    )


@pytest.fixture(scope="module")
def address(runs: tuple[Path, Path]) -> str:
    a, b = map(read_source, runs)
    page = runs[1] / "compare.html"
    page.write_text(comparison_page(compare(a, b), a, b))
    return page.as_uri()


def test_the_page_shows_the_values_of_the_comparison_and_requests_nothing(
    browser: Any, runs: tuple[Path, Path], address: str
) -> None:
    changes = {m.name: m.change for m in compare(*map(read_source, runs)).measures}
    with opened(browser, address) as (page, seen):
        cards = page.eval_on_selector_all(
            "[data-measure]", "all => all.map(e => [e.dataset.measure, e.dataset.value])"
        )
        drawn = page.eval_on_selector_all(
            ".chart canvas",
            "all => all.map(e => [e.closest('.chart').id, new Set(e.getContext('2d')"
            ".getImageData(0, 0, e.width, e.height).data).size > 8])",
        )
        intervals = page.locator("svg.interval").count()
        configuration = page.text_content("#configuration")
        legend = page.text_content("#chart-step_seconds .u-legend")

    assert {name: float(value) for name, value in cards} == {
        name: change.value for name, change in changes.items() if change and name in dict(cards)
    }
    assert "tokens_per_second" in dict(cards)
    assert {name for name, is_drawn in drawn if is_drawn} == {
        f"chart-{name}" for name in ("throughput", "step_seconds", "exposed", "memory", "loss")
    }
    # The collectives are equal in both runs, so that their intervals have no extent to draw.
    assert intervals == sum(
        change is not None and change.lower is not None and not name.startswith("collective.")
        for name, change in changes.items()
    )
    assert "zero_optimization.overlap_comm" in configuration
    assert "A" in legend and "B" in legend
    assert seen == []


@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_its_screen_in_light_and_dark(
    browser: Any, address: str, scheme: str, width: int
) -> None:
    viewport = {"width": width, "height": 800}
    with opened(browser, address, viewport=viewport, color_scheme=scheme) as (page, seen):
        needed = page.evaluate("document.documentElement.scrollWidth")
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        clipped = page.eval_on_selector_all(
            "p, li, .verdict, .card", "all => all.filter(e => e.scrollWidth > e.clientWidth).length"
        )

    assert needed == width
    assert clipped == 0
    brightness = sum(map(int, background.removeprefix("rgb(").removesuffix(")").split(",")))
    assert (brightness > 400) == (scheme == "light")
    assert seen == []


@pytest.mark.parametrize(
    ("role", "title"), [("dp", "Tokens per second"), ("pp", "Tokens per second"), ("tp", None)]
)
def test_of_ranks_that_share_tokens_no_sum_is_drawn(
    tmp_path: Path, role: str, title: str | None
) -> None:
    sources = []
    for name in "ab":
        folder = write_run(tmp_path / name, steps=20)
        with RecordedRank(folder) as rank:
            rank.recorder.add(communication.COMM_SECONDS, 1.0, role)
        sources.append(read_source(folder))

    page = comparison_page(compare(*sources), *sources)

    charts = json.loads(page.split('id="charts">')[1].split("</script>")[0])
    drawn = [chart["title"] for chart in charts if chart["name"] == "throughput"]
    assert drawn == ([] if title is None else [title])


def test_the_chart_has_the_tokens_of_the_first_stage_of_a_pipeline(tmp_path: Path) -> None:
    a, b = (
        write_run(
            tmp_path / f"{stages}-stages",
            ranks=4,
            steps=20,
            record=lambda rank, step, stages=stages: step_record(  # type: ignore[misc]
                step, tokens=1024 * stages if rank < 4 // stages else None
            ),
        )
        for stages in (2, 4)
    )
    sources = (read_source(a), read_source(b))

    page = comparison_page(compare(*sources), *sources)

    charts = json.loads(page.split('id="charts">')[1].split("</script>")[0])
    throughput = next(chart for chart in charts if chart["name"] == "throughput")
    assert throughput["title"] == "Tokens per second"
    assert [set(curve["values"]) for curve in throughput["curves"]] == [{4096 / 0.5}] * 2


def test_the_chart_has_the_tokens_of_all_ranks_of_a_large_job(tmp_path: Path) -> None:
    folders = [run_of_attempts(tmp_path / str(ranks), (ranks, 1300)) for ranks in (72, 80)]
    (folders[1] / "rank-8.jsonl").unlink()
    sources = [read_source(folder) for folder in folders]

    page = comparison_page(compare(*sources), *sources)

    charts = json.loads(page.split('id="charts">')[1].split("</script>")[0])
    throughput = next(chart for chart in charts if chart["name"] == "throughput")
    found = [set(curve["values"]) for curve in throughput["curves"]]
    assert found == [{72 * 1024 / 0.5}, {80 * 1024 / 0.5}]

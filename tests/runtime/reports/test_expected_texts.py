"""Tests of all that a report and a comparison show, against texts in the folder `expected`.

The figures of these runs are computed by hand in `test_run_summary.py` and
`test_run_comparison.py`. Covers `report_page.py`, `report_markdown.py`, `end_tables.py`,
`run_charts.py`, `page_parts.py`, `comparison_page.py` and `comparison_text.py`.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from uneven_runs import compared_runs, eventful_run

from zerowatch.runtime.reports.comparison_page import comparison_page
from zerowatch.runtime.reports.comparison_text import comparison_markdown, comparison_text
from zerowatch.runtime.reports.end_tables import print_end_tables
from zerowatch.runtime.reports.run_comparison import RunComparison, compare, read_source
from zerowatch.runtime.reports.run_summary import summary_of
from zerowatch.runtime.reports.write_report import make_report

EXPECTED = Path(__file__).parent / "expected"


def expected(name: str) -> str:
    return (EXPECTED / name).read_text()


def content(page: str) -> str:
    """The content of a page, a line for each row, paragraph and card; numbers with five digits."""
    body = page.partition("<main>")[2].partition("</main>")[0]
    body = re.sub(r'data-value="([^"]+)"', lambda found: f'data-value="{short(found[1])}"', body)
    lines = re.sub("(?=<(?:section|h2|h3|tr|p|li|div|svg|details|i) ?)", "\n", body)
    return lines.replace("\N{NO-BREAK SPACE}", " ").strip() + "\n"


def short(number: str) -> str:
    return f"{float(number):.5g}"


def charts(page: str) -> str:
    """The charts of a page, a line for each curve."""
    data = json.loads(page.split('id="charts">')[1].split("</script>")[0])
    lines = []
    for chart in data:
        curves, steps = chart.pop("curves"), chart.pop("steps")
        lines += [json.dumps(chart), f"  steps {steps[0]:g} to {steps[-1]:g}, {len(steps)} points"]
        for curve in curves:
            values = [None if value is None else float(short(value)) for value in curve["values"]]
            lines.append(f"  {curve['name']}, color {curve['color']}: {json.dumps(values[-5:])}")
    return "".join(f"{line}\n" for line in lines)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eventful_run(tmp_path_factory.mktemp("eventful") / "run")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunComparison, str]:
    """A comparison, and its page."""
    a, b = map(read_source, compared_runs(tmp_path_factory.mktemp("compared")))
    comparison = compare(a, b)
    return comparison, comparison_page(comparison, a, b)


def test_the_report_as_markdown_has_all_figures(run: Path) -> None:
    assert make_report(run, "markdown")[1] == expected("report_markdown.txt")


def test_the_tables_of_a_whole_report_have_all_figures(run: Path) -> None:
    stream = io.StringIO()

    print_end_tables(summary_of(run), stream, is_whole=True)

    assert stream.getvalue() == expected("report_tables.txt")


def test_the_tables_at_the_end_of_a_run_are_short(run: Path) -> None:
    stream = io.StringIO()

    print_end_tables(summary_of(run), stream)

    assert stream.getvalue() == expected("end_tables.txt")


def test_the_page_of_a_report_has_all_figures(run: Path) -> None:
    assert content(make_report(run)[1]) == expected("report_page.txt")


def test_the_charts_of_a_report_have_the_values_of_the_logs(run: Path) -> None:
    assert charts(make_report(run)[1]) == expected("report_charts.txt")


def test_a_comparison_on_a_terminal_has_all_measures(
    compared: tuple[RunComparison, str],
) -> None:
    assert comparison_text(compared[0]) == expected("comparison_tables.txt")


def test_a_comparison_as_markdown_has_all_measures(compared: tuple[RunComparison, str]) -> None:
    assert comparison_markdown(compared[0]) == expected("comparison_markdown.txt")


def test_the_page_of_a_comparison_has_all_measures(compared: tuple[RunComparison, str]) -> None:
    assert content(compared[1]) == expected("comparison_page.txt")


def test_the_charts_of_a_comparison_have_the_values_of_the_logs(
    compared: tuple[RunComparison, str],
) -> None:
    assert charts(compared[1]) == expected("comparison_charts.txt")

"""Makes the report of a run, and writes it at the end of training without delaying that end."""

from __future__ import annotations

import contextlib
import shlex
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import orjson

from ...metrics.atomic_file import atomic_write
from ..common.fail_open import FailOpen
from ..common.report_files import display_path
from .metrics_reader import read_metrics
from .report_markdown import report_markdown
from .report_page import page_html
from .run_charts import CHART_SERIES, charts_of
from .run_reader import RunFolderError, read_run
from .run_summary import RunSummary, summarize, summary_of

Form = Literal["html", "markdown", "json"]
REPORT_FILE = "report.html"
REPORT_MODE = 0o600  # it contains reports on errors, which only their owner can read
# At the end of training a report is written only of logs up to this size: about 100,000 steps of
# one rank, read in two or three seconds.
MAX_LOG_BYTES = 128 * 2**20
# The end of training waits for the report at most this long.
MAX_SECONDS = 10.0


def make_report(folder: Path, form: Form = "html") -> tuple[RunSummary, str]:
    """Return the summary of a run and the text of its report.

    Args:
        folder: The run folder.
        form: HTML is one file with charts; the others have the figures only.

    Raises:
        RunFolderError: There is no such folder, or nothing in it is of a run.

    Examples:
        >>> summary, page = make_report(Path("runs/20261123T005552-c44904"))
    """
    run, metrics = read_run(folder), read_metrics(folder, CHART_SERIES)
    summary = summarize(run, metrics)
    if form == "html":
        return summary, page_html(summary, charts_of(run, metrics))
    if form == "markdown":
        return summary, report_markdown(summary)
    return summary, orjson.dumps(summary, option=orjson.OPT_INDENT_2).decode() + "\n"


def report_command(folder: Path) -> str:
    """Return the command that makes the report of a run."""
    return f"zerowatch report {shlex.quote(display_path(folder))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalReport:
    """What is known of a run that has ended.

    Attributes:
        summary: The figures; None if reading the logs would take long, or failed.
        page: The report, if it was written.
    """

    summary: RunSummary | None
    page: Path | None


def final_report(folder: Path, *, writes_page: bool) -> FinalReport:
    """Summarize a run that has ended, if that takes a few seconds only.

    It never raises, and it returns after MAX_SECONDS even if the file system does not answer.

    Args:
        folder: The run folder.
        writes_page: Whether to write `report.html` into it.
    """
    summaries: list[RunSummary] = []
    pages: list[Path] = []

    def read() -> None:
        with contextlib.suppress(
            OSError, RunFolderError
        ):  # the disk is full, or a folder was moved
            if sum(path.stat().st_size for path in folder.glob("*.jsonl")) > MAX_LOG_BYTES:
                return
            if not writes_page:
                summaries.append(summary_of(folder))
                return
            summary, page = make_report(folder)
            summaries.append(summary)
            atomic_write(folder / REPORT_FILE, page, mode=REPORT_MODE)
            pages.append(folder / REPORT_FILE)

    # A daemon thread: the process may exit while the file system does not answer.
    work = FailOpen().wrap("report", read, is_retried=False)
    thread = threading.Thread(target=work, name="zerowatch-report", daemon=True)
    thread.start()
    thread.join(MAX_SECONDS)
    return FinalReport(
        summary=summaries[0] if summaries else None, page=pages[0] if pages else None
    )


def report_line(folder: Path, page: Path | None) -> str:
    """Return the line that names the report of a run, or only the command that makes it."""
    if page is None:
        return f"report of this run: {report_command(folder)}"
    return f"report of this run: {display_path(page)}; to make it again: {report_command(folder)}"

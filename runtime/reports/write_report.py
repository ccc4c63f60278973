"""Makes the report of a run, and writes it at the end of training without delaying that end."""

from __future__ import annotations

import contextlib
import shlex
import threading
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
from .run_summary import RunSummary, summarize

Form = Literal["html", "markdown", "json"]
REPORT_FILE = "report.html"
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


def write_final_report(folder: Path) -> Path | None:
    """Write `report.html` into the folder of a run that ends, if that takes a few seconds only.

    It never raises, and it returns after MAX_SECONDS even if the file system does not answer. Only
    rank 0 calls this function.

    Returns:
        The file; None if it was not written.
    """
    written: list[Path] = []

    def write() -> None:
        output = folder / REPORT_FILE
        with contextlib.suppress(
            OSError, RunFolderError
        ):  # the disk is full, or a folder was moved
            if sum(path.stat().st_size for path in folder.glob("*.jsonl")) <= MAX_LOG_BYTES:
                atomic_write(output, make_report(folder)[1])
                written.append(output)

    # A daemon thread: the process may exit while the file system does not answer.
    work = FailOpen().wrap("report", write, is_retried=False)
    thread = threading.Thread(target=work, name="zerowatch-report", daemon=True)
    thread.start()
    thread.join(MAX_SECONDS)
    return written[0] if written else None

"""Ends a run on rank 0: writes its report, shows its tables and logs the line that makes it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from ...metrics.settings import ConsoleMode
from ..common.launcher_link import has_launcher
from ..reports.write_report import final_report, report_line

logger = logging.getLogger(__name__)


def announce_report(folder: Path, *, is_ours: bool, console: ConsoleMode) -> None:
    """Log where the report of a run is, or the command that makes it. Only rank 0 calls this.

    Nothing is logged if the run has no step. Under `zerowatch run`, the launcher prints the line
    and the tables once all ranks have ended, so this rank prints neither.

    Args:
        folder: The run folder.
        is_ours: Whether the run is a TrainingRun that ends in good order. Its report is written and
            its tables are printed, which takes some seconds at most.
        console: What is printed; with "off" no tables.
    """
    if not (folder / "rank-0.jsonl").is_file():
        return
    report = final_report(folder, writes_page=True) if is_ours else None
    if has_launcher():
        return
    if report is not None and report.summary is not None and console != "off":
        from ..reports.end_tables import print_end_tables

        print_end_tables(report.summary, sys.stderr)
    logger.info("%s", report_line(folder, None if report is None else report.page))

"""Logs at the end of a run the command that makes its report, and writes the report if asked."""

from __future__ import annotations

import logging
from pathlib import Path

from ..common.report_files import display_path
from ..reports.write_report import report_command, write_final_report

logger = logging.getLogger(__name__)


def announce_report(folder: Path, *, writes: bool) -> None:
    """Log where the report of a run is, or the command that makes it. Only rank 0 calls this.

    Nothing is logged if the run has no step.

    Args:
        folder: The run folder.
        writes: Whether to write the report now, which takes some seconds at most.
    """
    if not (folder / "rank-0.jsonl").is_file():
        return
    written = write_final_report(folder) if writes else None
    if written is None:
        logger.info("report of this run: %s", report_command(folder))
    else:
        logger.info(
            "report of this run: %s; to make it again: %s",
            display_path(written),
            report_command(folder),
        )

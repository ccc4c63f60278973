"""Prints the end of a run after all ranks of `zerowatch run` have ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import get_args

from ...metrics.settings import ConsoleMode
from ..common.plain_text import write_line_if_open
from ..monitor.step_ring import recover
from ..reports.end_tables import print_end_tables
from ..reports.write_report import REPORT_FILE, final_report, report_line


def print_run_end(folder: Path, *, is_in_order: bool, console: ConsoleMode) -> None:
    """Print where the time of a run went, what to try next, and the line that makes its report.

    Nothing is printed of a run without a step.

    Args:
        folder: The run folder.
        is_in_order: Whether the run ended in good order or by Ctrl-C. After a failure no tables are
            printed, because the error must stay in view.
        console: What is printed; with "off" only the line of the report.
    """
    try:
        recover(folder)  # steps of ranks that were killed
        if is_in_order and console != "off" and _has_step(folder):
            summary = final_report(folder, writes_page=False).summary
            if summary is not None:
                print_end_tables(summary, sys.stderr)
    finally:  # a signal may end the wait for the tables
        if _has_step(folder):
            page = folder / REPORT_FILE
            line = report_line(folder, page if is_in_order and page.is_file() else None)
            write_line_if_open(sys.stderr, line)


def console_of(folder: Path, default: ConsoleMode) -> ConsoleMode:
    """Return the `console` setting of a run, which the script's call or ds config may have set.

    Args:
        folder: The run folder.
        default: The result if the settings cannot be read.
    """
    try:
        console = json.loads((folder / "settings.json").read_text("utf-8"))["console"]
    except (OSError, ValueError, KeyError, TypeError):
        return default
    return console if console in get_args(ConsoleMode) else default


def _has_step(folder: Path) -> bool:
    return (folder / "rank-0.jsonl").is_file()

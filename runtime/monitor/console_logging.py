"""Prints zerowatch's log lines on stderr, if the script has not configured logging."""

from __future__ import annotations

import logging


class ConsoleHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr until the root logger has handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, unless the root logger has handlers."""
        if not logging.getLogger().handlers:
            super().emit(record)


def show_own_lines() -> None:
    """Print warnings, and the INFO lines of a few modules. Safe to call twice."""
    ours = logging.getLogger("zerowatch")
    if logging.getLogger().handlers or ours.handlers:
        return
    handler = ConsoleHandler()
    handler.setFormatter(logging.Formatter("zerowatch: %(message)s"))
    ours.addHandler(handler)
    # These modules log once per run: the location of metrics and logs, the report, killed ranks, a
    # loaded checkpoint, decisions of the tuner, and a slow start.
    for name in (
        "zerowatch.runtime.monitor.final_report",
        "zerowatch.runtime.monitor.run_info",
        "zerowatch.runtime.monitor.startup_monitor",
        "zerowatch.runtime.memory.oom.killed_ranks",
        "zerowatch.runtime.trainer.checkpoint.load",
        "zerowatch.runtime.tuner.decision_reporter",
    ):
        module_logger = logging.getLogger(name)
        if module_logger.level == logging.NOTSET:
            module_logger.setLevel(logging.INFO)

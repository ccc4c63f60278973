"""Shows zerowatch's own log lines, with its name before them, where nobody has set up logging."""

from __future__ import annotations

import logging


class ConsoleHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr, and falls silent once the script has handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, unless the root logger's handlers do."""
        if not logging.getLogger().handlers:
            super().emit(record)


def show_own_lines() -> None:
    """Let warnings, and the line that tells where a run is, be seen; does nothing twice."""
    ours = logging.getLogger("zerowatch")
    if logging.getLogger().handlers or ours.handlers:
        return
    handler = ConsoleHandler()
    handler.setFormatter(logging.Formatter("zerowatch: %(message)s"))
    ours.addHandler(handler)
    # Of what is said once per run, this is what everybody wants to know.
    for name in (
        "zerowatch.runtime.monitor.run_info",
        "zerowatch.runtime.memory.oom.killed_ranks",
        "zerowatch.runtime.trainer.checkpoint.load",
        "zerowatch.runtime.tuner.reporting",
    ):
        telling = logging.getLogger(name)
        if telling.level == logging.NOTSET:
            telling.setLevel(logging.INFO)

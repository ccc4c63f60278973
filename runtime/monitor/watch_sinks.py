"""Runs the sinks of a watch on a thread of their own, and writes what the script logs itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import orjson

from ...metrics.atomic_file import open_to_append
from ..common.hidden_secrets import without_secrets
from ..instrumentation.watch_context import WatchContext
from ..sinks.sink import Sink, SinkRun
from ..sinks.sink_runner import SinkRunner
from .subscriptions import CLOSE_SECONDS, Subscriptions

LOGGED_FILE = "logged.jsonl"


class WatchSinks:
    """The sinks of one watch. Ranks other than 0 have none, and their calls have no effect.

    Args:
        context: The parts of the watch.
        on_open: Called on the thread of the sinks each time one has opened.
    """

    def __init__(self, context: WatchContext, on_open: Callable[[], object] = lambda: None) -> None:
        self._context, self._on_open = context, on_open
        self._is_writer = context.identity.rank == 0
        self._failed = False
        self._subscriptions = Subscriptions(context.fail_open, "sink")
        self.enqueue = self._subscriptions.enqueue

    @property
    def has_sinks(self) -> bool:
        """Whether a sink was ever added."""
        return self._subscriptions.has_listeners

    @property
    def dropped(self) -> int:
        """Number of records that were dropped because a sink was too slow."""
        return self._subscriptions.dropped

    def add(self, sink: Sink, name: str) -> None:
        """Write the following steps to a sink."""
        if self._is_writer:
            context = self._context
            runner = SinkRunner(
                sink,
                self._run,
                context.recorder.snapshot,
                context.settings.sinks,
                self._on_open,
            )
            self._subscriptions.add_kept(
                f"sink {name}", runner.on_step, lambda: runner.close(failed=self._failed)
            )

    def log_values(self, values: Mapping[str, object], step: int | None) -> None:
        """Append values of the script to `logged.jsonl`, without secrets."""
        if self._is_writer:
            line = {"step": step, "unix_seconds": time.time(), "values": dict(values)}
            self._subscriptions.enqueue_call("logged values", lambda: self._append(line))

    def close(self, *, failed: bool = False, interrupted: bool = False) -> None:
        """Write the last step and close all sinks. Waits `sinks.timeout_seconds` at most."""
        self._failed = failed
        limit = self._context.settings.sinks.timeout_seconds
        self._subscriptions.close(min(limit, CLOSE_SECONDS) if interrupted else limit)

    def _run(self) -> SinkRun:
        run_id = self._context.run_id()
        assert run_id is not None  # rank 0 has it from the start
        return SinkRun(run_id=run_id, folder=self._context.folder())

    def _append(self, line: Mapping[str, object]) -> None:
        folder = self._context.folder()
        if folder is not None:
            with open(open_to_append(folder / LOGGED_FILE), "ab") as file:
                file.write(orjson.dumps(without_secrets(line), default=_plain) + b"\n")


def _plain(value: object) -> object:
    """Return the number in a tensor or an array of one element; else a text."""
    if getattr(value, "size", None) is not None and hasattr(value, "item"):
        numel = getattr(value, "numel", None)
        if (numel() if numel is not None else getattr(value, "size")) == 1:  # noqa: B009
            return value.item()
    return str(value)

"""Runs the sinks of a watch, and writes what the script logs itself, each on a thread of its own.

A tracker that does not answer blocks the thread of the sinks, so the other thread writes the file.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial

import orjson
import torch

from ..common import accelerator
from ..common.device_scalar import PendingScalar, scalar
from ..common.gil_pauses import let_training_run
from ..common.hidden_secrets import without_secrets
from ..instrumentation.watch_context import WatchContext
from ..sinks.sink import Sink, SinkRun
from ..sinks.sink_runner import SinkRunner
from .log_file import LogFile
from .subscriptions import CLOSE_SECONDS, MAX_WAITING, Subscriptions
from .watch_thread import FIRST_POLL_SECONDS, LAST_POLL_SECONDS, PATIENCE_SECONDS

logger = logging.getLogger(__name__)

LOGGED_FILE = "logged.jsonl"
# Maximum number of lines of the script that wait, some 100 MB if each has few numbers. Further
# lines are dropped and counted. A loop may log the values of each validation sample, with no other
# work between them.
MAX_LINES = 65_536
# Maximum memory of other values that wait.
MAX_BYTES = 2**26
# Numbers of a line that do not count, and what each further one counts with its name: a line may
# have one for each layer.
NUM_FREE_NUMBERS = 8
NUMBER_BYTES = 128
# What a value of unknown size counts, such as a list: MAX_WAITING of them may wait.
UNKNOWN_BYTES = MAX_BYTES // MAX_WAITING
# Each write lets the script's thread run for up to 5 ms before the next line. So lines that wait
# are written together, up to this size.
BYTES_AT_ONCE = 2**20


class WatchSinks:
    """The sinks of one watch. Ranks other than 0 have none, and their calls have no effect.

    Args:
        context: The parts of the watch.
        on_open: Called on the thread of the sinks each time one has opened.
        now: A monotonic clock, in seconds.
        sleep: Waits for a number of seconds.
    """

    def __init__(
        self,
        context: WatchContext,
        on_open: Callable[[], object] = lambda: None,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._context, self._on_open = context, on_open
        self._now, self._sleep = now, sleep
        self._is_writer = context.identity.rank == 0
        self._failed = False
        self._log: LogFile | None = None
        self._encoded: list[bytes] = []  # lines for the next write
        self._num_encoded_bytes = 0
        self._may_query: bool | None = None  # unknown until the thread needs the device
        self._lines = Subscriptions(
            context.fail_open,
            "writer",
            "Call log_values less often, such as once for many samples, or check whether the disk "
            "of run_log.folder responds.",
            max_waiting=MAX_LINES,
            max_bytes=MAX_BYTES,
            on_idle=context.fail_open.wrap(
                "logged values", self._write_lines, BaseException, is_kept=True
            ),
            num_held=lambda: len(self._encoded),
        )
        self._subscriptions = Subscriptions(context.fail_open, "sink")
        self.enqueue = self._subscriptions.enqueue
        wrap = context.fail_open.wrap
        self._take = wrap("logged values", _taken, is_kept=True)
        self._plain = wrap("logged values", self._plain_value, is_kept=True)
        self._append = wrap("logged values", self._append_line, BaseException, is_kept=True)
        self._append_here = wrap("logged values", self._append_line, is_kept=True)
        self._is_forked = self._is_closed = self._has_warned = False

    @property
    def has_sinks(self) -> bool:
        """Whether a sink was ever added."""
        return self._subscriptions.has_listeners

    @property
    def dropped(self) -> int:
        """Number of records that were dropped because a sink was too slow."""
        return self._subscriptions.dropped

    @property
    def dropped_lines(self) -> int:
        """Number of lines of the script that could not be written, such as on a full disk."""
        return self._lines.dropped + (0 if self._log is None else self._log.dropped)

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
        if not self._is_writer:
            return
        if self._is_closed:
            self._warn_of_end()
            return
        taken = {name: self._take(value) for name, value in dict(values).items()}
        line = {"step": step, "unix_seconds": time.time(), "values": taken}
        if self._is_forked:
            self._append_here(line)
        else:
            self._lines.enqueue_call(partial(self._append, line), _num_bytes(taken.values()))

    def close(self, *, failed: bool = False, interrupted: bool = False) -> None:
        """Write the last line and the last step, and close all sinks.

        Waits `sinks.timeout_seconds` at most, of which half for the lines.
        """
        self._failed, self._is_closed = failed, True
        limit = self._context.settings.sinks.timeout_seconds
        limit = min(limit, CLOSE_SECONDS) if interrupted else limit
        began = self._now()
        self._lines.close(limit / 2)
        self._subscriptions.close(max(0.0, limit - (self._now() - began)))

    def continue_after_fork(self) -> None:
        """Write lines at once in a forked child, which has no thread, and may end at any moment."""
        self._is_forked = True
        self._encoded, self._num_encoded_bytes = [], 0  # the parent writes them

    def _run(self) -> SinkRun:
        run_id = self._context.run_id()
        assert run_id is not None  # rank 0 has it from the start
        return SinkRun(run_id=run_id, folder=self._context.folder())

    def _append_line(self, line: Mapping[str, object]) -> None:
        log = self._log or self._open_log()
        if log is None:
            return
        encoded = orjson.dumps(without_secrets(line), default=self._plain) + b"\n"
        self._encoded.append(encoded)
        self._num_encoded_bytes += len(encoded)
        if self._is_forked or self._num_encoded_bytes >= BYTES_AT_ONCE:
            self._write_lines()
        let_training_run()

    def _warn_of_end(self) -> None:
        if self._context.settings.run_log.enabled and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the run has ended: values that log_values gets from now on are not written to %s",
                LOGGED_FILE,
            )

    def _write_lines(self) -> None:
        try:
            if self._log is not None and self._encoded:
                self._log.append_all(self._encoded)
        finally:
            self._encoded, self._num_encoded_bytes = [], 0

    def _open_log(self) -> LogFile | None:
        """Choose the file on the first line; None if no run log is written."""
        folder = self._context.folder()
        if folder is not None:
            # One file: the script decides how much it logs.
            settings = self._context.settings.run_log.model_copy(
                update={"segment_bytes": sys.maxsize}
            )
            self._log = LogFile(folder / LOGGED_FILE, settings, now=self._now)
            self._lines.call_at_end("logged values", self._log.close)
        return self._log

    def _plain_value(self, value: object) -> object:
        """Return the number in a tensor or an array of one element; else a text.

        A value on a device is None if this thread must not query the device.
        """
        if _is_on_device(value) and not self._may_query_device():
            return None
        if isinstance(value, PendingScalar):
            self._wait_for(value)
            return value.read_as_is()
        if getattr(value, "size", None) is not None and hasattr(value, "item"):
            numel = getattr(value, "numel", None)
            if (numel() if numel is not None else getattr(value, "size")) == 1:  # noqa: B009
                return value.item()
        return str(value)

    def _may_query_device(self) -> bool:
        """Prepare this thread for the device at its first value there. Return success."""
        if self._may_query is None:
            index = self._context.device_index
            self._may_query = index is None or accelerator.current.prepare_thread(index)
        return self._may_query

    def _wait_for(self, pending: PendingScalar) -> None:
        """Wait for a copy as the watch thread does: a limited time, because a device may hang."""
        waited, poll = 0.0, FIRST_POLL_SECONDS
        if not pending.arrived():
            self._write_lines()  # a process that hangs may be killed
        while not pending.arrived() and waited < PATIENCE_SECONDS:
            self._sleep(poll)
            waited, poll = waited + poll, min(2 * poll, LAST_POLL_SECONDS)


def _num_bytes(values: Collection[object]) -> int:
    """Return about how much memory values need while they wait, except a few numbers."""
    sizes = [
        len(value) if isinstance(value, str | bytes) else UNKNOWN_BYTES
        for value in values
        if not isinstance(value, int | float | complex | PendingScalar | None)
    ]
    num_further = max(0, len(values) - len(sizes) - NUM_FREE_NUMBERS)
    return sum(sizes) + NUMBER_BYTES * num_further


def _is_on_device(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type == accelerator.current.kind
    return isinstance(value, PendingScalar)


def _taken(value: object) -> object:
    """Return what a tensor or an array of one element holds now, without waiting for a device.

    The script may change it afterwards, such as a sum that it sets back to zero. What would have to
    wait here, such as a tensor of another device, is returned as it is.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            return value
        if value.device.type == "cpu" and not hasattr(value, "to_local"):
            return value.item()
        pending = scalar(value)
        return value if pending is None else pending
    if type(value).__module__ == "numpy" and getattr(value, "size", None) == 1:
        return value.item()  # type: ignore[attr-defined]
    return value

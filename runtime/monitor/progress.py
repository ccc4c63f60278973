"""Prints figures of the last steps on rank 0, where the setting `console` asks for them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from rich.console import Console
from rich.progress_bar import ProgressBar

from ...metrics.catalog import training
from ...metrics.recorder import Recorder
from ...metrics.step_record import StepRecord
from ..common.format_numbers import format_bytes, format_ratio
from ..common.plain_text import write_if_open, write_line_if_open

LINE_SECONDS = 10.0
REDRAW_SECONDS = 1.0
BAR_WIDTH = 20
# Returns to the start of the line and clears it.
_CLEAR = "\r\x1b[2K"


class Progress:
    """Prints a line of figures from time to time, or redraws one line on a terminal.

    Lines begin with `zerowatch:`, as all of zerowatch's output does. Used on one thread.

    Args:
        stream: Where to print. Control characters are written to a terminal only.
        is_bar: Whether to redraw one line if `stream` is a terminal.
        total_steps: Steps of the whole training, if known: a bar shows the share that is done.
        recorder: Has the MFU of the last step.
        now: A monotonic clock, in seconds.

    Examples:
        A line looks as follows: `zerowatch: step 120/500, loss 3.214, 310 ms/step, ...`
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        is_bar: bool,
        total_steps: int | None,
        recorder: Recorder,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._now, self._recorder = stream, now, recorder
        self._redraws = is_bar and stream.isatty()
        self._interval = REDRAW_SECONDS if self._redraws else LINE_SECONDS
        self._total_steps = total_steps
        self._since_last: list[StepRecord] = []
        self._last: list[StepRecord] = []
        self._printed_at = -math.inf

    def on_step(self, record: StepRecord) -> None:
        """Add a step, and print if it is due."""
        self._since_last.append(record)
        if self._now() - self._printed_at >= self._interval:
            self._print()

    def on_end(self) -> None:
        """Print the last steps, and end the line that was redrawn."""
        if self._since_last:
            self._print()
        if self._redraws and self._last:
            write_if_open(self._stream, "\n")

    def _print(self) -> None:
        self._last, self._since_last = self._since_last, []
        self._printed_at = self._now()
        mfu = self._recorder.snapshot().value(training.MFU)
        line = progress_line(self._last, self._total_steps, mfu)
        if not self._redraws:
            write_line_if_open(self._stream, line)
            return
        console = Console(file=self._stream, highlight=False)
        bar = self._bar(console, self._last[-1].step)
        # A longer line would wrap, and could not be cleared. The bar has color codes without width.
        # The cursor returns to the start, so that what others print begins there.
        room = max(0, console.width - 1 - (BAR_WIDTH + 1 if bar else 0))
        write_if_open(self._stream, f"{_CLEAR}{bar}{_fitting(line, room)}\r")

    def _bar(self, console: Console, step: int) -> str:
        if self._total_steps is None:
            return ""
        with console.capture() as capture:
            console.print(ProgressBar(total=self._total_steps, completed=step, width=BAR_WIDTH))
        return f"{capture.get().rstrip()} "


def _fitting(line: str, room: int) -> str:
    """Return the first figures of a line that fit as a whole: a cut number is a wrong one."""
    if len(line) <= room:
        return line
    return line[: room + 2].rpartition(", ")[0][:room]


def progress_line(steps: Sequence[StepRecord], total_steps: int | None, mfu: float | None) -> str:
    """Return the figures of some steps of one rank; those that are not known are left out.

    Args:
        steps: At least one step, in order.
        total_steps: Steps of the whole training, if known.
        mfu: MFU of the last step.
    """
    total = "" if total_steps is None else f"/{total_steps}"
    return ", ".join([f"step {steps[-1].step}{total}", *_figures(steps, mfu)])


def _figures(steps: Sequence[StepRecord], mfu: float | None) -> Iterator[str]:
    last = steps[-1]
    seconds = sum(step.training_seconds for step in steps)
    if last.loss is not None:
        yield f"loss {last.loss:.4g}"
    if last.gradient_norm is not None:
        yield f"grad norm {last.gradient_norm:.3g}"
    yield f"{1000 * seconds / len(steps):,.0f} ms/step"
    for name, counts in (
        ("tokens", [step.tokens for step in steps]),
        ("samples", [step.samples for step in steps]),
    ):
        known = [count for count in counts if count is not None]
        if len(known) == len(steps) and seconds:
            yield f"{sum(known) / seconds:,.0f} {name}/s per rank"
            break
    waits = [step for step in steps if step.training_exposed_seconds is not None]
    if waits and (of := sum(step.training_seconds for step in waits)):
        exposed = sum(step.training_exposed_seconds or 0.0 for step in waits)
        yield f"comm wait {format_ratio(exposed / of)}"
    if last.memory_bytes:
        # "cuda:0" sorts after "cpu".
        readings = [step.memory_bytes.get(max(last.memory_bytes), {}) for step in steps]
        peaks = [each.get("peak_allocated", each.get("allocated")) for each in readings]
        if known_peaks := [peak for peak in peaks if peak is not None]:
            yield f"memory {format_bytes(max(known_peaks))}"
    if mfu is not None:
        yield f"MFU {format_ratio(mfu)}"

"""What waits to be sent by OTLP: bounded, sent in small portions, left be where nobody answers.

Filled on any thread and emptied on one. What finds no room is lost and counted, and so is what
could not be sent: training never waits.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Literal

from ..catalog.overhead import EXPORTER_FAILURES
from ..recorder import Recorder
from ..settings import OtelSettings
from ..snapshot import Exemplar
from .circuit import CircuitBreaker
from .otlp_families import families, hardware_families
from .telemetry_data import Family, LogLine, StepTrace, Value

if TYPE_CHECKING:
    from .otlp import Otlp

logger = logging.getLogger(__name__)

Signal = Literal["traces", "metrics", "logs"]

MAX_TRACES, MAX_LINES = 32, 512
# Small portions, each a request, traces one by one: who writes them down holds the GIL.
LINES_AT_ONCE, SERIES_AT_ONCE = 64, 48


class OtlpQueue:
    """The traces, log lines and metrics of one rank.

    Args:
        recorder: Where the metrics stand, and where failures are counted.
        otlp: Sends.
        settings: What is to be sent, and how often.
        rank: The global rank.
        hardware_ids: By device, what names it on its host; GPUs only.
        describe: Tells who sends; None while the run has no name, and nothing is sent until then.

    Attributes:
        dropped: Traces and log lines lost.
    """

    def __init__(
        self,
        recorder: Recorder,
        otlp: Otlp,
        settings: OtelSettings,
        *,
        rank: int,
        hardware_ids: Mapping[str, str],
        describe: Callable[[], Mapping[str, Value] | None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dropped = 0
        self._recorder = recorder
        self._otlp = otlp
        self._settings = settings
        self._rank = rank
        self._hardware_ids = hardware_ids
        self._describe = describe
        self._now = now
        self._described = False
        self._started_ns = time.time_ns()
        self._metrics_due = 0.0
        self._traces: deque[StepTrace] = deque()
        self._lines: deque[LogLine] = deque()
        # Each its own: a receiver of traces alone refuses the rest, and must not lose traces by it.
        self._circuits: dict[Signal, CircuitBreaker] = {
            "traces": CircuitBreaker(now),
            "metrics": CircuitBreaker(now),
            "logs": CircuitBreaker(now),
        }
        self._told: set[Signal] = set()
        self._open = True

    def add_trace(self, trace: StepTrace) -> None:
        """Take a trace in."""
        if len(self._traces) < MAX_TRACES:
            self._traces.append(trace)
        else:
            self.dropped += 1

    def add_line(self, line: LogLine) -> None:
        """Take a log line in."""
        if len(self._lines) < MAX_LINES:
            self._lines.append(line)
        else:
            self.dropped += 1

    def flush(self, *, final: bool = False) -> None:
        """Send what is there, as long as it is taken. `final` is for the last time."""
        if self._is_named():
            self._send_traces()
            self._send_lines()
            self._send_metrics(final=final)

    def give_up(self) -> None:
        """Lose what is left, and say no more of it: the run has ended."""
        self._open = False
        self.dropped += len(self._traces) + len(self._lines)

    def _may_send(self, signal: Signal) -> bool:
        return self._open and self._circuits[signal].is_closed

    def _is_named(self) -> bool:
        if not self._described:
            attributes = self._describe()
            if attributes is not None:
                self._otlp.describe(attributes)
                self._described = True
        return self._described

    def _send_traces(self) -> None:
        while self._traces and self._may_send("traces"):
            trace = self._traces.popleft()
            if self._sent("traces", self._otlp.send_traces([trace]), 1):
                self._show_examples(trace)

    def _send_lines(self) -> None:
        while self._lines and self._may_send("logs"):
            portion = [self._lines.popleft() for _ in range(min(LINES_AT_ONCE, len(self._lines)))]
            self._sent("logs", self._otlp.send_lines(portion), len(portion))

    def _send_metrics(self, *, final: bool) -> None:
        now = self._now()
        if not self._settings.metrics or not self._may_send("metrics"):
            return
        if now < self._metrics_due and not final:
            return
        self._metrics_due = now + self._settings.metrics_seconds
        now_ns, snapshot = time.time_ns(), self._recorder.snapshot()
        found = chain(
            families(snapshot, self._rank), hardware_families(snapshot, self._hardware_ids)
        )
        for portion in _portions(found):
            was_taken = self._otlp.send_metrics(portion, self._started_ns, now_ns)
            if not self._sent("metrics", was_taken, 0) or not self._open:
                return

    def _show_examples(self, trace: StepTrace) -> None:
        """Let histograms name the trace, now that it can be looked up."""
        labels = {"trace_id": f"{trace.trace_id:032x}", "span_id": f"{trace.span_id:016x}"}
        ended_at = trace.root.end_ns / 1e9
        with self._recorder.commit():
            for seen in trace.examples:
                exemplar = Exemplar(labels=labels, value=seen.value, unix_seconds=ended_at)
                self._recorder.add_exemplar(seen.spec, *seen.labels, exemplar=exemplar)

    def _sent(self, signal: Signal, was_taken: bool, num_items: int) -> bool:
        """Account for an export of so many traces or lines; return whether it was taken."""
        circuit = self._circuits[signal]
        if was_taken:
            circuit.succeeded()
            return True
        self.dropped += num_items
        self._recorder.add(EXPORTER_FAILURES, 1, "otlp")
        circuit.failed()
        if self._open and signal not in self._told and not circuit.is_closed:
            self._told.add(signal)
            logger.log(
                logging.WARNING if self._rank == 0 else logging.INFO,
                "the OpenTelemetry collector at %s does not take the %s of rank %d; it is tried "
                "again less and less often, and training goes on. See otel.endpoint, or set "
                "otel.%s=false to send none; failures are counted in %s.",
                self._settings.endpoint or "OTEL_EXPORTER_OTLP_ENDPOINT",
                signal,
                self._rank,
                signal,
                EXPORTER_FAILURES.name,
            )
        return False


def _portions(found: Iterable[Family]) -> Iterator[list[Family]]:
    """Divide families into portions of few series; a histogram has one for each bucket."""
    portion: list[Family] = []
    num_series = 0
    for family in found:
        portion.append(family)
        num_series += len(family.points) * (1 + len(family.bounds))
        if num_series >= SERIES_AT_ONCE:
            yield portion
            portion, num_series = [], 0
    if portion:
        yield portion

"""Queues traces, log lines and metrics for OTLP, and sends them in small batches.

Any thread may fill the queue, and a single thread empties it. Data that does not fit or cannot be
sent is dropped and counted. Training never waits for the queue.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..backoff import Backoff
from ..catalog.overhead import EXPORTER_FAILURES
from ..catalog.training import RUN_ACTIVE, RUN_END_INFO
from ..recorder import Exemplar, Recorder
from ..settings import Detail
from .detail import served
from .otlp_batches import BatchOrder
from .otlp_families import families, hardware_families, process_families
from .otlp_increases import Increases
from .otlp_options import OtlpOptions, Signal
from .telemetry_data import AttributeValue, Family, LogLine, StepTrace

if TYPE_CHECKING:
    from .otlp import Otlp

logger = logging.getLogger(__name__)

MAX_TRACES = 32  # traces in the queue
MAX_LINES = 512  # log lines in the queue
FAILURES_ALLOWED = 3  # number of failures in a row that starts a pause or ends an interval
FIRST_PAUSE_SECONDS = 30.0
LAST_PAUSE_SECONDS = 300.0  # pauses double after each failure, up to this maximum
# Each request contains a small batch, or a single trace, because encoding holds the GIL.
LINES_AT_ONCE = 64
# Time after which a flush goes on with the next kind of data, because traces may be queued faster
# than they can be sent.
MAX_SECONDS_OF_KIND = 2.0
# Timeouts after which the last flush begins no further request, if the process goes on.
TIMEOUTS_AT_END = 3


class CircuitBreaker:
    """Allows fewer and fewer attempts after three failures in a row."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._failures = 0
        self._backoff = Backoff(FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS, now)

    @property
    def is_closed(self) -> bool:
        """Whether an attempt is allowed: after fewer than three failures, or after a pause."""
        return self._backoff.is_due

    def succeeded(self) -> None:
        """Forget the failures."""
        self._failures = 0
        self._backoff.reset()

    def failed(self) -> None:
        """Count a failure. From the third failure in a row on, each starts a longer pause."""
        self._failures += 1
        if self._failures >= FAILURES_ALLOWED:
            self._backoff.start_delay()


class OtlpQueue:
    """A bounded queue of one rank's traces and log lines, sent together with its metrics.

    Args:
        recorder: Holds the metrics to send, and counts failures.
        otlp: The sender.
        options: The kinds of data to send, and how often.
        identity: The attributes `run`, `node` and `rank` of every point of the metrics, or None
            until the run has an id. Nothing is sent before.
        rank: The global rank.
        hardware_ids: The hardware id of each GPU, by device.
        detail: The series to send; the metrics hw.* are sent in any case.
        describe: Returns the resource attributes, once the run has an id.

    Attributes:
        dropped: Number of traces and log lines lost.
        end_was_sent: Set once the last flush has sent the metrics with the end of the run, or has
            found that they cannot be sent.
        is_answered: Whether the collector has accepted metrics of the last interval, or of the
            one that is being sent. A refusal of the last flush does not change it.
    """

    def __init__(
        self,
        recorder: Recorder,
        otlp: Otlp,
        options: OtlpOptions,
        *,
        identity: Callable[[], Mapping[str, str] | None],
        rank: int,
        hardware_ids: Mapping[str, str],
        detail: Detail = "full",
        describe: Callable[[], Mapping[str, AttributeValue]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dropped = 0
        self._recorder = recorder
        self._otlp = otlp
        self._options = options
        self._find_identity, self._identity = identity, dict[str, str]()
        self._rank = rank
        self._hardware_ids = hardware_ids
        self._detail: Detail = detail
        self._describe = describe
        self._now = now
        self._started_ns = time.time_ns()
        self._increases = Increases() if options.sends_increases else None
        self._metrics_due = 0.0
        self._last_metrics: tuple[int, list[Family]] | None = None  # those of the last flush
        self._batches = BatchOrder()
        self._num_refused_intervals = 0
        self._traces: deque[StepTrace] = deque()
        self._lines: deque[LogLine] = deque()
        # One circuit breaker per kind of data. If a receiver accepts only traces, its refusals of
        # metrics and log lines must not stop the traces.
        self._circuits: dict[Signal, CircuitBreaker] = {
            "traces": CircuitBreaker(now),
            "metrics": CircuitBreaker(now),
            "logs": CircuitBreaker(now),
        }
        self._logged: set[tuple[Signal, bool]] = set()
        self._logged_rejections: set[Signal] = set()
        self.end_was_sent = threading.Event()
        self.is_answered = self._has_answered = False
        self._open = self._is_loud = True
        self._ends_at = math.inf
        self._is_ending: Callable[[], bool] = lambda: False

    def add_trace(self, trace: StepTrace) -> None:
        """Queue a trace."""
        if len(self._traces) < MAX_TRACES:
            self._traces.append(trace)
        else:
            self.dropped += 1

    def add_line(self, line: LogLine) -> None:
        """Queue a log line."""
        if len(self._lines) < MAX_LINES:
            self._lines.append(line)
        else:
            self.dropped += 1

    def flush(self, *, final: bool = False, is_ending: Callable[[], bool] = lambda: False) -> bool:
        """Send the queued data until exports fail.

        Args:
            final: Whether this is the last call.
            is_ending: Returns whether the last call is due, so that this one must return early.

        Returns:
            Whether data is left because there was no time for it. The next call may follow at once.
        """
        if not self._is_named():
            return False
        self._is_ending = is_ending
        if final:  # the process does not wait for long, and the metrics have the end of the run
            self._send_metrics(final=True)
            if not self.is_end_left:
                self.end_was_sent.set()
        max_seconds = math.inf if final else MAX_SECONDS_OF_KIND
        has_lines = self._send_lines(max_seconds)
        has_traces = self._send_traces(max_seconds)
        if not final:  # after the traces, so that the metrics contain their exemplars
            self._send_metrics(final=False)
        return has_lines or has_traces

    @property
    def is_end_left(self) -> bool:
        """Whether another last flush may send the end of the run.

        The collector has refused it, but has accepted metrics before: it may come back.
        """
        return self._has_answered and self._batches.is_end_left and self._is_open()

    def finish_quietly(self) -> None:
        """Begin no request after three timeouts, and log nothing: the run has ended.

        Safe to call twice. The time counts from the first call.
        """
        self._is_loud = False
        ends_at = self._now() + TIMEOUTS_AT_END * max(self._options.timeouts.values())
        self._ends_at = min(self._ends_at, ends_at)

    def give_up(self) -> None:
        """Drop the queued data without further log lines. Safe to call twice."""
        if self._open:
            self._open = self._is_loud = False
            self.dropped += len(self._traces) + len(self._lines)

    def _is_open(self) -> bool:
        return self._open and self._now() < self._ends_at

    def _may_send(self, signal: Signal) -> bool:
        return self._is_open() and not self._is_ending() and self._circuits[signal].is_closed

    def _is_named(self) -> bool:
        if not self._identity:
            identity = self._find_identity()
            if identity is not None:
                self._identity = dict(identity)
                self._otlp.describe(self._describe())
        return bool(self._identity)

    def _send_traces(self, max_seconds: float) -> bool:
        """Send queued traces. Return whether some are left because the time is up."""
        ends_at = self._now() + max_seconds
        while self._traces and self._may_send("traces"):
            trace = self._traces.popleft()
            if self._sent("traces", self._otlp.send_traces([trace]), 1):
                self._add_exemplars(trace)
            if self._now() >= ends_at:
                return bool(self._traces)
        return False

    def _send_lines(self, max_seconds: float) -> bool:
        """Send queued log lines. Return whether some are left because the time is up."""
        ends_at = self._now() + max_seconds
        while self._lines and self._may_send("logs"):
            batch = [self._lines.popleft() for _ in range(min(LINES_AT_ONCE, len(self._lines)))]
            self._sent("logs", self._otlp.send_lines(batch), len(batch))
            if self._now() >= ends_at:
                return bool(self._lines)
        return False

    def _send_metrics(self, *, final: bool) -> None:
        now = self._now()
        # The end of the run is tried in a pause, too: the collector may just have come back.
        may_send = self._is_open() if final else self._may_send("metrics")
        if "metrics" not in self._options.endpoints or not may_send:
            return
        if now < self._metrics_due and not final:
            return
        self._metrics_due = now + self._options.metrics_interval_seconds
        # A repeated last flush sends the same values, with their time: a later run of this process
        # may have the same id, and may have sent newer values.
        now_ns, found = self._last_metrics or self._read_metrics()
        if final:
            self._last_metrics = now_ns, found
        num_allowed = FAILURES_ALLOWED if self._batches.is_accepted else 1
        self._batches.begin(found, final=final, end=self._end_names(found))
        self._send_batches(now_ns, num_allowed, final=final)
        self._batches.end()
        self._assess(final=final)

    def _read_metrics(self) -> tuple[int, list[Family]]:
        """Return the time in nanoseconds, and all families with their values."""
        now_ns, snapshot = time.time_ns(), self._recorder.snapshot()
        return now_ns, [
            *families(served(snapshot, self._detail), self._identity),
            *process_families(self._identity),
            *hardware_families(snapshot, self._hardware_ids, self._identity),
        ]

    def _end_names(self, found: list[Family]) -> set[str]:
        """Return the names of what the alerts on the end of a run read, if the run has ended."""
        if all(family.name != RUN_END_INFO.name for family in found):
            return set()
        start = {family.name for family in process_families(self._identity)}
        return {RUN_ACTIVE.name, RUN_END_INFO.name, *start}

    def _send_batches(self, now_ns: int, num_allowed: int, *, final: bool) -> None:
        """Send batches until `num_allowed` in a row are refused.

        Once a batch was accepted in this interval, refusals no longer hold back the batches that
        were not refused before. This is limited in time, because each refused request may take its
        timeout.
        """
        num_refused, accepted_at = 0, self._now()
        max_seconds = FAILURES_ALLOWED * self._options.timeouts["metrics"]
        while self._is_open() and (batch := self._batches.take()) is not None:
            was_accepted = self._send_batch(batch, now_ns)
            self._batches.note(batch, was_accepted=was_accepted)
            self.is_answered |= was_accepted
            self._has_answered |= was_accepted
            if final and not self._batches.is_end_left:
                self.end_was_sent.set()
            if self._is_ending():
                return
            if was_accepted:
                num_allowed, num_refused, accepted_at = FAILURES_ALLOWED, 0, self._now()
                continue
            num_refused += 1
            is_in_time = self._now() - accepted_at < max_seconds
            may_go_on = self._batches.is_accepted and self._batches.has_others and is_in_time
            if num_refused >= num_allowed and not may_go_on:
                return

    def _send_batch(self, batch: list[Family], now_ns: int) -> bool:
        increases = self._increases
        sent = batch if increases is None else increases.since_accepted(batch)
        was_accepted = self._otlp.send_metrics(sent, self._started_ns, now_ns)
        if was_accepted:
            if increases is not None:
                increases.accept(batch, now_ns)
            self._is_complete("metrics", 0)
        return was_accepted

    def _assess(self, *, final: bool) -> None:
        """Account for the metrics of one interval, of which some batches may be refused."""
        circuit, outcomes = self._circuits["metrics"], self._batches.outcomes
        if not final:
            self.is_answered = any(outcomes)
        if self._batches.is_accepted:
            circuit.succeeded()
        else:
            circuit.failed()
        if all(outcomes):
            self._num_refused_intervals = 0
            return
        self._recorder.add(EXPORTER_FAILURES, outcomes.count(False), "otlp")
        self._num_refused_intervals += 1
        if self._num_refused_intervals >= FAILURES_ALLOWED:
            self._log_refusal("metrics", is_part=self._batches.is_accepted)

    def _add_exemplars(self, trace: StepTrace) -> None:
        """Add the trace to histograms as an exemplar. The trace can be looked up from now on."""
        labels = {"trace_id": f"{trace.trace_id:032x}", "span_id": f"{trace.span_id:016x}"}
        ended_at = trace.root.end_ns / 1e9
        with self._recorder.commit():
            for seen in trace.examples:
                exemplar = Exemplar(labels=labels, value=seen.value, unix_seconds=ended_at)
                self._recorder.add_exemplar(seen.spec, *seen.labels, exemplar=exemplar)

    def _sent(self, signal: Signal, was_accepted: bool, num_items: int) -> bool:
        """Account for an export of `num_items` traces or lines. Return whether all are stored."""
        circuit = self._circuits[signal]
        if was_accepted:
            circuit.succeeded()
            return self._is_complete(signal, num_items)
        self.dropped += num_items
        self._recorder.add(EXPORTER_FAILURES, 1, "otlp")
        circuit.failed()
        if not circuit.is_closed:
            self._log_refusal(signal)
        return False

    def _is_complete(self, signal: Signal, num_items: int) -> bool:
        """Account for what the collector rejected of an accepted export, if anything."""
        rejection = self._otlp.rejections.pop(signal, None)
        if rejection is None:
            return True
        self.dropped += min(num_items, rejection.num_items)
        self._recorder.add(EXPORTER_FAILURES, 1, "otlp")
        if self._is_loud and signal not in self._logged_rejections:
            self._logged_rejections.add(signal)
            logger.log(
                logging.WARNING if self._rank == 0 else logging.INFO,
                "the OpenTelemetry collector at %s rejected %s of rank %d, %d in this export: "
                "%s. They are not sent again, and training continues; such exports are counted in "
                "%s.",
                _without_credentials(self._options.endpoints[signal]),
                rejection.items,
                self._rank,
                rejection.num_items,
                rejection.message,
                EXPORTER_FAILURES.name,
            )
        return False

    def _log_refusal(self, signal: Signal, *, is_part: bool = False) -> None:
        if not self._is_loud or (signal, is_part) in self._logged:
            return
        self._logged.add((signal, is_part))
        place = self._otlp.redirects.get(signal)
        what_next = (
            "the other metrics are sent, and training continues. Check the limits and the log of "
            "the collector"
            if is_part
            else "exports are retried less and less often, and training continues. Check the "
            f"endpoint, or set otel.{signal}=false to send none"
        )
        logger.log(
            logging.WARNING if self._rank == 0 else logging.INFO,
            "the OpenTelemetry collector at %s does not accept %s %s of rank %d%s; %s; failures "
            "are counted in %s.",
            _without_credentials(self._options.endpoints[signal]),
            "part of the" if is_part else "the",
            signal,
            self._rank,
            "" if place is None else f", but redirects to {_without_credentials(place)}",
            what_next,
            EXPORTER_FAILURES.name,
        )


def _without_credentials(url: str) -> str:
    return re.sub(r"(?<=://)[^/]*@", "***@", url)

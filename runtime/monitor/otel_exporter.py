"""Sends traces of steps, metrics and log lines to an OpenTelemetry collector, on its own thread.

A step is traced if it is sampled, or if it was slow or had an error on this rank. All ranks sample
the same steps. In a sampled step, the root span of each rank is a child of the root span of rank 0.
The root span of another step has no parent, because the step may not be traced on other ranks. It
links to the last sampled step, to compare the two.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...metrics.catalog import communication, training
from ...metrics.catalog.overhead import EXPORTER_FAILURES
from ...metrics.exporters.log_capture import LogCapture, log_line
from ...metrics.exporters.otel_resource import resource_attributes
from ...metrics.exporters.otlp_options import OtlpOptions, otlp_options
from ...metrics.exporters.otlp_queue import OtlpQueue
from ...metrics.exporters.telemetry_data import AttributeValue, Example, Span, StepTrace
from ..collectives.groups import CollectiveCall
from ..common.fail_open import MonitoringThread
from ..common.process_info import node_name
from ..common.step_errors import StepError
from ..instrumentation.watch_context import WatchContext
from .otel_spans import (
    SlowSteps,
    child_spans,
    exception_events,
    is_sampled,
    span_id_of,
    trace_id_of,
)
from .step_log import keeps_every_step
from .step_metrics import FinishedStep

if TYPE_CHECKING:
    from ...metrics.exporters.otlp import Otlp

logger = logging.getLogger(__name__)

# Time between two exports.
FLUSH_SECONDS = 2.0
# Longest wait of `close` for the last export, and at exit for a collector that does not answer.
CLOSE_SECONDS = 1.0
# Longest time since `close` that a process waits at exit until the end of the run was sent, if the
# collector answers. Twice the timeout of an export: one may be in flight. torchrun and Kubernetes
# kill a process 30 s after they have asked it to end.
EXIT_SECONDS = 10.0
# Maximum number of steps that are kept until the run has an id. Trace ids depend on the run id.
MAX_HELD_STEPS = 64


class OtelExporter:
    """Exports traces, metrics and log lines by OTLP. Does nothing if no endpoint is set.

    Constructed on the training thread.

    Args:
        context: The watch.
        hardware_ids: Returns the resource attributes of the device. Called only if data is sent.
        start: Returns the token of this start of the job, the same on all ranks. None until it is
            known, but known with the run id of rank 0.

    Attributes:
        makes_traces: Whether the caller should call `trace`.
        cpu_seconds: CPU time that the exporting thread has used.
    """

    def __init__(
        self,
        context: WatchContext,
        hardware_ids: Callable[[], Mapping[str, str]],
        start: Callable[[], str | None],
    ) -> None:
        self.makes_traces = False
        self.cpu_seconds = 0.0
        self._context = context
        self._options = otlp_options(context.settings.otel, os.environ)
        self._rank = context.identity.rank
        self._start_token = start
        self._own_start = secrets.token_hex(4)  # while the token, and so any parent, is unknown
        self._held: deque[FinishedStep] = deque()
        self._lost = 0
        self._slow = SlowSteps()
        self._last_ids: tuple[int, int] | None = None
        self._last_sampled_ids: tuple[int, int] | None = None
        self._num_hangs = 0
        self._lines: LogCapture | None = None
        self._outbox: OtlpQueue | None = None
        self._stop = threading.Event()
        self._has_waited = False
        self._closed_at: float | None = None
        self._thread: MonitoringThread | None = None
        self._trace_held_steps = context.fail_open.wrap("traces", self.trace)
        otlp = context.fail_open.call("otlp", _open_otlp, self._options, self._rank)
        if otlp is not None:
            self._start(otlp, hardware_ids)

    @property
    def is_on(self) -> bool:
        """Whether anything is exported."""
        return self._outbox is not None

    @property
    def dropped(self) -> int:
        """Number of traces and log lines lost."""
        return self._lost + (0 if self._outbox is None else self._outbox.dropped)

    def trace(self, steps: Sequence[FinishedStep]) -> None:
        """Make traces of the chosen steps. Called on the watch thread each second.

        The metrics of the steps are already published. A histogram gets an exemplar after its trace
        was sent.
        """
        self._held.extend(steps)
        run_id = self._context.run_id()
        while run_id is not None and self._held:
            self._trace_if_chosen(self._held.popleft(), run_id)
        while len(self._held) > MAX_HELD_STEPS:
            self._held.popleft()
            self._lost += 1

    def send(self, span: Span) -> None:
        """Send a span that belongs to no step, as its own trace. May be called on any thread."""
        if self._outbox is not None and self.makes_traces:
            trace_id, span_id = secrets.randbits(128) or 1, secrets.randbits(64) or 1
            self._outbox.add_trace(
                StepTrace(
                    trace_id=trace_id, span_id=span_id, parent_id=None, root=span, children=()
                )
            )

    def trace_run_error(self, error: BaseException | None) -> None:
        """Trace the step that an error has ended. Called on the training thread."""
        run_id, engine = self._context.run_id(), self._context.engine()
        intervals = list(self._context.phase_timer.drain_intervals())
        if not self.makes_traces or run_id is None or engine is None or error is None:
            return
        number, offset_ns = engine.global_steps + 1, time.time_ns() - time.perf_counter_ns()
        now_ns = time.time_ns()
        start_ns = intervals[0][1] + offset_ns if intervals else now_ns
        step_errors = self._context.step_errors
        step_errors.add_exception("run_failed", error)
        errors = step_errors.take(start_ns, time.time_ns())
        self._add_trace(
            run_id,
            number,
            Span(
                name="train.step",
                start_ns=start_ns,
                end_ns=now_ns,
                attributes={**self._place(run_id, number), "zerowatch.sampled_by": "error"},
                events=exception_events(errors),
                error=errors[-1].message,
            ),
            child_spans(intervals, (), offset_ns, now_ns),
        )

    def close(self) -> None:
        """Send all queued data. The thread goes on with what is left after CLOSE_SECONDS.

        Safe to call twice. If Ctrl-C ends the wait, the next call waits again.
        """
        if self._outbox is None or self._has_waited:
            return
        if self._lines is not None:
            self._lines.close()
        self._trace_held_steps(())
        self._lost += len(self._held)
        self._held.clear()
        self._closed_at = self._closed_at or time.monotonic()
        self._stop.set()
        # The thread may be in an export that cannot be interrupted. The script does not wait.
        if self._thread is None or self._thread.join(CLOSE_SECONDS):
            self._outbox.give_up()
        else:
            self._outbox.finish_quietly()
        self._has_waited = True

    def wait_for_end(self) -> None:
        """Wait at exit until the end of the run was sent, if the collector answers.

        A collector that has accepted nothing has no series of this run that would have to end.
        """
        thread, outbox = self._thread, self._outbox
        if outbox is None or thread is None or self._closed_at is None:
            return
        if thread.is_alive() and outbox.is_answered:
            outbox.end_was_sent.wait(max(0.0, self._closed_at + EXIT_SECONDS - time.monotonic()))

    def give_up(self) -> None:
        """Send nothing more, because the process ends now. Safe to call twice."""
        if self._outbox is not None:
            self._outbox.give_up()
            self._outbox.end_was_sent.set()  # no later call waits

    def close_after_fork(self) -> None:
        """Drop the parent's queue in a forked child, without touching its connections."""
        if self._lines is not None:
            self._lines.close()
        self._outbox = None

    def _start(self, otlp: Otlp, hardware_ids: Callable[[], Mapping[str, str]]) -> None:
        fail_open, options = self._context.fail_open, self._options
        self._context.recorder.start_counters((EXPORTER_FAILURES,), exporter=("otlp",))
        self._outbox = OtlpQueue(
            self._context.recorder,
            otlp,
            options,
            identity=self._identity,
            rank=self._rank,
            hardware_ids=fail_open.call("otlp", hardware_ids) or {},
            detail=self._context.settings.serve.detail,
            describe=self._resource,
        )
        if "traces" in options.endpoints:
            self.makes_traces = True
            self._context.phase_timer.record_intervals()
            self._context.step_errors.on_hang = fail_open.wrap("traces", self._trace_hang)
        if "metrics" in options.endpoints:
            self._context.recorder.counts_exponentially = options.has_exponential_histograms
        if "logs" in options.endpoints:
            self._lines = LogCapture(fail_open.wrap("log lines", self._add_line))
            self._lines.open()
        self._thread = self._context.fail_open.thread(
            "otlp", partial(self._run, otlp, self._outbox)
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # the system allows no more threads or memory
            self.close()
            self._outbox, self.makes_traces = None, False
            logger.warning(
                "nothing is sent to the OpenTelemetry collector, training goes on: %s", error
            )

    def _run(self, otlp: Otlp, outbox: OtlpQueue) -> None:
        fail_open = self._context.fail_open
        flush = fail_open.wrap("otlp", outbox.flush)
        fail_open.call("otlp", otlp.own_this_thread)
        pause_seconds = FLUSH_SECONDS
        while not self._stop.wait(pause_seconds):
            is_behind = flush(is_ending=self._stop.is_set)
            pause_seconds = 0.0 if is_behind else FLUSH_SECONDS
            self.cpu_seconds = time.thread_time()
        while flush(final=True) is not None and outbox.is_end_left:  # None: it has failed
            outbox.finish_quietly()  # `close` does not do so if Ctrl-C ends its wait
            time.sleep(FLUSH_SECONDS)
        outbox.give_up()  # count what is left
        outbox.end_was_sent.set()  # also if the flush has failed
        fail_open.call("otlp", otlp.close)

    def _identity(self) -> Mapping[str, str] | None:
        run_id = self._context.run_id()
        if run_id is None:
            return None
        return {
            "run": run_id,
            "node": node_name(self._context.identity.host),
            "rank": str(self._rank),
        }

    def _resource(self) -> Mapping[str, AttributeValue]:
        return resource_attributes(
            os.environ,
            script=sys.argv[0] if sys.argv else "",
            run_id=self._context.run_id() or "",
            rank=self._rank,
            host=self._context.identity.host,
        )

    def _trace_if_chosen(self, step: FinishedStep, run_id: str) -> None:
        record = step.record
        slow = self._slow.is_slow(record.training_seconds)
        ended_ns = round(1e9 * record.ended_at_unix_seconds)
        errors = self._context.step_errors.take(ended_ns - round(1e9 * record.seconds), ended_ns)
        if self._is_sampled(trace_id_of(run_id, record.step)):
            self._queue_trace(step, run_id, errors, reason="chance")
        elif (slow or errors) and self._slow.may_trace():
            self._queue_trace(step, run_id, errors, reason="error" if errors else "slow")
        elif slow or errors:
            self._lost += 1

    def _is_sampled(self, trace_id: int) -> bool:
        """Whether this rank traces the step. In large jobs, only the first rank per node does."""
        identity = self._context.identity
        return keeps_every_step(identity.world_size, identity.local_rank) and is_sampled(
            trace_id, self._options.sample_ratio
        )

    def _queue_trace(
        self, step: FinishedStep, run_id: str, errors: Sequence[StepError], *, reason: str
    ) -> None:
        intervals = list(step.raw.intervals)
        if not intervals:
            return
        number = step.record.step
        offset_ns = time.time_ns() - time.perf_counter_ns()
        root = Span(
            name="train.step",
            # Computed from the end: if there are very many intervals, the earliest are lost.
            start_ns=intervals[-1][2] + offset_ns - round(1e9 * step.record.seconds),
            end_ns=intervals[-1][2] + offset_ns,
            attributes=self._attributes(step, run_id, reason),
            events=exception_events(errors),
            error=errors[0].message if errors else None,
        )
        # Device times are relative to an event at the end of the step. The host may run ahead.
        spans = child_spans(intervals, _comparable(step), offset_ns, root.end_ns)
        is_sampled = reason == "chance"
        self._add_trace(
            run_id,
            number,
            root,
            spans,
            parent_id=self._span_id(run_id, number, 0) if is_sampled and self._rank else None,
            is_sampled=is_sampled,
            examples=_examples(step, spans),
        )

    def _trace_hang(self, error: StepError) -> None:
        """Trace a hang at once, below the span of its step, which is sent once the step ends."""
        run_id, engine = self._context.run_id(), self._context.engine()
        if self._outbox is None or run_id is None or engine is None:
            return
        number, idle_seconds = engine.global_steps + 1, self._context.phase_timer.idle_seconds()
        self._num_hangs += 1
        span_attempt = f"{self._attempt()}/hang {self._num_hangs}"
        self._outbox.add_trace(
            StepTrace(
                trace_id=trace_id_of(run_id, number),
                span_id=span_id_of(run_id, number, self._rank, attempt=span_attempt),
                parent_id=self._span_id(run_id, number, self._rank),
                root=Span(
                    name="hang",
                    start_ns=error.unix_ns - round(1e9 * idle_seconds),
                    end_ns=error.unix_ns,
                    attributes=self._place(run_id, number),
                    events=exception_events([error]),
                    error=error.message,
                ),
                children=(),
            )
        )

    def _add_trace(
        self,
        run_id: str,
        number: int,
        root: Span,
        children: Sequence[Span],
        *,
        parent_id: int | None = None,
        is_sampled: bool = False,
        examples: Sequence[Example] = (),
    ) -> None:
        if self._outbox is None:
            return
        ids = trace_id_of(run_id, number), self._span_id(run_id, number, self._rank)
        self._outbox.add_trace(
            StepTrace(
                trace_id=ids[0],
                span_id=ids[1],
                parent_id=parent_id,
                root=root,
                children=children,
                examples=examples,
                linked=None if is_sampled else self._last_sampled_ids,
            )
        )
        self._last_ids = ids
        if is_sampled:
            self._last_sampled_ids = ids

    def _span_id(self, run_id: str, step: int, rank: int) -> int:
        return span_id_of(run_id, step, rank, attempt=self._attempt())

    def _attempt(self) -> str:
        """Return what distinguishes this start of the job and this watch, the same on all ranks.

        The launcher's count of restarts does not: torchrun does not count the restart after a node
        was lost, and two nodes may count differently.
        """
        return f"{self._start_token() or self._own_start}.{self._context.watch_index}"

    def _place(self, run_id: str, number: int) -> dict[str, AttributeValue]:
        return {
            "zerowatch.run": run_id,
            "zerowatch.rank": self._rank,
            "zerowatch.attempt": self._context.identity.attempt,
            "zerowatch.step": number,
        }

    def _attributes(
        self, step: FinishedStep, run_id: str, reason: str
    ) -> dict[str, AttributeValue]:
        record = step.record
        known: dict[str, AttributeValue | None] = {
            **self._place(run_id, record.step),
            "zerowatch.sampled_by": reason,
            "zerowatch.micro_batches": record.micro_batches,
            "zerowatch.samples": record.samples,
            "zerowatch.tokens": record.tokens,
            "zerowatch.loss": record.loss,
            "zerowatch.collectives": sum(each.calls for each in record.collectives.values()),
            "zerowatch.comm_exposed_seconds": record.comm_exposed_seconds,
        }
        return {name: value for name, value in known.items() if value is not None}

    def _add_line(self, record: logging.LogRecord) -> None:
        if self._outbox is not None:
            self._outbox.add_line(log_line(record, self._rank, self._current_ids()))

    def _current_ids(self) -> tuple[int, int] | None:
        """Return the trace id and span id of the current step if sampled, else the last ids."""
        run_id, engine = self._context.run_id(), self._context.engine()
        if self.makes_traces and run_id is not None and engine is not None:
            step = engine.global_steps + 1
            trace_id = trace_id_of(run_id, step)
            if self._is_sampled(trace_id):
                return trace_id, self._span_id(run_id, step, self._rank)
        return self._last_ids


def _open_otlp(options: OtlpOptions, rank: int) -> Otlp | None:
    """Return the exporter, or None if there is nothing to send or the SDK is missing."""
    for level, remark in options.remarks if rank == 0 else ():
        logger.log(level, "%s", remark)
    if not options.endpoints:
        return None
    try:
        from ...metrics.exporters.otlp import Otlp
    except ImportError as error:
        logger.log(
            logging.WARNING if rank == 0 else logging.INFO,
            "nothing is sent to the OpenTelemetry collector, training goes on: %s; "
            "pip install 'zerowatch[otel]', or unset otel.endpoint",
            error,
        )
        return None
    return Otlp(options)


def _comparable(step: FinishedStep) -> Sequence[CollectiveCall]:
    """Return the calls with comparable times. On CUDA, they need the anchor of the last batch."""
    if step.raw.batch.anchor is not None:
        return step.raw.batch.calls
    return [call for call in step.calls if call.start_event is None]


def _examples(step: FinishedStep, spans: Sequence[Span]) -> list[Example]:
    """Return exemplars for the histograms. The script's own span of the step takes precedence."""
    examples = [
        Example(
            spec=communication.COLLECTIVE_DURATION,
            labels=(str(span.attributes["zerowatch.op"]),),
            value=(span.end_ns - span.start_ns) / 1e9,
        )
        for span in spans
        if "zerowatch.op" in span.attributes and "zerowatch.pieces" not in span.attributes
    ]
    if step.raw.trace is None:
        seconds = step.record.training_seconds
        examples.append(Example(spec=training.STEP_DURATION, labels=(), value=seconds))
    return examples

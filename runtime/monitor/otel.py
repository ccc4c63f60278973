"""Traces of steps, metrics and log lines to an OpenTelemetry collector, on a thread of their own.

A trace is one of a step that chance picks alike on all ranks, or that was slow on this one. All
ranks' parts of the first kind hang under rank 0's; a slow step's stands by itself, for no other
rank need have found it slow.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ...metrics.catalog import communication, training
from ...metrics.exporters.log_capture import LogCapture, log_line
from ...metrics.exporters.otel_resource import is_standard_endpoint, resource_attributes
from ...metrics.exporters.otlp_queue import OtlpQueue
from ...metrics.exporters.telemetry_data import Example, Span, StepTrace, Value
from ...metrics.settings import OtelSettings
from ..collectives.call import CollectiveCall
from ..instrumentation.watch_context import WatchContext
from .otel_sampling import SlowSteps, is_sampled, span_id_of, trace_id_of
from .otel_spans import children
from .step_log import keeps_every_step
from .step_metrics import Step

if TYPE_CHECKING:
    from ...metrics.exporters.otlp import Otlp

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 2.0
# How long the end of a run waits for the last export.
CLOSE_SECONDS = 1.0
# Steps kept while the run has no name yet, and so no ids.
MAX_HELD_STEPS = 64


class OtelExporter:
    """Made on the training thread. Where nothing is to be sent it does nothing.

    Attributes:
        makes_traces: Whether `trace` is to be called.
        cpu_seconds: CPU time that the sending thread has used.
    """

    def __init__(
        self, context: WatchContext, hardware_ids: Callable[[], Mapping[str, str]]
    ) -> None:
        self.makes_traces = False
        self.cpu_seconds = 0.0
        self._context = context
        self._settings = context.settings.otel
        self._rank = context.identity.rank
        # Nodes may count their restarts differently; a rank there then hangs under nobody.
        self._life = f"{context.identity.attempt}.{context.watch_index}"
        self._held: deque[Step] = deque()
        self._lost = 0
        self._slow = SlowSteps()
        self._last_ids: tuple[int, int] | None = None
        self._lines: LogCapture | None = None
        self._outbox: OtlpQueue | None = None
        self._stop = threading.Event()
        otlp = context.fail_open.wrap("otlp", _open_otlp)(self._settings, self._rank)
        if otlp is not None:
            self._begin(otlp, hardware_ids)

    @property
    def is_on(self) -> bool:
        """Whether anything is sent."""
        return self._outbox is not None

    @property
    def dropped(self) -> int:
        """Traces and log lines lost."""
        return self._lost + (0 if self._outbox is None else self._outbox.dropped)

    def trace(self, steps: Sequence[Step]) -> None:
        """Make traces of those steps that leave one. Called on the watch thread, each second.

        They were published already: an exemplar comes to its histogram once its trace was sent.
        """
        self._held.extend(steps)
        run_id = self._context.run_id()
        while run_id is not None and self._held:
            self._consider(self._held.popleft(), run_id)
        while len(self._held) > MAX_HELD_STEPS:
            self._held.popleft()
            self._lost += 1

    def tell(self, span: Span) -> None:
        """Send something that happened beside the steps, as a trace of its own. On any thread."""
        if self._outbox is not None and self.makes_traces:
            trace_id, span_id = secrets.randbits(128) or 1, secrets.randbits(64) or 1
            self._outbox.add_trace(
                StepTrace(
                    trace_id=trace_id, span_id=span_id, parent_id=None, root=span, children=()
                )
            )

    def close(self) -> None:
        """Send what is left, for at most CLOSE_SECONDS. Safe to call twice."""
        if self._outbox is None or self._stop.is_set():
            return
        if self._lines is not None:
            self._lines.close()
        self._last_traces(())
        self._lost += len(self._held)
        self._stop.set()
        # It may be inside an export that nothing can interrupt; the process need not wait for it.
        self._thread.join(CLOSE_SECONDS)
        self._outbox.give_up()

    def close_after_fork(self) -> None:
        """In a forked child: let go of what is the parent's, without touching its connections."""
        if self._lines is not None:
            self._lines.close()
        self._outbox = None

    def _begin(self, otlp: Otlp, hardware_ids: Callable[[], Mapping[str, str]]) -> None:
        wrap, settings = self._context.fail_open.wrap, self._settings
        self._outbox = OtlpQueue(
            self._context.recorder,
            otlp,
            settings,
            rank=self._rank,
            hardware_ids=wrap("otlp", hardware_ids)() or {},
            describe=self._describe,
        )
        self._own_thread = wrap("otlp", otlp.own_this_thread)
        self._flush = wrap("otlp", self._outbox.flush)
        self._close_otlp = wrap("otlp", otlp.close)
        self._last_traces = wrap("traces", self.trace)
        if settings.traces:
            self.makes_traces = True
            self._context.clock.keep_intervals()
        if settings.logs:
            self._lines = LogCapture(wrap("log lines", self._take_line))
            self._lines.open()
        self._thread = threading.Thread(target=self._run, name="zerowatch-otlp", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._own_thread()
        while not self._stop.wait(FLUSH_SECONDS):
            self._flush()
            self.cpu_seconds = time.thread_time()
        self._flush(final=True)
        self._close_otlp()

    def _describe(self) -> Mapping[str, Value] | None:
        run_id = self._context.run_id()
        if run_id is None:
            return None
        host = self._context.identity.host
        return resource_attributes(os.environ, run_id=run_id, rank=self._rank, host=host)

    def _consider(self, step: Step, run_id: str) -> None:
        slow = self._slow.is_slow(step.record.training_seconds)
        trace_id = trace_id_of(run_id, step.record.step)
        if self._is_sampled(trace_id):
            self._give(step, run_id, trace_id, reason="chance")
        elif slow and self._slow.may_trace():
            self._give(step, run_id, trace_id, reason="slow")
        elif slow:
            self._lost += 1

    def _is_sampled(self, trace_id: int) -> bool:
        """Whether all ranks trace this step; of very many those that are first on their node."""
        identity = self._context.identity
        return keeps_every_step(identity.world_size, identity.local_rank) and is_sampled(
            trace_id, self._settings.every_steps
        )

    def _give(self, step: Step, run_id: str, trace_id: int, *, reason: str) -> None:
        intervals = list(step.closed.intervals)
        if self._outbox is None or not intervals:
            return
        number = step.record.step
        span_id = self._span_id(run_id, number, self._rank)
        hangs = reason == "chance" and self._rank != 0
        offset_ns = time.time_ns() - time.perf_counter_ns()
        root = Span(
            name="train.step",
            # Not the first interval's: of very many the earliest are lost.
            start_ns=intervals[-1][2] + offset_ns - round(1e9 * step.record.seconds),
            end_ns=intervals[-1][2] + offset_ns,
            attributes=self._attributes(step, run_id, reason),
        )
        # Device times are those before an event at the step's end, which the host may be ahead of.
        spans = children(intervals, _comparable(step), offset_ns, root.end_ns)
        self._outbox.add_trace(
            StepTrace(
                trace_id=trace_id,
                span_id=span_id,
                parent_id=self._span_id(run_id, number, 0) if hangs else None,
                root=root,
                children=spans,
                examples=_examples(step, spans),
            )
        )
        self._last_ids = trace_id, span_id

    def _span_id(self, run_id: str, step: int, rank: int) -> int:
        return span_id_of(run_id, step, rank, life=self._life)

    def _attributes(self, step: Step, run_id: str, reason: str) -> dict[str, Value]:
        record = step.record
        known: dict[str, Value | None] = {
            "zerowatch.run": run_id,
            "zerowatch.rank": self._rank,
            "zerowatch.attempt": self._context.identity.attempt,
            "zerowatch.step": record.step,
            "zerowatch.sampled_by": reason,
            "zerowatch.micro_batches": record.micro_batches,
            "zerowatch.samples": record.samples,
            "zerowatch.tokens": record.tokens,
            "zerowatch.loss": record.loss,
            "zerowatch.collectives": sum(each.calls for each in record.collectives.values()),
            "zerowatch.comm_exposed_seconds": record.comm_exposed_seconds,
        }
        return {name: value for name, value in known.items() if value is not None}

    def _take_line(self, record: logging.LogRecord) -> None:
        if self._outbox is not None:
            self._outbox.add_line(log_line(record, self._rank, self._ids_of_now()))

    def _ids_of_now(self) -> tuple[int, int] | None:
        """Return trace and span of the step under way, if it will be sampled; else of the last."""
        run_id, engine = self._context.run_id(), self._context.engine()
        if self.makes_traces and run_id is not None and engine is not None:
            step = engine.global_steps + 1
            trace_id = trace_id_of(run_id, step)
            if self._is_sampled(trace_id):
                return trace_id, self._span_id(run_id, step, self._rank)
        return self._last_ids


def _open_otlp(settings: OtelSettings, rank: int) -> Otlp | None:
    """Return what sends, or None where nothing is to be sent or the SDK is missing."""
    wanted = settings.traces or settings.metrics or settings.logs
    if not wanted or not (settings.endpoint or is_standard_endpoint(os.environ)):
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
    return Otlp(settings.endpoint, settings.timeout_seconds)


def _comparable(step: Step) -> Sequence[CollectiveCall]:
    """Return the calls whose times can be told: on CUDA not those on an earlier batch's anchor."""
    if step.closed.batch.anchor is not None:
        return step.closed.batch.calls
    return [call for call in step.calls if call.start_event is None]


def _examples(step: Step, spans: Sequence[Span]) -> list[Example]:
    """Name the observations that the trace shows; the script's own span of a step goes first."""
    found = [
        Example(
            spec=communication.COLLECTIVE_SECONDS,
            labels=(str(span.attributes["zerowatch.op"]),),
            value=(span.end_ns - span.start_ns) / 1e9,
        )
        for span in spans
        if "zerowatch.op" in span.attributes and "zerowatch.pieces" not in span.attributes
    ]
    if step.closed.trace is None:
        seconds = step.record.training_seconds
        found.append(Example(spec=training.STEP_SECONDS, labels=(), value=seconds))
    return found

"""Logs changes that would speed up a job with its own training loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ...metrics.exporters.telemetry_data import Span
from ..common.gil_pauses import let_training_run
from ..common.torch_engine import TorchEngine
from ..estimator.engine_estimate import is_data_parallel
from ..instrumentation.watch_context import WatchContext
from ..tuner.decision_reporter import DecisionReporter
from ..tuner.job_facts import job_facts
from ..tuner.policy.controller_interface import WARMUP_STEPS
from ..tuner.policy.diagnose import COMM_SYMPTOMS, Thresholds, diagnose
from ..tuner.policy.metrics_delta import MetricsDelta
from ..tuner.policy.policy_types import JobFacts, Mode, Numerics, State, Symptom
from ..tuner.policy.proposals import TunerInput, propose
from ..tuner.policy.step_time_observer import SnapshotIntervals
from ..tuner.policy.trial import Decision

if TYPE_CHECKING:
    from ..tuner.knobs.read_only_knobs import ReadOnlyKnobs

logger = logging.getLogger(__name__)

# Minimum length of the interval that a diagnosis covers, in seconds and in steps.
MIN_SECONDS = 30.0
MIN_STEPS = 20
# Symptoms that often share one cause: an idle device mostly waits for communication or for Python.
# For all of them together, only the best advice is given.
WAITING_SYMPTOMS = frozenset((*COMM_SYMPTOMS, "device_idle", "host_bound"))


class Intervals(Protocol):
    """Measures successive intervals of a run.

    Attributes:
        is_waiting: Whether the last call is to be repeated, because it waited for a publication.
    """

    is_waiting: bool

    def start(self) -> None:
        """Begin an interval."""

    def end(self) -> MetricsDelta | None:
        """Return what the metrics did in the interval, if it is known, and begin the next one."""


class Advisor:
    """Diagnoses rank 0's metrics periodically on the watch thread. It gives each advice once.

    Args:
        context: The watch of the engine.
        send: Sends a span to a collector. Does nothing if there is no collector.
        intervals: Measures the intervals; by default by snapshots of the recorder. They begin and
            end where communication was published.
        now: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        context: WatchContext,
        send: Callable[[Span], object],
        intervals: Intervals | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context, self._send, self._now = context, send, now
        is_enabled = context.identity.rank == 0 and context.settings.tuner.mode != "off"
        call = context.fail_open.call
        is_torch = isinstance(context.engine(), TorchEngine)  # it has no knobs
        self._knobs_class = call("advisor", _import_knobs) if is_enabled and not is_torch else None
        self._is_enabled = is_enabled and (is_torch or self._knobs_class is not None)
        self._reporter: DecisionReporter | None = None
        self._knobs: ReadOnlyKnobs | None = None
        self._intervals = intervals or SnapshotIntervals(
            context.recorder, context.settings.cross_rank.interval_seconds, now
        )
        self._has_begun = False
        self._since, self._first_step = 0.0, 0
        self._facts: JobFacts | None = None
        self._advised: set[tuple[str, tuple[str, ...]]] = set()

    def poll(self) -> None:
        """Diagnose the metrics and give advice, if the interval is long enough."""
        engine = self._context.engine() if self._is_enabled else None
        if engine is None or engine.global_steps < WARMUP_STEPS:
            return
        if not self._has_begun:
            self._intervals.start()
            self._has_begun = not self._intervals.is_waiting
            self._start_interval(engine)
        elif (
            self._now() - self._since >= MIN_SECONDS
            and engine.global_steps - self._first_step >= MIN_STEPS
        ):
            reading = self._intervals.end()
            let_training_run()
            if self._intervals.is_waiting:
                return
            reporter = self._start_interval(engine)
            let_training_run()
            if reading is not None:
                self._advise(reporter, engine, reading)

    def disable(self) -> None:
        """Stop advising, e.g. if the run ends with an error, which must stay the last output."""
        self._is_enabled = False

    def transfer_reporter(self, mode: Mode) -> DecisionReporter:
        """Stop advising, and return a reporter for the tuner of this run."""
        self.disable()
        return DecisionReporter(self._context, mode=mode, send=self._send)

    def _start_interval(self, engine: Any) -> DecisionReporter:
        self._since, self._first_step = self._now(), engine.global_steps
        if self._reporter is None:
            if self._context.settings.tuner.mode == "auto":
                # A TrainingRun has disabled this advisor before the first step.
                logger.warning(
                    "tuner.mode is auto, but the tuner can change a job only in a TrainingRun: it "
                    "advises, and changes nothing"
                )
            self._reporter = DecisionReporter(self._context, mode="advise", send=self._send)
            # Published at once, so a run has the same series from its first steps on.
            self._reporter.on_state(State.OBSERVE)
            self._reporter.on_diagnosis(())
            let_training_run()
            if self._knobs_class is not None and is_data_parallel(engine):
                self._knobs = self._knobs_class(engine, self._context.identity.world_size)
                let_training_run()
                self._reporter.on_configuration(self._knobs.values())
        return self._reporter

    def _advise(self, reporter: DecisionReporter, engine: Any, reading: MetricsDelta) -> None:
        thresholds = Thresholds.of_settings(self._context.settings)
        symptoms = diagnose(reading, thresholds)
        let_training_run()
        reporter.on_diagnosis(symptoms)
        inputs = self._inputs(engine, reading, symptoms, thresholds)
        if inputs is None:
            return
        let_training_run()
        reporter.on_configuration(inputs.configuration)
        let_training_run()
        seen = set()
        for proposal in propose(inputs, let_training_run):
            let_training_run()
            name = proposal.symptom.name
            group = "waiting" if name in WAITING_SYMPTOMS else name
            advice = group, tuple(sorted(proposal.changes))
            # Give only the best advice per group. The next advice follows when the best one has
            # been applied or is no longer proposed.
            if group not in seen and advice not in self._advised:
                self._advised.add(advice)
                reporter.on_decision(
                    Decision(
                        proposal=proposal, inputs=inputs, verdict="advised", reason=proposal.reason
                    )
                )
            seen.add(group)

    def _inputs(
        self,
        engine: Any,
        reading: MetricsDelta,
        symptoms: Sequence[Symptom],
        thresholds: Thresholds,
    ) -> TunerInput | None:
        """Return the input of proposals. None if not data parallel: predictions do not exist."""
        if self._knobs is None or not is_data_parallel(engine):
            return None
        if self._facts is None:
            self._facts = job_facts(engine)
        let_training_run()
        settings = self._context.settings.tuner
        configuration = self._knobs.values()
        let_training_run()
        options = self._knobs.options()
        let_training_run()
        return TunerInput(
            configuration=configuration,
            options=options,
            facts=self._facts,
            numerics=Numerics.of_setting(settings.numerics),
            allows_rebuild=settings.rebuild,
            symptoms=symptoms,
            reading=reading,
            samples_per_rank=int(
                engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
            ),
            thresholds=thresholds,
        )


def _import_knobs() -> type[ReadOnlyKnobs]:
    """Import the knobs late. They use DeepSpeed internals, which a release may have moved."""
    from ..tuner.knobs.read_only_knobs import ReadOnlyKnobs

    return ReadOnlyKnobs

"""Says what would make a job faster, whose training loop is the script's own. Never touches it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...metrics.exporters.telemetry_data import Span
from ...metrics.snapshot import Snapshot
from ..estimator.engine_plan import is_data_parallel
from ..instrumentation.watch_context import WatchContext
from ..tuner.job_facts import job_facts
from ..tuner.policy.decision import Mode
from ..tuner.policy.diagnose import COMM_SYMPTOMS, Thresholds, diagnose
from ..tuner.policy.experiment import Conclusion
from ..tuner.policy.metrics_delta import MetricsDelta, metrics_between
from ..tuner.policy.numerics import JobFacts, numerics_named
from ..tuner.policy.proposals import TunerInput, propose
from ..tuner.policy.types import Symptom
from ..tuner.reporting import TunerReporter
from ..tuner.thresholds import thresholds_of

if TYPE_CHECKING:
    from ..tuner.knobs.engine_knobs import EngineKnobs


WARMUP_STEPS = 5
# Of a stretch that is looked at: exposed communication is told some seconds late.
LEAST_SECONDS, LEAST_STEPS = 30.0, 20
# An idle device mostly waits for communication or for Python: one advice against all of these.
WAITING_SYMPTOMS = frozenset((*COMM_SYMPTOMS, "device_idle", "host_bound"))


class Advisor:
    """Looks at rank 0's metrics now and then, on the watch thread; says each advice once.

    Args:
        context: The watch.
        send: Sends a span to a collector; does nothing where there is none.
        now: A clock that does not go back, in seconds.
    """

    def __init__(
        self,
        context: WatchContext,
        send: Callable[[Span], object],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context, self._send, self._now = context, send, now
        speaks = context.identity.rank == 0 and context.settings.tuner.mode != "off"
        self._new_hands = context.fail_open.wrap("advisor", _engine_hands)() if speaks else None
        self._speaks = self._new_hands is not None
        self._voice: TunerReporter | None = None
        self._before: Snapshot | None = None
        self._since, self._first_step = 0.0, 0
        self._facts: JobFacts | None = None
        self._said: set[tuple[str, tuple[str, ...]]] = set()

    def look(self) -> None:
        """Look, if the last look is long enough ago."""
        engine = self._context.engine() if self._speaks else None
        if engine is None or engine.global_steps < WARMUP_STEPS:
            return
        if self._before is None:
            self._begin(engine, self._context.recorder.snapshot())
        elif (
            self._now() - self._since >= LEAST_SECONDS
            and engine.global_steps - self._first_step >= LEAST_STEPS
        ):
            before, after = self._before, self._context.recorder.snapshot()
            self._advise(self._begin(engine, after), engine, metrics_between(before, after))

    def disable(self) -> None:
        """Say nothing from now on, as where the run ends by an error: that must be what is read."""
        self._speaks = False

    def transfer_reporter(self, mode: Mode) -> TunerReporter:
        """Fall silent for good, and return the voice for who tunes this run instead."""
        self.disable()
        return self._new_voice(mode)

    def _begin(self, engine: Any, snapshot: Snapshot) -> TunerReporter:
        """Begin another stretch."""
        self._before = snapshot
        self._since, self._first_step = self._now(), engine.global_steps
        if self._voice is None:
            self._voice = self._new_voice("advise")
            self._voice.state("observe")
            # At once, so that a run's series stay the same from its first steps on.
            self._voice.diagnosed((), MetricsDelta())
            if self._new_hands is not None and is_data_parallel(engine):
                hands = self._new_hands(engine, self._context.identity.world_size)
                self._voice.configured(hands.values())
        return self._voice

    def _new_voice(self, mode: Mode) -> TunerReporter:
        context = self._context
        return TunerReporter(
            context.recorder,
            folder=context.folder,
            step=lambda: getattr(context.engine(), "global_steps", 0),
            world_size=context.identity.world_size,
            mode=mode,
            send=self._send,
        )

    def _advise(self, voice: TunerReporter, engine: Any, reading: MetricsDelta) -> None:
        thresholds = thresholds_of(self._context.settings)
        symptoms = diagnose(reading, thresholds)
        voice.diagnosed(symptoms, reading)
        situation = self._situation(engine, reading, symptoms, thresholds)
        if situation is None:
            return
        voice.configured(situation.configuration)
        seen = set()
        for proposal in propose(situation):
            symptom = proposal.symptom.name
            ill = "waiting" if symptom in WAITING_SYMPTOMS else symptom
            advice = ill, tuple(sorted(proposal.changes))
            # The best one against each ill; others wait until it was heeded, or is none any more.
            if ill not in seen and advice not in self._said:
                self._said.add(advice)
                voice.concluded(
                    Conclusion(
                        proposal=proposal,
                        situation=situation,
                        verdict="advised",
                        reason=proposal.why,
                    )
                )
            seen.add(ill)

    def _situation(
        self,
        engine: Any,
        reading: MetricsDelta,
        symptoms: Sequence[Symptom],
        thresholds: Thresholds,
    ) -> TunerInput | None:
        """Describe the job; None where more than data is shared out: nothing foretells that."""
        if self._new_hands is None or not is_data_parallel(engine):
            return None
        if self._facts is None:
            self._facts = job_facts(engine)
        tuner = self._context.settings.tuner
        hands = self._new_hands(engine, self._facts.world_size)
        return TunerInput(
            configuration=hands.values(),
            options=hands.options(),
            facts=self._facts,
            numerics=numerics_named(tuner.numerics),
            allows_rebuild=tuner.rebuild,
            symptoms=symptoms,
            reading=reading,
            samples_per_rank=int(
                engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
            ),
            thresholds=thresholds,
        )


def _engine_hands() -> type[EngineKnobs]:
    """Import what knows DeepSpeed's inside; a watch goes on where a release has moved that."""
    from ..tuner.knobs.engine_knobs import EngineKnobs

    return EngineKnobs

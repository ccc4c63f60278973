"""Recorded decisions made again by today's code, from the figures that were recorded. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .decision import changes_of
from .diagnose import diagnose
from .messages import changes_words, speed_words
from .proposals import propose
from .recorded import Recorded
from .trial import Judgement, Trial
from .trial_plan import TrialPlan
from .types import Symptom


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What today's code makes of one decision; each part None where it is as it was.

    Attributes:
        diagnosis: What it sees instead.
        proposal: What it would try instead.
        verdict: What it would find instead.
    """

    diagnosis: str | None = None
    proposal: str | None = None
    verdict: str | None = None

    @property
    def differences(self) -> tuple[str, ...]:
        """What is different, in words."""
        return tuple(filter(None, (self.diagnosis, self.proposal, self.verdict)))


def replay(record: Recorded) -> Replayed:
    """Diagnose, propose and measure once more."""
    return Replayed(
        diagnosis=_diagnosis(record), proposal=_proposal(record), verdict=_verdict(record)
    )


def judged(plan: TrialPlan, times: Sequence[float | None]) -> Judgement | None:
    """Measure recorded windows once more; None where they do not make a verdict."""
    trial = Trial(plan)
    for time in times:
        trial.add(time)
    return trial.verdict


def _diagnosis(record: Recorded) -> str | None:
    then = [symptom.name for symptom in record.situation.symptoms]
    now = [symptom.name for symptom in _symptoms(record)]
    if then == now:
        return None
    return f"it would see {', '.join(now) or 'nothing'} instead of {', '.join(then) or 'nothing'}"


def _proposal(record: Recorded) -> str | None:
    """Say what would be proposed; what was passed over for its price stands before it."""
    situation = replace(record.situation, symptoms=_symptoms(record))
    proposed = [changes_of(situation.configuration, one.changes) for one in propose(situation)]
    if tuple(record.decision.changes) in proposed:
        return None
    if not proposed:
        return "it would propose nothing"
    return f"it would propose {changes_words(proposed[0])}"


def _verdict(record: Recorded) -> str | None:
    decision = record.decision
    if record.plan is None or decision.gain is None:
        return None
    found = judged(record.plan, record.times)
    if found is None:
        return "it would not be sure yet"
    if found.verdict == decision.verdict:
        return None
    return f"it would be {found.verdict}: {found.reason} ({speed_words(found.gain)})"


def _symptoms(record: Recorded) -> Sequence[Symptom]:
    return diagnose(record.situation.reading, record.situation.thresholds)

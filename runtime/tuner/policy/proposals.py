"""What to try, in which order, against what holds a job back. Pure.

Nothing is proposed that the numerics forbids, that cannot be set here, or that has failed in these
surroundings before.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .candidates import candidate_values, in_several_buckets, with_partners
from .diagnose import (
    COMM_SYMPTOMS,
    DEFAULT_THRESHOLDS,
    MEMORY_IDLE,
    MEMORY_PRESSURE,
    Thresholds,
    exposed_ratio,
)
from .metrics_delta import MetricsDelta
from .numerics import SUM_KNOBS, JobFacts, required_numerics_of_all
from .predict import predicted_gain
from .registry import KNOBS, SPECS, KnobSpec, Trigger
from .types import Configuration, Numerics, Proposal, Symptom, Value

LEAST_GAIN = 0.01  # below it no trial could tell it from chance
LEAST_REBUILD_GAIN = 0.05  # a rebuild cannot be tried in turns, and may go wrong
_WORTH_A_REBUILD = 1.15  # times what a live change is predicted to gain
_ALIKE = 0.02  # predictions that differ by less are as good as each other
_SURE_LOSS = -0.15  # more than overlapping and the like, which nobody predicts, may make up for
_BACK_RATIO = 0.5  # of what is too much waiting; so that nothing goes to and fro
# Against communication these do what is predicted, and nothing else.
_PREDICTED = frozenset(("zero_stage", "gradient_compression", "batch_samples"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerInput:
    """All that proposals are made of.

    Attributes:
        configuration: What the job works with, and is known to work; whole.
        options: What each knob could be set to here.
        facts: Of the job.
        numerics: What the user allows.
        allows_rebuild: Whether the engine may be rebuilt.
        symptoms: What holds the job back, in their order.
        reading: What they were told from.
        samples_per_rank: Of a window.
        denied: Knobs and values that did not help in these surroundings, those that were in use
            before something better was found included.
        remembered: A whole configuration that was the best in these surroundings.
        thresholds: Of the diagnosis.
        context: The surroundings; "" if nobody has named them.
    """

    configuration: Configuration
    options: Mapping[str, Sequence[Value]]
    facts: JobFacts
    numerics: Numerics
    allows_rebuild: bool
    symptoms: Sequence[Symptom]
    reading: MetricsDelta
    samples_per_rank: int
    denied: Collection[tuple[str, Value]] = ()
    remembered: Configuration | None = None
    thresholds: Thresholds = DEFAULT_THRESHOLDS
    context: str = ""

    def symptom(self, name: str) -> Symptom | None:
        """Return the symptom of a name, if it is there."""
        return next((one for one in self.symptoms if one.name == name), None)


def propose(situation: TunerInput) -> list[Proposal]:
    """Return what to try, the best first.

    While memory is short there is nothing but what gives some back, and that needs no gain.
    Otherwise: what was best here before; what is predicted to gain; what only a trial can tell; and
    what is not needed any longer.
    """
    pressure = situation.symptom(MEMORY_PRESSURE)
    if pressure is not None:
        return _first_of_each(_for_symptom(situation, pressure))
    found = [
        proposal
        for symptom in _in_their_order(situation)
        for proposal in _worth_trying(_for_symptom(situation, symptom))
    ]
    return _dedupe(
        [*_from_history(situation), *sorted(found, key=_priority), *relaxations(situation)]
    )


def relaxations(situation: TunerInput) -> list[Proposal]:
    """Return what takes back a costly change whose reason is gone; it need not gain anything."""
    return [*_drop_compression(situation), *_spend_memory(situation)]


def _in_their_order(situation: TunerInput) -> Iterator[Symptom]:
    """Yield the symptoms that may be acted on; memory to spare only to help against another."""
    others = [one for one in situation.symptoms if one.name != MEMORY_IDLE]
    return iter(situation.symptoms if others else ())


def _for_symptom(situation: TunerInput, symptom: Symptom) -> Iterator[Proposal]:
    """Yield what may help against a symptom, in the registry's order."""
    for spec in KNOBS:
        trigger = spec.triggers.get(symptom.name)
        if trigger is None or spec.name not in situation.configuration:
            continue
        if spec.device_only and situation.reading.on_cpu:
            continue
        for value in _untried(situation, spec, trigger):
            changes = in_several_buckets(
                situation.configuration,
                {spec.name: value},
                situation.options.get("reduce_bucket_size", ()),
                situation.facts,
            )
            proposal = _proposal(situation, changes, symptom, spec.what)
            if proposal is not None:
                yield proposal


def _from_history(situation: TunerInput) -> Iterator[Proposal]:
    """Yield the way to what was the best here before, as one change.

    That was measured here, or lived with: nothing need be foretold of what can be tried in turns.
    """
    changes = {
        knob: value
        for knob, value in (situation.remembered or {}).items()
        if knob in situation.configuration
        and value != situation.configuration[knob]
        and value in situation.options.get(knob, ())
    }
    if not changes:
        return
    symptom = next(iter(situation.symptoms), None) or _waiting(situation)
    proposal = _proposal(situation, changes, symptom, "what was the best in such surroundings")
    if proposal is None:
        return
    if proposal.tier == "live":
        proposal = replace(proposal, predicted_gain=None)
    yield replace(proposal, relaxes=changes == {"gradient_compression": None})


def _drop_compression(situation: TunerInput) -> Iterator[Proposal]:
    """Yield gradients as they are, if waiting for them would stay short."""
    knob = "gradient_compression"
    waits = exposed_ratio(situation.reading, situation.thresholds)
    if waits is None or situation.configuration.get(knob) is None:
        return
    if (knob, None) in situation.denied or None not in situation.options.get(knob, ()):
        return
    symptom = _waiting(situation)
    why = f"waiting for communication takes {waits:.0%} of the time, so nothing need be compressed"
    proposal = _proposal(situation, {knob: None}, symptom, why)
    if proposal is None or proposal.predicted_gain is None:
        return
    longer = 1 / (1 + proposal.predicted_gain)  # of the time that a step takes now
    waits_then = (waits + longer - 1) / longer
    if waits_then <= _BACK_RATIO * situation.thresholds.comm_ratio_high:
        yield replace(proposal, relaxes=True)


def _spend_memory(situation: TunerInput) -> Iterator[Proposal]:
    """Yield what takes memory and saves time."""
    idle = situation.symptom(MEMORY_IDLE)
    if idle is not None and situation.symptom(MEMORY_PRESSURE) is None:
        yield from _worth_trying(_for_symptom(situation, idle))


def _proposal(
    situation: TunerInput, changes: Configuration, symptom: Symptom, why: str
) -> Proposal | None:
    """Return a proposal; None if it cannot be set here, or is not allowed."""
    whole = with_partners(situation.configuration, changes)
    if any(whole[knob] != value for knob, value in changes.items()):
        return None
    options = situation.options
    if any(
        value not in options.get(knob, ()) or not SPECS[knob].has(value)
        for knob, value in whole.items()
    ):
        return None
    changes = whole
    numerics = required_numerics_of_all(changes, situation.facts)
    rebuilds = any(SPECS[knob].tier == "rebuild" for knob in changes)
    if numerics is None:
        return None
    if situation.configuration.get("gradient_compression") and SUM_KNOBS & changes.keys():
        numerics = max(numerics, Numerics.REASSOCIATION)  # buckets say what is rounded together
    if numerics > situation.numerics:
        return None
    if rebuilds and not situation.allows_rebuild:
        return None
    return Proposal(
        changes=changes,
        symptom=symptom,
        tier="rebuild" if rebuilds else "live",
        numerics=numerics,
        predicted_gain=_gain(situation, changes),
        why=why,
    )


def _untried(situation: TunerInput, spec: KnobSpec, trigger: Trigger) -> list[Value]:
    values = candidate_values(
        spec.name,
        trigger,
        situation.configuration,
        situation.options.get(spec.name, ()),
        situation.facts,
        situation.samples_per_rank,
    )
    return [value for value in values if (spec.name, value) not in situation.denied]


def _gain(situation: TunerInput, changes: Configuration) -> float | None:
    """Return what a change gains, as far as that can be worked out."""
    reading = situation.reading
    if exposed_ratio(reading, situation.thresholds) is None:
        reading = replace(reading, cause_ratios={})
    return predicted_gain(
        situation.configuration,
        {**situation.configuration, **changes},
        situation.facts,
        situation.samples_per_rank,
        reading,
    )


def _worth_trying(proposals: Iterable[Proposal]) -> Iterator[Proposal]:
    """Yield proposals that are worth a trial, those of which too little is foretold with nothing.

    What is foretold of most knobs is a part of what they do.
    """
    for proposal in proposals:
        gain = proposal.predicted_gain
        tells_all = not _PREDICTED.isdisjoint(proposal.changes)
        least = LEAST_REBUILD_GAIN if proposal.tier == "rebuild" else LEAST_GAIN
        if gain is not None and gain >= least:
            yield proposal
        elif proposal.tier == "rebuild" or (
            tells_all and gain is not None and proposal.symptom.name in COMM_SYMPTOMS
        ):
            continue
        elif gain is None or gain > _SURE_LOSS:
            yield replace(proposal, predicted_gain=None)


def _priority(proposal: Proposal) -> tuple[float, bool, Numerics]:
    """Return by what proposals are sorted: gain, then cost and safety; the rest as they come.

    A rebuild has to be worth more than what can be done without: it takes memory and time.
    """
    gain = proposal.predicted_gain
    if gain is None:  # in the registry's order
        return 0.0, proposal.tier == "rebuild", Numerics.BITWISE
    if proposal.tier == "rebuild":
        gain = (1 + gain) / _WORTH_A_REBUILD - 1
    return -1.0 - math.floor(gain / _ALIKE), proposal.tier == "rebuild", proposal.numerics


def _dedupe(proposals: Iterable[Proposal]) -> list[Proposal]:
    """Return proposals without those that change the same as an earlier one."""
    firsts: dict[frozenset[tuple[str, Value]], Proposal] = {}
    for proposal in proposals:
        firsts.setdefault(frozenset(proposal.changes.items()), proposal)
    return [*firsts.values()]


def _first_of_each(proposals: Iterable[Proposal]) -> list[Proposal]:
    """Return the first proposal for each knob."""
    firsts: dict[str, Proposal] = {}
    for proposal in proposals:
        firsts.setdefault(next(iter(proposal.changes)), proposal)
    return [*firsts.values()]


def _waiting(situation: TunerInput) -> Symptom:
    """Return how much bandwidth holds the job back, however little."""
    reading = situation.reading
    waits = exposed_ratio(reading, situation.thresholds)
    return Symptom(
        name="comm_bandwidth",
        ratio=reading.cause_ratios.get("bandwidth", 0.0),
        evidence={} if waits is None else {"comm_exposed_ratio": waits},
    )

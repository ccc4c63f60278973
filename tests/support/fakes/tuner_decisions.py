"""Hand-made decisions of a tuner: a job on a slow link, and a change that helps or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zerowatch.runtime.tuner.policy.ab_comparison import AbComparison, design_trial
from zerowatch.runtime.tuner.policy.decision_log import Change, DecisionRecord
from zerowatch.runtime.tuner.policy.diagnose import diagnose
from zerowatch.runtime.tuner.policy.metrics_delta import MetricsDelta
from zerowatch.runtime.tuner.policy.policy_types import JobFacts, Numerics, Symptom
from zerowatch.runtime.tuner.policy.proposals import TunerInput, propose
from zerowatch.runtime.tuner.policy.trial import Decision

SLOW_LINK = MetricsDelta(
    seconds=30.0,
    steps=40.0,
    phase_ratios={"forward": 0.2, "backward": 0.78, "optimizer": 0.02},
    exposed_ratio=0.68,
    comm_ratio=0.68,
    cause_ratios={"latency": 0.02, "bandwidth": 0.4, "imbalance": 0.0, "redundancy": 0.26},
    coverage=1.0,
    step_wire_bytes=144e6,
    step_calls=40.0,
    link_bandwidth=25e6,
    link_latency=1e-3,
    on_cpu=True,
    headroom_ratio=0.3,
    oom_risk=0.0,
    world_size=2,
)
CONFIGURATION = {
    "micro_batch_samples": 4,
    "reduce_bucket_size": 500_000_000,
    "overlap_comm": False,
    "gradient_compression": None,
    "zero_stage": 2,
}
OPTIONS = {
    "micro_batch_samples": (4, 8, 16),
    "overlap_comm": (False, True),
    "gradient_compression": (None, "bf16", "int8", "fp8"),
}


def tuner_input(**changes: Any) -> TunerInput:
    """Return the input of a job with 16 samples per rank, in 4 micro-batches."""
    default = TunerInput(
        configuration=CONFIGURATION,
        options=OPTIONS,
        facts=JobFacts(world_size=2, backend="gloo", gradient_bytes=40 * 2**20, parameter_bytes=1),
        numerics=Numerics.REASSOCIATION,
        allows_rebuild=False,
        symptoms=diagnose(SLOW_LINK),
        reading=SLOW_LINK,
        samples_per_rank=16,
        excluded=frozenset({("gradient_compression", None), ("gradient_compression", "int8")}),
    )
    return replace(default, **changes)


def decision(seconds_after: float | None = 0.03, **changes: Any) -> Decision:
    """Try the first proposal, from 0.07 seconds per sample; None: advice without a trial."""
    inputs = tuner_input(**changes)
    proposal = propose(inputs)[0]
    if seconds_after is None:
        return Decision(proposal=proposal, inputs=inputs, verdict="advised", reason=proposal.reason)
    design = design_trial(2.0, number=1, apply_mode=proposal.apply_mode, settle_steps=2)
    trial, times = AbComparison(design), []
    while trial.result is None:
        wobble = 1 + len(times) % 3 / 1000
        times.append((0.07 if trial.variant == "A" else seconds_after) * wobble)
        trial.add(times[-1])
    return Decision(
        proposal=proposal,
        inputs=inputs,
        verdict=trial.result.verdict,
        reason=trial.result.reason,
        result=trial.result,
        design=design,
        times=tuple(times),
        cost_seconds=1.5,
    )


def decision_record(changes: Sequence[Change] | None = None, **others: Any) -> DecisionRecord:
    """Return the decision on an accepted micro-batch change, with the given differences."""
    values: dict[str, Any] = {
        "number": 1,
        "unix_seconds": 1.8e9,
        "step": 41,
        "symptom": Symptom(name="comm_bandwidth", ratio=0.4, evidence={"comm_exposed_ratio": 0.68}),
        "changes": changes or (Change(knob="micro_batch_samples", before=4, after=16),),
        "numerics": Numerics.REASSOCIATION,
        "predicted_gain": 1.2,
        "gain": 1.31,
        "lower": 1.27,
        "upper": 1.36,
        "pairs": 3,
        "steps": 18,
        "verdict": "accepted",
        "reason": "each step was far faster",
        "context": "link 2^25 B/s",
        "in_use": {"micro_batch_samples": 16},
        "world_size": 2,
        "mode": "auto",
    }
    return DecisionRecord(**(values | others))

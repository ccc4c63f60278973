"""The loss with numerics "statistical", where the tuner may change the rounding, on a slow link.

The same seeds train without a tuner on a fast link; of two ranks the link changes no number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bench.bench_options import Options
from bench.result_table import Row
from bench.tuner_link.two_host_jobs import JobResult, missing, on_link

RATE = "100mbit"
SEEDS = (1, 2, 3)
STEPS = 200
GOAL = 0.01
UNROUNDED = "None"
ASKED: Mapping[str, Any] = {
    "model": {"hidden_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 64},
    "seeds": SEEDS,
    # So that most of these few steps are trained with what it finds.
    "settings": {
        "tuner": {"diagnosis_interval_seconds": 2.0, "cooldown_steps": 20, "rebuild": False}
    },
}
TUNED = {"tuner": "auto", "numerics": "statistical"}


def bench(options: Options) -> Iterator[Row]:
    """Yield the difference of each seed's final loss from that of the untuned run."""
    reason = missing()
    if reason is not None:
        print(f"no slow link: {reason}")
        return
    asked = dict(ASKED) | {"steps": 30 if options.quick else STEPS}
    plain = _train(None, asked | {"tuner": {"tuner": "off"}})
    tuned = _train(RATE, asked | {"tuner": TUNED})
    for before, after in zip(plain.reports, tuned.reports, strict=True):
        yield _row(before["loss"], after, asked["steps"])


def _train(rate: str | None, asked: Mapping[str, Any]) -> JobResult:
    return on_link(rate, "tuner/loss_effect_job.py", asked, timeout_seconds=600)


def _row(expected: float, found: Mapping[str, Any], steps: int) -> Row:
    away = found["loss"] / expected - 1
    rounded = {form: num for form, num in found["forms"].items() if form != UNROUNDED}
    used = ", ".join(f"{form} in {num} steps" for form, num in rounded.items())
    return Row(
        what=f"held-out loss after {steps} tuned steps at {RATE}/s, seed {found['seed']}",
        measured=f"{found['loss']:.4f}, {away:+.2%} of the untuned run's",
        spread=f"compressed: {used or 'never'}",
        goal=f"<= {GOAL:.0%}, compressed",
        met=bool(rounded) and abs(away) <= GOAL,
    )

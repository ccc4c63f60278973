"""Computes figures from the reports of the jobs on the link; pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Report = Mapping[str, Any]
REPORT = "report "  # starts the lines of JSON that rank 0 prints
SUSTAINED = 5  # steps of which half must be as fast, for a gain to be there
# Knobs that describe a configuration, in this order; the others are irrelevant here.
_SHORT = {
    "zero_stage": "ZeRO-{}",
    "micro_batch_samples": "micro-batch {}",
    "reduce_bucket_size": "bucket {:,}",
    "gradient_compression": "{}",
}
_SWITCHES = {
    ("reduce_scatter", False): "reduce_scatter off",
    ("use_multi_rank_bucket_allreduce", False): "a reduce to each owner",
    ("overlap_comm", True): "overlap_comm",
    ("asynchronous_reduction", True): "asynchronous",
}


def short(configuration: Report) -> str:
    """Describe a configuration in a few words."""
    stage = configuration.get("zero_stage")
    words = [
        form.format(configuration[knob])
        for knob, form in _SHORT.items()
        if configuration.get(knob) is not None and not (stage == 0 and knob == "reduce_bucket_size")
    ]
    switches = _SWITCHES if stage in (1, 2) else {}
    return ", ".join([*words, *(w for (k, v), w in switches.items() if configuration.get(k) is v)])


def seconds_of(visit: Report) -> float:
    """Return the seconds of a step with a visited configuration."""
    return median(visit["seconds"])


def fastest(visits: Sequence[Report]) -> list[Report]:
    """Return the successful visits, the fastest first."""
    return sorted((one for one in visits if "seconds" in one), key=seconds_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A run that was tuned, and then compared with others on the same engine.

    Attributes:
        steps: Reports of the steps while the tuner worked.
        found: The configuration that was left.
        exploration_seconds: As the tuner reports.
        compared: Seconds of steps by what was compared, one list for each round.
    """

    steps: Sequence[Report]
    found: Report
    exploration_seconds: float
    compared: Mapping[str, Sequence[Sequence[float]]]

    @classmethod
    def read(cls, reports: Sequence[Report]) -> Tuned:
        compared: dict[str, list[list[float]]] = {}
        for one in reports:
            if "compared" in one:
                compared.setdefault(one["compared"], []).append(one["seconds"])
        (end,) = (one for one in reports if "found" in one)
        return cls(
            steps=[one for one in reports if "step" in one],
            found=end["found"],
            exploration_seconds=end.get("exploration_seconds", 0.0),
            compared=compared,
        )

    def ratio(self, name: str) -> float:
        """Return the speed of the configuration found relative to that of a rival."""
        return self.seconds(name) / self.seconds("found")

    def ratios(self, name: str) -> list[float]:
        """Return the relative speed for each round."""
        pairs = zip(self.compared[name], self.compared["found"], strict=True)
        return [median(other) / median(found) for other, found in pairs]

    def seconds(self, name: str) -> float:
        """Return the seconds of a step, over all rounds."""
        return median(each for one_round in self.compared[name] for each in one_round)

    def steps_to_gain(self, share: float = 0.9) -> int | None:
        """Return the step from which this share of the gain of throughput is there for good.

        For good: it is there in at least half of any few steps from then on.
        """
        before, after = 1 / self.seconds("start"), 1 / self.seconds("found")
        enough = 1 / (before + share * (after - before))
        seconds = [one["seconds"] for one in self.steps]
        lasting = [
            median(seconds[at : at + SUSTAINED]) <= enough
            for at in range(len(seconds) - SUSTAINED + 1)
        ]
        first = len(lasting) - next(
            (n for n, fast in enumerate(reversed(lasting)) if not fast), len(lasting)
        )
        return None if first >= len(lasting) else int(self.steps[first]["step"])

    @property
    def all_seconds(self) -> float:
        return float(sum(one["seconds"] for one in self.steps))

    @property
    def ratio_with_exploration(self) -> float:
        """Return steps made while tuning over those that the start would have made by then."""
        return len(self.steps) * self.seconds("start") / self.all_seconds

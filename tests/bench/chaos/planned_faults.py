"""Draws the faults of the chaos bench: what happens, on which rank, when and for how long.

The seed is committed, so that each run of the same length has the same faults.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

SEED = 18
MINUTES_BETWEEN_FAULTS = 3.0
MIN_FAULTS = 10  # a shorter run has them closer together, so that each kind still occurs

KILL = "SIGKILL"
STOP = "SIGSTOP, then SIGCONT"
SLOW_LINK = "slow link"
FULL_DISK = "full disk"
OUT_OF_MEMORY = "out of memory"
NAN_BATCH = "NaN batch"
SLOW_CLIENTS = "slow clients"
CLOCK_JUMP = "clock jump"

# How long each kind lasts, as a part of the time between two faults; 0 for a single moment.
LASTS = {
    KILL: 0.0,
    STOP: 0.1,
    SLOW_LINK: 0.3,
    FULL_DISK: 0.3,
    OUT_OF_MEMORY: 0.0,
    NAN_BATCH: 0.0,
    SLOW_CLIENTS: 0.3,
    CLOCK_JUMP: 0.3,
}
DETAILS = {
    OUT_OF_MEMORY: ("forward", "backward"),
    CLOCK_JUMP: ("+3600", "-3600"),
}
EVERY_RANK = (SLOW_LINK, FULL_DISK, SLOW_CLIENTS, CLOCK_JUMP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        kind: One of the names in `LASTS`.
        at_seconds: When it begins, from the first step of the run.
        lasts_seconds: How long it lasts; 0 for a single moment.
        rank: The rank that it hits; None for all.
        detail: The pass that runs out of memory, or the seconds by which the clock jumps.
    """

    kind: str
    at_seconds: float
    lasts_seconds: float
    rank: int | None
    detail: str = ""

    @property
    def name(self) -> str:
        """What the table calls the fault."""
        where = "" if self.rank is None else f" on rank {self.rank}"
        detail = {OUT_OF_MEMORY: f" in {self.detail}", CLOCK_JUMP: f" by {self.detail} s"}
        return f"{self.kind}{detail.get(self.kind, '')}{where}"


def may_restart(fault: Fault) -> bool:
    """Whether the launcher may restart the ranks because of a fault.

    Memory that runs out in backward may end the run, for example within a collective.
    """
    return fault.kind == KILL or (fault.kind == OUT_OF_MEMORY and fault.detail == "backward")


def draw(seed: int, minutes: float, num_ranks: int = 2) -> list[Fault]:
    """Draw the faults of a run, in the order of time.

    The kinds are shuffled, and shuffled again once all have occurred. So each of them occurs if the
    run has at least as many faults as there are kinds.

    Args:
        seed: Of all choices.
        minutes: Length of the run.
        num_ranks: Ranks of the run.
    """
    chance = random.Random(seed)
    every = 60.0 * min(MINUTES_BETWEEN_FAULTS, minutes / MIN_FAULTS)
    num_faults = round(60.0 * minutes / every)
    seen: dict[str, int] = {}
    faults = []
    for number, kind in enumerate(_kinds(chance, num_faults)):
        details = DETAILS.get(kind, ("",))
        seen[kind] = seen.get(kind, chance.randrange(len(details))) + 1
        faults.append(
            Fault(
                kind=kind,
                # In the middle third of its share of the time.
                at_seconds=every * (number + chance.uniform(1 / 3, 2 / 3)),
                lasts_seconds=every * LASTS[kind],
                rank=None if kind in EVERY_RANK else chance.randrange(num_ranks),
                detail=details[seen[kind] % len(details)],
            )
        )
    return faults


def _kinds(chance: random.Random, number: int) -> Sequence[str]:
    kinds: list[str] = []
    while len(kinds) < number:
        kinds += chance.sample(list(LASTS), len(LASTS))
    return kinds[:number]

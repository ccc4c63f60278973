"""One rank of a tuner such as Horovod's, on the live knobs: the best of 20, once and for all.

As horovod/common/parameter_manager.cc and optim/bayesian_optimization.cc do it: three samples to
warm up, each the median of a few short ones; four fixed points, and then the expected improvement
over a Gaussian process; the best score ever seen is kept, and never looked at again.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from bench.tuner_link.linked_model import asked, leave, new_run, report, visit

NUM_SAMPLES, NUM_WARM_UP, NUM_SEEDS = 20, 3, 4
NOISE, EXPLORATION = 0.8, 0.01  # Horovod's alpha and xi
LENGTH_SCALE = 0.3  # of coordinates from 0 to 1


def main(asked: dict[str, Any]) -> None:
    run = new_run(settings={"tuner": {"mode": "off"}})
    space = asked["space"]  # the same list on all ranks, and so is all that follows from it
    places = np.array([coordinates(one, space) for one in space])
    for _ in range(NUM_WARM_UP):
        visit(run, asked["start"], 0, 1)
    chosen: list[int] = []
    scores: list[float] = []
    for number in range(NUM_SAMPLES):
        seeds = number * (len(space) - 1) // (NUM_SEEDS - 1)
        index = seeds if number < NUM_SEEDS else most_promising(places, chosen, scores)
        found = visit(run, space[index], 0, asked["steps"])
        seconds = run._host_group.all_gather([median(found["seconds"])])[0, 0]  # rank 0's, on all
        chosen.append(index)
        scores.append(1 / seconds)
        report({"sample": number, "configuration": space[index], "all_seconds": found["seconds"]})
    best = space[chosen[int(np.argmax(scores))]]
    report({"found": best, "claimed_seconds": 1 / max(scores)})
    compared = {"found": best} | asked["rivals"]
    for number in range(asked["rounds"]):
        for name in [*compared] if number % 2 == 0 else reversed(compared):
            report({"compared": name, **visit(run, compared[name], 1, asked["steps"])})
    leave(run)


def coordinates(one: dict[str, Any], space: list[dict[str, Any]]) -> list[float]:
    """Return the coordinates of a configuration: each knob scaled to 0 to 1."""
    values = {
        knob: sorted({other[knob] for other in space}) for knob in one if one[knob] is not None
    }
    return [all_.index(one[knob]) / max(1, len(all_) - 1) for knob, all_ in values.items()]


def most_promising(places: npt.NDArray[np.float64], chosen: list[int], scores: list[float]) -> int:
    """Return the point with the highest expected improvement of a Gaussian process."""
    spread = float(np.std(scores)) or 1.0
    known = (np.array(scores) - np.mean(scores)) / spread
    own = kernel(places[chosen], places[chosen]) + NOISE * np.eye(len(chosen))
    across = kernel(places, places[chosen])
    mean = across @ np.linalg.solve(own, known)
    deviation = np.sqrt(
        np.clip(1 - np.sum(across * np.linalg.solve(own, across.T).T, 1), 1e-9, None)
    )
    better = mean - known.max() - EXPLORATION
    z = better / deviation
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([(1 + math.erf(value / math.sqrt(2))) / 2 for value in z])
    return int(np.argmax(better * below + deviation * density))


def kernel(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    squares = ((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=2)
    return np.exp(-squares / (2 * LENGTH_SCALE**2))


if __name__ == "__main__":
    main(asked())

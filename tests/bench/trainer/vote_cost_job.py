"""One rank of the bench of votes: blocks of windows with and without them take turns in one run.

A vote that is left out returns what this rank would have voted, so that nothing else changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from bench import gpt_training

import zerowatch

WIDTH, LAYERS, SAMPLES = 128, 4, 2  # samples of a micro-batch
WARM_UP_WINDOWS = 5
ALL, FIRST, NONE = "each collective", "first of a pass", "none"
# The arms that take turns.
PAIRS = {"unguarded": (FIRST, NONE), "guarded": (ALL, NONE), "A/A": (NONE, NONE)}
Results = dict[str, Any]


class Job:
    """Trains on random tokens, in several micro-batches for each update."""

    def __init__(self, stage: int, micro_batches: int) -> None:
        torch.manual_seed(0)
        model = gpt_training.TinyGpt(WIDTH, LAYERS)
        self.run = zerowatch.TrainingRun(
            model,
            config={
                "train_micro_batch_size_per_gpu": SAMPLES,
                "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
                "zero_optimization": {
                    "stage": stage,
                    "reduce_bucket_size": gpt_training.BUCKET_ELEMENTS,
                    "stage3_param_persistence_threshold": 0,
                    "stage3_prefetch_bucket_size": gpt_training.BUCKET_ELEMENTS,
                    "stage3_max_reuse_distance": 0,
                },
                "steps_per_print": 10**9,
            },
            loss=lambda model, tokens: model(tokens),
            settings={"serve": {"enabled": False}, "run_log": {"enabled": False}},
        )
        runner = self.run._window_runner
        self._guard, self._planner = runner._guard, runner.replay.planner
        self._begin_window: Callable[..., bool] = self._planner.begin_window
        self._vote: Callable[[int], int] = self._guard._exchange_vote
        self._guard._exchange_vote = self._count_vote  # type: ignore[method-assign]
        self._planner.begin_window = self._guards_window  # type: ignore[method-assign]
        self._arm, self._num_votes = FIRST, 0
        self._tokens = torch.randint(
            0, gpt_training.VOCABULARY, (SAMPLES * micro_batches, gpt_training.CONTEXT + 1)
        )
        self.windows(WARM_UP_WINDOWS)

    def windows(self, num: int) -> float:
        """Train; return the mean seconds of a window."""
        torch.distributed.barrier()
        began = time.perf_counter()
        for _ in range(num):
            self.run.train_batch(self._tokens)
        return (time.perf_counter() - began) / num

    def in_turns(self, arms: tuple[str, str], pairs: int, block: int) -> Results:
        """Return the seconds of a window by arm, pair by pair, and the votes of a window."""
        seconds, votes = [], [0, 0]
        for number in range(pairs):
            taken = [0.0, 0.0]
            for place in (0, 1) if number.bit_count() % 2 else (1, 0):
                self._arm, self._num_votes = arms[place], 0
                taken[place] = self.windows(block)
                votes[place] = self._num_votes // block
            seconds.append(taken)
        return {"seconds": seconds, "votes": votes}

    def end(self) -> None:
        self.run.close()
        self.run.engine.destroy()

    def _count_vote(self, vote: int) -> int:
        if self._arm == NONE:
            return vote
        self._num_votes += 1
        return self._vote(vote)

    def _guards_window(self, *args: Any, **options: Any) -> bool:
        self._begin_window(*args, **options)
        return self._arm == ALL


def single_votes(job: Job, num: int) -> list[float]:
    """Return the seconds of votes that all ranks enter at one time."""
    found = []
    for _ in range(num):
        torch.distributed.barrier()
        began = time.perf_counter()
        job._vote(0)
        found.append(time.perf_counter() - began)
    return found


def main() -> None:
    asked = gpt_training.arguments()
    torch.set_num_threads(1)
    gpt_training.meet()
    found: Results = {}
    for stage in asked["stages"]:
        job = Job(stage, asked["micro_batches"])
        found[str(stage)] = {
            "single": single_votes(job, asked["single_votes"]),
            **{
                name: job.in_turns(arms, asked["pairs"], asked["block_windows"])
                for name, arms in PAIRS.items()
            },
        }
        job.end()
    gpt_training.report(found)


if __name__ == "__main__":
    main()

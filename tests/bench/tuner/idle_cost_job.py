"""One rank of the tuner's cost bench: a TrainingRun whose tuner observes, and may try nothing.

Its budget for trials is 0, so that it diagnoses, finds what it would try, and leaves it. Then
blocks of windows with and without it take turns in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import torch
from bench import gpt_training

import zerowatch
from zerowatch.runtime.common.host_group import HostGroup
from zerowatch.runtime.trainer.window import window_agreement
from zerowatch.runtime.trainer.window.window_agreement import no_tuner_status
from zerowatch.runtime.tuner.session import NullTunerSession, TunerSession

WIDTH, LAYERS, FIRST_SAMPLES = 128, 4, 8
SETTLING_STEPS = 10  # in the first of which the tuner is made
# Floats that open a window, without and with the tuner's.
WITHOUT_TUNER = len(window_agreement._RankReport._fields)
WITH_TUNER = WITHOUT_TUNER + len(window_agreement.TunerStatus._fields)
Results = dict[str, Any]


class Meter:
    """Sums the CPU time of calls on the thread that makes them."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self.dearest = 0.0

    def around(self, body: Callable[..., Any]) -> Callable[..., Any]:
        def metered(*args: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            returned = body(*args)
            cpu = time.thread_time() - cpu
            self.cpu += cpu
            self.wall += time.perf_counter() - wall
            self.dearest = max(self.dearest, cpu)
            return returned

        return metered


class Job:
    """Trains on random tokens; a step takes about `seconds`."""

    def __init__(self, seconds: float, diagnosis_interval_seconds: float) -> None:
        torch.manual_seed(0)
        model = gpt_training.TinyGpt(WIDTH, LAYERS)
        self.run = zerowatch.TrainingRun(
            model,
            config={
                "train_micro_batch_size_per_gpu": 10**6,
                "zero_optimization": {"stage": 2},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**9,
            },
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
            loss=lambda model, tokens: model(tokens),
            tuner="auto",
            settings={
                "serve": {"enabled": False},
                "run_log": {"folder": "runs"},
                "tuner": {
                    "exploration_ratio": 0.0,
                    "diagnosis_interval_seconds": diagnosis_interval_seconds,
                },
            },
        )
        self._samples = FIRST_SAMPLES
        for _ in range(3):
            self.steps(3)
            took = self.agreed(self.steps(5))
            self._samples = max(1, round(self._samples * seconds / took))
        self.steps(SETTLING_STEPS)

    def steps(self, num: int) -> float:
        """Train; return the mean seconds of a step."""
        tokens = torch.randint(
            0, gpt_training.VOCABULARY, (self._samples, gpt_training.CONTEXT + 1)
        )
        torch.distributed.barrier()
        began = time.perf_counter()
        for _ in range(num):
            self.run.train_batch(tokens)
        return (time.perf_counter() - began) / num

    def agreed(self, seconds: float) -> float:
        """Return the longest time of any rank."""
        return self.run._host_group.all_max(round(seconds * 1e6)) / 1e6

    def metered(
        self, seconds: float, session: TunerSession, status_source: Callable[[], Any]
    ) -> Results:
        """Train for about `seconds`; return the cost of the tuner on the training thread."""
        meter, kind = Meter(), cast(Any, type(session))
        runner = self.run._window_runner
        own = self.run._tuner, runner.tuner_status_source
        self.run._tuner, runner.tuner_status_source = session, meter.around(status_source)
        session.on_window_start = meter.around(session.on_window_start)
        session.on_window_end = meter.around(session.on_window_end)
        is_on_trial = kind.is_on_trial
        kind.is_on_trial = property(meter.around(is_on_trial.fget))
        num, took = max(1, round(seconds / self.agreed(self.steps(5)))), Meter()
        meter.wall = meter.cpu = meter.dearest = 0.0
        took.around(self.steps)(num)
        del session.on_window_start, session.on_window_end
        kind.is_on_trial = is_on_trial
        self.run._tuner, runner.tuner_status_source = own
        return {
            "steps": num,
            "seconds": took.wall,
            "cpu": meter.cpu,
            "wall": meter.wall,
            "dearest": meter.dearest,
        }

    def in_turns(self, pairs: int, block_steps: int) -> list[tuple[float, float]]:
        """Return a step's mean seconds with the tuner and without it, pair by pair."""
        session, runner = self.run._tuner, self.run._window_runner
        arms = {
            "on": (session, runner.tuner_status_source),
            "off": (NullTunerSession(), no_tuner_status),
        }
        found = []
        for number in range(pairs):
            taken = {}
            for arm in ("on", "off") if number.bit_count() % 2 else ("off", "on"):
                self.run._tuner, runner.tuner_status_source = arms[arm]
                session.exclude_step_time()
                self.steps(1)
                taken[arm] = self.steps(block_steps)
            found.append((taken["on"], taken["off"]))
        self.run._tuner, runner.tuner_status_source = arms["on"]
        return found

    def end(self) -> None:
        self.run.close()
        self.run.engine.destroy()


def gathers(rounds: int) -> list[list[float]]:
    """Return the seconds of a gather without and with the tuner's floats, in turns."""
    host_group = HostGroup()
    found = []
    for _ in range(rounds):
        taken = []
        for num in (WITHOUT_TUNER, WITH_TUNER):
            began = time.perf_counter()
            host_group.all_gather([0.0] * num)
            taken.append(time.perf_counter() - began)
        found.append(taken)
    host_group.close()
    return found


def empty_calls(times: int = 100_000) -> float:
    """Return the seconds that a window spends on a tuner that is off."""
    session = NullTunerSession()
    began = time.thread_time()
    for _ in range(times):
        session.on_window_start()
        no_tuner_status()
        session.on_window_end(None)  # type: ignore[arg-type]
    return (time.thread_time() - began) / times


def main() -> None:
    asked = gpt_training.arguments()
    torch.set_num_threads(1)
    gpt_training.meet()
    found: Results = {"gathers": gathers(asked["gathers"]), "off": empty_calls(), "steps": {}}
    for seconds in asked["step_seconds"]:
        job = Job(seconds, asked["diagnosis_interval_seconds"])
        status_source = job.run._window_runner.tuner_status_source
        found["steps"][str(seconds)] = {
            "metered": job.metered(asked["seconds"], job.run._tuner, status_source),
            # What a meter costs where caches are cold; and a tuner that is off.
            "empty": job.metered(asked["seconds"] / 3, NullTunerSession(), no_tuner_status),
            "in turns": job.in_turns(asked["pairs"], asked["block_steps"]),
        }
        job.end()
    gpt_training.report(found)


if __name__ == "__main__":
    main()

"""One rank of the OTLP bench: blocks of steps without OTLP, and with OTLP but no collector."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from bench import gpt_training
from bench.monitoring_cost import step_overhead_job
from bench.monitoring_cost.own_threads import cpu_seconds, own_threads

from zerowatch.runtime.entry_points import watch

SETTINGS: dict[str, Any] = {"serve": {"port": 0}, "run_log": {"folder": "runs"}}


@contextlib.contextmanager
def watched(engine: Any, endpoint: str | None = None, every_steps: int = 10) -> Iterator[Any]:
    """Watch, and send everything there is to `endpoint`; ten times the usual traces, or as asked.

    A block is too short for the usual number.
    """
    otel = {"endpoint": endpoint, "metrics": True, "logs": True, "every_steps": every_steps}
    opened = watch(engine, SETTINGS | ({"otel": otel} if endpoint else {}))
    yield opened
    opened.close()


def main() -> None:
    asked = gpt_training.arguments()
    step_overhead_job.ARMS.update(
        {
            "watched": watched,
            "watched again": watched,
            "refused": lambda engine: watched(engine, asked["refusing"]),
            "unanswered": lambda engine: watched(engine, asked["silent"]),
        }
    )
    job = gpt_training.Training(stage=2)
    job.aim_at(asked["step_seconds"])
    threads = answered(job, asked)
    rounds = [
        {arm: step_overhead_job.block(job, arm, asked) for arm in order}
        for order in step_overhead_job.orders(asked["rounds"], asked["arms"], [])
    ]
    gpt_training.report({"rounds": rounds, "batch": job.batch, "answered": threads})


def answered(job: gpt_training.Training, asked: dict[str, Any]) -> dict[str, float]:
    """Return the CPU seconds per second of zerowatch's threads, with a collector that answers."""
    with watched(job.engine, asked["answering"], every_steps=100):
        job.time_steps(asked["settling_steps"])
        threads = own_threads()
        before = {each: cpu_seconds(os.getpid(), each) for each in threads}
        seconds = asked["counted_steps"] * job.time_steps(asked["counted_steps"])
        return {
            name: (cpu_seconds(os.getpid(), each) - before[each]) / seconds
            for each, name in threads.items()
        }


if __name__ == "__main__":
    main()

"""Times a TrainingRun's check of the collectives that it has recorded, without the collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from bench import gpt_training
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from zerowatch.runtime.trainer.oom_recovery.recorded_passes import (
    EngineGeneration,
    PassRecorder,
    recorded_gather,
)

CALLS = 200
SIZE = 1024
WARM_UP_REPEATS = 20


def main() -> None:
    asked = gpt_training.arguments()
    gpt_training.meet()
    tensor = torch.ones(SIZE)
    found = {}
    for name in ("all_reduce", "all_gather_into_tensor"):
        arguments = (tensor, None, None, False) if name == "all_reduce" else (tensor, tensor)
        found[name] = check_microseconds(name, arguments, asked["repeats"])
    gpt_training.report(found)


def check_microseconds(name: str, arguments: tuple[Any, ...], repeats: int) -> list[float]:
    """Return the CPU microseconds that a collective of a pass with a record takes longer."""
    recorder = PassRecorder()
    generation = EngineGeneration("the same")

    def gather(params: object, forward: bool, quantize: bool) -> None:
        recorder.record(name, arguments, {})

    def nothing(params: object, forward: bool, quantize: bool) -> None:
        pass

    checked = recorded_gather(recorder, gather) if name != "all_reduce" else gather
    parameters = [sharded_parameter()]
    added = []
    for number in range(repeats + WARM_UP_REPEATS):
        is_known = recorder.prepare(generation) > 0
        recorder.begin_window()
        recorder.begin_pass("backward")
        plain, taken = per_call(nothing, parameters), per_call(checked, parameters)
        reason = recorder.rest()[1]
        recorder.end_pass()
        if number >= WARM_UP_REPEATS:
            assert is_known and not reason
            added.append(taken - plain)
    return sorted(added)


def sharded_parameter() -> Any:
    """Return a parameter of ZeRO 3 that is not gathered."""
    return SimpleNamespace(
        ds_id=0,
        ds_status=ZeroParamStatus.NOT_AVAILABLE,
        ds_secondary_tensor=None,
        ds_tensor=SimpleNamespace(ds_numel=SIZE),
    )


def per_call(function: Callable[..., None], parameters: list[Any]) -> float:
    begin = time.thread_time_ns()  # another process on the core does not count
    for _ in range(CALLS):
        function(parameters, True, False)
    return (time.thread_time_ns() - begin) / CALLS / 1000


if __name__ == "__main__":
    main()

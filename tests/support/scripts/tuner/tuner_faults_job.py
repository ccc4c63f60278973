"""Orders that fail on the last rank; reports the values of all ranks after each.

`tuner_faults_job.py FOLDER STAGES DEATH`: the matrix at these stages, such as 0,2,3, and at last
the last rank dies at DEATH: "apply", "verify" or "rebuilt". The others write what became of them.
On three ranks there are a few faults only.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tuner_knobs import end, knobs_of, make_run, train, untouched, weights

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.separate_ranks import meet as join

from zerowatch.errors import ZerowatchError
from zerowatch.runtime.tuner.knobs.run_knobs import RunKnobs
from zerowatch.runtime.tuner.policy.policy_types import SwitchRequest
from zerowatch.runtime.tuner.transaction import switch_all_ranks

OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1000 bytes."

Results = dict[str, Any]
Fault = Callable[[Any, RunKnobs], Any]  # returns a patch for the time of the exchange


def fails(error: BaseException) -> Callable[..., Any]:
    """Return what raises once it is called."""
    return mock.Mock(side_effect=error)


# The garbage collection knob is set last, after all others.
FAULTS: dict[str, tuple[Fault, bool]] = {
    "refused": (
        lambda run, knobs: patch(knobs, "unsupported_reason", lambda target: "no room"),
        False,
    ),
    "apply fails": (lambda run, knobs: patch(knobs, "apply", fails(ZerowatchError("no"))), False),
    "out of memory half way": (
        lambda run, knobs: patch(knobs._gc, "set", fails(RuntimeError(OUT_OF_MEMORY))),
        False,
    ),
    "an attribute is gone": (
        lambda run, knobs: patch(knobs._gc, "set", fails(AttributeError("gone"))),
        False,
    ),
    "verify disagrees": (lambda run, knobs: patch(knobs, "verify", lambda target: False), False),
    "values cannot be read": (
        lambda run, knobs: patch(knobs, "values", mock.Mock(side_effect=once_failing(knobs))),
        False,
    ),
    "no engine to be had": (
        lambda run, knobs: patch(run._engine_holder, "_make_engine", once_no_engine(run)),
        True,
    ),
    "out of memory after a rebuild": (
        lambda run, knobs: patch(knobs._gc, "set", fails(RuntimeError(OUT_OF_MEMORY))),
        True,
    ),
    "verify disagrees after a rebuild": (
        lambda run, knobs: patch(knobs, "verify", lambda target: False),
        True,
    ),
}

ON_THREE_RANKS = {
    "refused",
    "out of memory half way",
    "verify disagrees",
    "out of memory after a rebuild",
}


def patch(owner: Any, name: str, value: Any) -> Any:
    return mock.patch.object(owner, name, value)


def once_failing(knobs: RunKnobs) -> Callable[[], Any]:
    """Return `values` that fails the first time."""
    calls, values = [], knobs.values

    def read() -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("state")
        return values()

    return read


def once_no_engine(run: Any) -> Callable[..., Any]:
    """Return a maker of engines that fails the first time."""
    calls, make = [], run._engine_holder._make_engine

    def made(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError(OUT_OF_MEMORY)
        return make(*given)

    return made


def target_of(knobs: RunKnobs, *, rebuild: bool) -> dict[str, Any]:
    """Return a configuration that differs in each kind of knob."""
    now = dict(knobs.values())
    stage = {0: 2, 1: 3, 2: 3, 3: 1}[now["zero_stage"]] if rebuild else now["zero_stage"]
    return {
        **now,
        "reduce_bucket_size": 777,
        "timers.throughput.synchronized": False,
        "activation_checkpointing": True,
        "gradient_compression": "int8",
        "micro_batch_samples": 1,
        "python_gc": "between_steps",
        "zero_stage": stage,
    }


def state(run: Any, knobs: RunKnobs) -> Results:
    """Return what must be as before after a switch request that failed."""
    planner = run._window_runner.replay.planner
    return {
        "values": dict(knobs.values()),
        "config": json.dumps(run.config, sort_keys=True),
        "plans": repr((planner.limits, planner.guard_schedule)),
    }


def matrix(stage: int) -> Results:
    """Cause each fault on the last rank, and train after it."""
    run = make_run(stage)
    knobs = knobs_of(run)
    train(run)
    results: Results = {}
    for name, (fault, rebuild) in FAULTS.items():
        if dist.get_world_size() > 2 and name not in ON_THREE_RANKS:
            continue
        before = state(run, knobs)
        request = SwitchRequest(target=target_of(knobs, rebuild=rebuild), reason=name)
        with ExitStack() as patches:
            if dist.get_rank() == dist.get_world_size() - 1:
                patches.enter_context(fault(run, knobs))
            exchanged = switch_all_ranks(run._host_group, knobs, request)
        assert exchanged is not None
        results[name] = {
            "done": exchanged[1].done,
            "reason": exchanged[1].reason,
            "undone": exchanged[1].undone,
            "same": state(run, knobs) == before,
            "values": dict(knobs.values()),
        }
        train(run)
    windows, final = run.steps, weights(run)
    knobs.close()
    end(run)
    results["bitwise"] = torch.equal(final, untouched(stage, windows))
    return results


def death(stage: int, when: str) -> Results:
    """Let the last rank exit within a transaction; the others report how they ended."""
    run = make_run(stage)
    knobs = knobs_of(run)
    train(run)
    if dist.get_rank() == dist.get_world_size() - 1:
        die_at(knobs, when)
    before = state(run, knobs)
    began = time.monotonic()
    request = SwitchRequest(target=target_of(knobs, rebuild=when == "rebuilt"), reason="a death")
    try:
        exchanged = switch_all_ranks(run._host_group, knobs, request)
        raised = f"none: {exchanged}"
    except RuntimeError as error:
        raised = type(error).__name__
    return {
        "raised": raised,
        "seconds": time.monotonic() - began,
        "same": state(run, knobs) == before,
        "values": dict(knobs.values()),
        "before": before["values"],
    }


def die_at(knobs: RunKnobs, when: str) -> None:
    """Exit without a message, before the vote of apply or of verify."""
    apply = knobs.apply

    def apply_and_die(target: Any) -> Any:
        apply(target)
        os._exit(9)

    if when == "verify":
        knobs.verify = lambda target: os._exit(9)
    else:
        knobs.apply = apply_and_die


def main(folder: Path, stages: str, when: str) -> None:
    """Run the matrix, and end with the death of a rank."""
    join()
    gc.freeze()  # otherwise each rebuild would scan all imported objects
    results: Results = {f"stage {stage}": matrix(int(stage)) for stage in stages.split(",")}
    file = folder / f"rank-{dist.get_rank()}.json"
    file.write_text(json.dumps(results))
    results["death"] = death(int(stages[-1]), when)
    file.write_text(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)  # no shutdown: the other rank is gone


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])

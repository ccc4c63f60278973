"""Orders that go wrong on the last rank; tells what all ranks worked with after each.

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
from tuner_hands import end, hands_of, make_run, train, untouched, weights

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.separate_ranks import meet as join

from zerowatch.errors import ZerowatchError
from zerowatch.runtime.tuner.knobs.run_knobs import RunKnobs
from zerowatch.runtime.tuner.policy.transaction import exchange_order
from zerowatch.runtime.tuner.policy.types import Order

OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1000 bytes."

Told = dict[str, Any]
Fault = Callable[[Any, RunKnobs], Any]  # to a patch that is on while the ranks meet


def fails(error: BaseException) -> Callable[..., Any]:
    """Return what raises once it is called."""
    return mock.Mock(side_effect=error)


# The garbage collector is turned last: all else is done by then.
FAULTS: dict[str, tuple[Fault, bool]] = {
    "refused": (
        lambda run, hands: patch(hands, "unsupported_reason", lambda target: "no room"),
        False,
    ),
    "apply fails": (lambda run, hands: patch(hands, "apply", fails(ZerowatchError("no"))), False),
    "out of memory half way": (
        lambda run, hands: patch(hands._garbage, "turn", fails(RuntimeError(OUT_OF_MEMORY))),
        False,
    ),
    "an attribute is gone": (
        lambda run, hands: patch(hands._garbage, "turn", fails(AttributeError("gone"))),
        False,
    ),
    "verify disagrees": (lambda run, hands: patch(hands, "verify", lambda target: False), False),
    "values cannot be read": (
        lambda run, hands: patch(hands, "values", mock.Mock(side_effect=once_failing(hands))),
        False,
    ),
    "no engine to be had": (
        lambda run, hands: patch(run._engine_holder, "_make_engine", once_no_engine(run)),
        True,
    ),
    "out of memory after a rebuild": (
        lambda run, hands: patch(hands._garbage, "turn", fails(RuntimeError(OUT_OF_MEMORY))),
        True,
    ),
    "verify disagrees after a rebuild": (
        lambda run, hands: patch(hands, "verify", lambda target: False),
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


def once_failing(hands: RunKnobs) -> Callable[[], Any]:
    """Return `values` that fails the first time."""
    calls, values = [], hands.values

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


def target_of(hands: RunKnobs, *, rebuild: bool) -> dict[str, Any]:
    """Return a configuration that differs in each kind of knob."""
    now = dict(hands.values())
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


def state(run: Any, hands: RunKnobs) -> Told:
    """Return what must be as before after an order that failed."""
    planner = run._window_runner.replay.planner
    return {
        "values": dict(hands.values()),
        "config": json.dumps(run.config, sort_keys=True),
        "plans": repr((planner.limits, planner.guard_schedule)),
    }


def matrix(stage: int) -> Told:
    """Have each fault on the last rank, and train on after it."""
    run = make_run(stage)
    hands = hands_of(run)
    train(run)
    told: Told = {}
    for name, (fault, rebuild) in FAULTS.items():
        if dist.get_world_size() > 2 and name not in ON_THREE_RANKS:
            continue
        before = state(run, hands)
        order = Order(target=target_of(hands, rebuild=rebuild), why=name)
        with ExitStack() as patches:
            if dist.get_rank() == dist.get_world_size() - 1:
                patches.enter_context(fault(run, hands))
            met = exchange_order(run._host_group, hands, order)
        assert met is not None
        told[name] = {
            "done": met[1].done,
            "reason": met[1].reason,
            "undone": met[1].undone,
            "same": state(run, hands) == before,
            "values": dict(hands.values()),
        }
        train(run)
    windows, came_out = run.steps, weights(run)
    hands.close()
    end(run)
    told["bitwise"] = torch.equal(came_out, untouched(stage, windows))
    return told


def death(stage: int, when: str) -> Told:
    """Have the last rank die within a transaction; the others write how they ended."""
    run = make_run(stage)
    hands = hands_of(run)
    train(run)
    if dist.get_rank() == dist.get_world_size() - 1:
        die_at(hands, when)
    before = state(run, hands)
    began = time.monotonic()
    order = Order(target=target_of(hands, rebuild=when == "rebuilt"), why="a death")
    try:
        met = exchange_order(run._host_group, hands, order)
        raised = f"none: {met}"
    except RuntimeError as error:
        raised = type(error).__name__
    return {
        "raised": raised,
        "seconds": time.monotonic() - began,
        "same": state(run, hands) == before,
        "values": dict(hands.values()),
        "before": before["values"],
    }


def die_at(hands: RunKnobs, when: str) -> None:
    """Leave without a word: before apply's vote, or before verify's."""
    apply = hands.apply

    def apply_and_die(target: Any) -> Any:
        apply(target)
        os._exit(9)

    if when == "verify":
        hands.verify = lambda target: os._exit(9)
    else:
        hands.apply = apply_and_die


def main(folder: Path, stages: str, when: str) -> None:
    """Run the matrix, and end by a death."""
    join()
    gc.freeze()  # else each rebuild would look through all that was imported
    told: Told = {f"stage {stage}": matrix(int(stage)) for stage in stages.split(",")}
    file = folder / f"rank-{dist.get_rank()}.json"
    file.write_text(json.dumps(told))
    told["death"] = death(int(stages[-1]), when)
    file.write_text(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # no farewell: the other end is gone


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])

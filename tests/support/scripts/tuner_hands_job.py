"""Turns every knob of a TrainingRun and turns it back; tells what read back, and what came of it.

`tuner_hands_job.py FOLDER`, two ranks.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tuner_hands import end, hands_of, make_run, train, untouched, weights

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.separate_ranks import meet as join

from zerowatch.runtime.tuner.knobs.engine_knobs import EngineKnobs
from zerowatch.runtime.tuner.knobs.run_knobs import RunKnobs
from zerowatch.runtime.tuner.policy.transaction import exchange_order
from zerowatch.runtime.tuner.policy.types import Configuration, Order

Told = dict[str, Any]

# These add up in another order, or round otherwise, so nothing is trained with them here.
INEXACT = {
    "micro_batch_samples",
    "zero_stage",
    "offload_optimizer",
    "offload_param",
    "gradient_compression",
}


def order(run: Any, hands: RunKnobs, target: Configuration, *, checked: bool = True) -> Told:
    """Let all ranks meet for an order; tell how it ended."""
    wanted = Order(target=target, why="a test", checked=checked)
    met = exchange_order(run._host_group, hands, wanted if run._host_group.rank == 0 else None)
    assert met is not None
    return {"done": met[1].done, "reason": met[1].reason, "undone": met[1].undone}


def every_knob(stage: int, only: str = "", **zero: Any) -> Told:
    """Turn each knob to another value and back, with a window in between where that is exact."""
    run = make_run(stage, **zero)
    hands = hands_of(run)
    train(run, 2)
    turned: Told = {}
    options = hands.options()
    for name, values in options.items():
        if only not in name:
            continue
        before = hands.values()
        value = next(each for each in values if each != before[name])
        outcome = order(run, hands, {**before, name: value})
        after = hands.values()
        if name not in INEXACT:
            train(run)
        back = order(run, hands, before, checked=False)
        train(run)
        turned[name] = {
            "value": value,
            "outcome": outcome,
            "reads": after.get(name),
            "back": back,
            "same": hands.values() == before,
        }
    windows, came_out = run.steps, weights(run)
    read_only, values = EngineKnobs(run.engine, 2).values(), hands.values()
    hands.close()
    end(run)
    return {
        "turned": turned,
        "options": {name: list(values) for name, values in options.items()},
        "bitwise": torch.equal(came_out, untouched(stage, windows, **zero)),
        "read only": read_only,
        "values": values,
    }


def over_a_rebuild() -> Told:
    """Turn live knobs at stage 2, go to stage 3 by an order, and to stage 0 by the run itself."""
    run = make_run(2)
    hands = hands_of(run)
    train(run)
    first, config = hands.values(), run.config
    changed = {
        **first,
        "reduce_bucket_size": 512,
        "reduce_scatter": False,
        "timers.throughput.synchronized": False,
        "activation_checkpointing": True,
        "gradient_compression": "bf16",
    }
    told: Told = {"turned": order(run, hands, changed)}
    codec = run._engine_holder.compressor
    told["to 3"] = order(run, hands, {**hands.values(), "zero_stage": 3})
    told["at 3"] = hands.values()
    told["same codec"] = run._engine_holder.compressor is codec
    train(run)
    run.rebuild({"zero_optimization": {"stage": 0}})
    told["at 0"] = hands.values()
    train(run)
    told["back"] = order(run, hands, first, checked=False)
    told["same"] = hands.values() == first
    told["config before"], told["config"] = config, run.config
    train(run)
    hands.close()
    end(run)
    return told


def from_stage_0() -> Told:
    """Go from stage 0, which has no bucket of its own, to one that makes it."""
    run = make_run(0)
    hands = hands_of(run)
    train(run)
    before = hands.values()
    outcome = order(run, hands, {**before, "zero_stage": 2})
    after = hands.values()
    end(run)
    name = "reduce_bucket_size"
    return {"before": before[name], "after": after[name], "outcome": outcome}


def to_and_fro() -> Told:
    """Do as a trial does: nothing must pile up over DeepSpeed, nor the guard stay armed."""
    run = make_run(0)
    hands = hands_of(run)
    train(run, 4)
    one = hands.values()
    other = {**one, "reduce_bucket_size": 512}
    order(run, hands, other)
    train(run, 4)
    armed = []
    for target in [one, other] * 4:
        order(run, hands, target)
        armed.append(run._window_runner.replay.planner.guard_schedule.is_armed)
    order(run, hands, one)
    wrapped = "allreduce_gradients" in vars(run.engine)
    hands.close()
    end(run)
    return {"armed": armed, "wrapped": wrapped}


def main(folder: Path) -> None:
    """Run all cases."""
    join()
    gc.freeze()  # else each rebuild would look through all that was imported
    told = {
        **{f"stage {stage}": every_knob(stage) for stage in range(4)},
        "stage 2, offload": every_knob(
            2, only="offload_optimizer", offload_optimizer={"device": "cpu"}
        ),
        "over a rebuild": over_a_rebuild(),
        "from stage 0": from_stage_0(),
        "to and fro": to_and_fro(),
    }
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

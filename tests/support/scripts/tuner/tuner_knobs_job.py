"""Sets every knob of a TrainingRun and sets it back; reports the values read back and the weights.

`tuner_knobs_job.py FOLDER`, two ranks.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tuner_knobs import end, knobs_of, make_run, train, untouched, weights

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.separate_ranks import meet as join

from zerowatch.runtime.tuner.knobs.read_only_knobs import ReadOnlyKnobs
from zerowatch.runtime.tuner.knobs.run_knobs import RunKnobs
from zerowatch.runtime.tuner.policy.policy_types import Configuration, SwitchRequest
from zerowatch.runtime.tuner.transaction import switch_all_ranks

Results = dict[str, Any]

# These change the request of sums or the rounding, so nothing is trained with them here.
INEXACT = {
    "micro_batch_samples",
    "zero_stage",
    "offload_optimizer",
    "offload_param",
    "gradient_compression",
}


def request(run: Any, knobs: RunKnobs, target: Configuration, *, checked: bool = True) -> Results:
    """Exchange a switch request; return how it ended."""
    wanted = SwitchRequest(target=target, reason="a test", checked=checked)
    own = wanted if run._host_group.rank == 0 else None
    exchanged = switch_all_ranks(run._host_group, knobs, own)
    assert exchanged is not None
    _, result = exchanged
    return {"done": result.done, "reason": result.reason, "undone": result.undone}


def every_knob(stage: int, only: str = "", **zero: Any) -> Results:
    """Set each knob to another value and back, with a window in between if that is bitwise.

    Otherwise the window is after it.
    """
    run = make_run(stage, **zero)
    knobs = knobs_of(run)
    train(run, 2)
    turned: Results = {}
    options = knobs.options()
    for name, values in options.items():
        if only not in name:
            continue
        before = knobs.values()
        value = next(each for each in values if each != before[name])
        result = request(run, knobs, {**before, name: value})
        after = knobs.values()
        if name not in INEXACT:
            train(run)
        back = request(run, knobs, before, checked=False)
        if name in INEXACT:
            train(run)
        turned[name] = {
            "value": value,
            "result": result,
            "reads": after.get(name),
            "back": back,
            "same": knobs.values() == before,
        }
    train(run)
    windows, final = run.steps, weights(run)
    read_only, values = ReadOnlyKnobs(run.engine, 2).values(), knobs.values()
    knobs.close()
    end(run)
    return {
        "turned": turned,
        "options": {name: list(values) for name, values in options.items()},
        "bitwise": torch.equal(final, untouched(stage, windows, **zero)),
        "read only": read_only,
        "values": values,
    }


def over_a_rebuild() -> Results:
    """Set live knobs at stage 2, rebuild to stage 3 by a request and to stage 0 by the run."""
    run = make_run(2)
    knobs = knobs_of(run)
    train(run)
    first, config = knobs.values(), run.config
    changed = {
        **first,
        "reduce_bucket_size": 512,
        "reduce_scatter": False,
        "timers.throughput.synchronized": False,
        "activation_checkpointing": True,
        "gradient_compression": "bf16",
    }
    results: Results = {"turned": request(run, knobs, changed)}
    compressor = run._engine_holder.compressor
    results["to 3"] = request(run, knobs, {**knobs.values(), "zero_stage": 3})
    results["at 3"] = knobs.values()
    results["same compressor"] = run._engine_holder.compressor is compressor
    train(run)
    run.rebuild({"zero_optimization": {"stage": 0}})
    results["at 0"] = knobs.values()
    train(run)
    results["back"] = request(run, knobs, first, checked=False)
    results["same"] = knobs.values() == first
    results["config before"], results["config"] = config, run.config
    train(run)
    knobs.close()
    end(run)
    return results


def from_stage_0() -> Results:
    """Rebuild from stage 0, which has no bucket of its own, to a stage that has one."""
    run = make_run(0)
    knobs = knobs_of(run)
    train(run)
    before = knobs.values()
    result = request(run, knobs, {**before, "zero_stage": 2})
    after = knobs.values()
    end(run)
    name = "reduce_bucket_size"
    return {"before": before[name], "after": after[name], "result": result}


def asynchronous(stage: int) -> Results:
    """Reduce asynchronously, then ask for what excludes that, alone and without it; set it back."""
    run = make_run(stage)
    knobs = knobs_of(run)
    train(run)
    first = knobs.values()
    on = {**first, "asynchronous_reduction": True}
    results: Results = {"on": request(run, knobs, on)}
    train(run)
    for name, value in {"reduce_scatter": False, "overlap_comm": True}.items():
        if name not in first:
            continue
        results[f"with {name}"] = request(run, knobs, {**on, name: value})
        without = {**on, name: value, "asynchronous_reduction": False}
        results[f"instead {name}"] = request(run, knobs, without)
        train(run)
        results[f"back from {name}"] = request(run, knobs, on, checked=False)
        train(run)
    results["back"] = request(run, knobs, first, checked=False)
    train(run)
    windows, final = run.steps, weights(run)
    same = knobs.values() == first
    knobs.close()
    end(run)
    return {
        "results": results,
        "same": same,
        "bitwise": torch.equal(final, untouched(stage, windows)),
    }


def to_an_overlapping_stage() -> Results:
    """Reduce asynchronously at stage 1, then ask for stage 2, which overlapped before."""
    run = make_run(2, overlap_comm=True)
    knobs = knobs_of(run)
    train(run)
    results: Results = {"to 1": request(run, knobs, {**knobs.values(), "zero_stage": 1})}
    on = {**knobs.values(), "asynchronous_reduction": True}
    results["on"] = request(run, knobs, on)
    train(run)
    engine = run.engine
    results["with"] = request(run, knobs, {**on, "zero_stage": 2})
    same = run.engine is engine
    without = {**on, "zero_stage": 2, "asynchronous_reduction": False}
    results["instead"] = request(run, knobs, without)
    overlaps = knobs.values()["overlap_comm"]
    train(run)
    results["back"] = request(run, knobs, on, checked=False)
    train(run)
    is_on = knobs.values()["asynchronous_reduction"]
    knobs.close()
    end(run)
    return {"results": results, "same": same, "overlaps": overlaps, "on": is_on}


def alternating() -> Results:
    """Alternate like a trial: patches must not accumulate, and the guard must not stay armed."""
    run = make_run(0)
    knobs = knobs_of(run)
    train(run, 4)
    one = knobs.values()
    other = {**one, "reduce_bucket_size": 512}
    request(run, knobs, other)
    train(run, 4)
    armed = []
    for target in [one, other] * 4:
        request(run, knobs, target)
        armed.append(run._window_runner.replay.planner.guard_schedule.is_armed)
    request(run, knobs, one)
    wrapped = "allreduce_gradients" in vars(run.engine)
    knobs.close()
    end(run)
    return {"armed": armed, "wrapped": wrapped}


def main(folder: Path) -> None:
    """Run all cases."""
    join()
    gc.freeze()  # otherwise each rebuild would scan all imported objects
    results = {
        **{f"stage {stage}": every_knob(stage) for stage in range(4)},
        "stage 2, offload": every_knob(
            2, only="offload_optimizer", offload_optimizer={"device": "cpu"}
        ),
        "over a rebuild": over_a_rebuild(),
        "from stage 0": from_stage_0(),
        "alternating": alternating(),
        "asynchronous, stage 1": asynchronous(1),
        "asynchronous, stage 2": asynchronous(2),
        "to an overlapping stage": to_an_overlapping_stage(),
    }
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

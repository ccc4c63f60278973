"""Rebuilds engines in the middle of training, and compares with training without a rebuild.

`rebuild_checks.py FOLDER CASE...`; rank r writes FOLDER/rank-r.json: by case what differs. The case
"faults" runs failing and unsupported rebuilds.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
import weakref
from dataclasses import replace
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from rebuild_cases import CASES, Case
from rebuild_faults import check_faults
from rebuild_training import Run

from zerowatch.runtime.common.host_group import HostGroup
from zerowatch.runtime.engine.rebuild.engine_replacement import rebuild
from zerowatch.runtime.engine.rebuild.optimizer_layout import layout_of

BEFORE, AFTER = 2, 2
FAULTS = "faults"


Training = tuple[list[float], dict[str, torch.Tensor]]


def without_rebuild(case: Case, known: dict[str, Training]) -> Training:
    """Return losses and weights of a training without a rebuild; each is run once."""
    key = repr(replace(case, new=case.old, exact=False))
    if key not in known:
        run = Run(case)
        losses = run.steps(BEFORE + AFTER)
        known[key] = losses, run.weights()
        run.stop()
    return known[key]


def check(case: Case, host_group: HostGroup, known: dict[str, Training]) -> dict:
    expected_losses, expected = without_rebuild(case, known)
    run = Run(case)
    losses = run.steps(BEFORE)
    old = run.engine
    gone = {
        "engine": weakref.ref(old),
        "optimizer": weakref.ref(old.optimizer) if old.optimizer is not run.optimizer else None,
        "masters": weakref.ref(layout_of(old)[0].tensor) if case.old.stage else None,
    }
    if case.old.stage == 3:
        gone["coordinator"] = weakref.ref(old.optimizer.parameter_offload.param_coordinator)
    old = None
    counted = (run.engine.global_steps, run.engine.skipped_steps)
    run.engine = rebuild(
        run.engine, run.config_of(case.new), make_engine=run.make_engine, host_group=host_group
    )
    gc.collect()
    alive = [what for what, ref in gone.items() if ref is not None and ref() is not None]
    stage = run.engine.zero_optimization_stage()
    counted_after = (run.engine.global_steps, run.engine.skipped_steps)
    losses += run.steps(AFTER)
    actual = run.weights()
    tied = run.engine.module.head.weight is run.engine.module.words.weight
    result = {
        "equal": losses == expected_losses
        and all(torch.equal(actual[key], expected[key]) for key in expected),
        "difference": max(
            float((actual[key].double() - expected[key].double()).norm())
            / max(float(expected[key].double().norm()), 1e-30)
            for key in expected
        ),
        "losses": max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)),
        "alive": alive,
        "stage": stage,
        "counted": counted == counted_after and run.engine.global_steps == BEFORE + AFTER,
        "tied": tied,
    }
    run.stop()
    return result


def main(folder: Path, names: list[str]) -> None:
    host_group = HostGroup()
    known: dict[str, Training] = {}
    results = {}
    for name in names:
        print("case", name, flush=True)
        if name == FAULTS:
            results[name] = check_faults(host_group)
        else:
            results[name] = check(CASES[name], host_group, known)
        (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    main(Path(sys.argv[1]), sys.argv[2:] or [*CASES, FAULTS])

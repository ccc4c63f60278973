"""Switches activation checkpointing and optimizer state offload on and off on live engines.

`memory_savings_job.py FOLDER`; rank r writes FOLDER/rank-r.json, one entry per case.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from live_settings_engines import (
    APPLY_BEFORE,
    UNDO_BEFORE,
    WIDTH,
    WINDOWS,
    give_up,
    join,
    make_engine,
    train,
    weights,
)
from transformers import GPT2Config, GPT2LMHeadModel

from zerowatch.runtime.common.undo import Undo, chain
from zerowatch.runtime.engine.live_settings import optimizer_state_offload
from zerowatch.runtime.engine.live_settings.activation_checkpointing import ActivationCheckpointing
from zerowatch.runtime.engine.live_settings.all_settings import MinimalBuckets
from zerowatch.runtime.engine.live_settings.optimizer_state_offload import (
    OffloadedOptimizerStates,
    OptimizerStateOffload,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    stage: int
    apply: Callable[[object], Undo]
    bf16: bool = False
    transformers: bool = False


def every_saving(engine) -> Undo:
    """Apply all memory savings that this engine supports; on a CPU, all but offload."""
    savings = [ActivationCheckpointing(), MinimalBuckets(), OptimizerStateOffload()]
    return chain(
        [each.attach(engine) for each in savings if each.unsupported_reason(engine) is None]
    )


BY_DEFAULT = ActivationCheckpointing().attach
BY_PATTERN = ActivationCheckpointing("blocks.[01]").attach
CASES = [
    *(
        Case(name=f"checkpointing, stage {stage}", stage=stage, apply=BY_DEFAULT)
        for stage in range(4)
    ),
    Case(name="checkpointing by pattern, stage 3", stage=3, apply=BY_PATTERN),
    Case(
        name="checkpointing of transformers, stage 3", stage=3, apply=BY_DEFAULT, transformers=True
    ),
    *(
        Case(
            name=f"offload, stage {stage}",
            stage=stage,
            apply=OffloadedOptimizerStates,
        )
        for stage in range(4)
    ),
    Case(
        name="offload, BF16_Optimizer",
        stage=1,
        apply=OffloadedOptimizerStates,
        bf16=True,
    ),
    Case(name="every saving, stage 3", stage=3, apply=every_saving),
]


def make(case: Case):
    model = None
    if case.transformers:
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=32, n_positions=WIDTH, n_embd=32, n_layer=2, n_head=2)
        model = GPT2LMHeadModel(config)
        model.forward = partial(as_language, model.forward)
    return make_engine(case.stage, {"stage3_param_persistence_threshold": 100}, model, case.bf16)


def as_language(forward: Callable, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Map the numbers that the other engines are trained on to tokens."""
    tokens = (x.abs() * 10).long().clamp(max=31)
    return forward(input_ids=tokens, labels=tokens).loss


def run(case: Case, is_applied: bool) -> tuple[torch.Tensor, dict]:
    engine = make(case)
    spans = {"applied": (APPLY_BEFORE, UNDO_BEFORE), "undone": (UNDO_BEFORE, WINDOWS)}
    found: dict = {"saved": [], "num_offloaded": [], "spans": spans}
    undos: list[Undo] = []
    forwards = {name: vars(m).get("forward") for name, m in engine.module.named_modules()}

    def before_window(window: int) -> None:
        if is_applied and window == APPLY_BEFORE:
            undos.append(case.apply(engine))
        if is_applied and window == UNDO_BEFORE:
            undos[0]()
            undos[0]()
            now = {name: vars(m).get("forward") for name, m in engine.module.named_modules()}
            found["forwards_restored"] = now == forwards
            found["step_restored"] = "step" not in vars(engine.optimizer)

    def after_window() -> None:
        found["saved"].append(engine.saved)
        storages = [tensor.untyped_storage() for tensor in optimizer_state_offload._states(engine)]
        found["num_offloaded"].append(sum(storage.nbytes() == 0 for storage in storages))

    train(engine, dist.get_rank(), before_window, after_window)
    found["unsupported_reason"] = OptimizerStateOffload().unsupported_reason(engine)
    if case.stage and not case.transformers:
        first = next(engine.module.parameters())
        state = deepspeed.utils.safe_get_full_optimizer_state(first, "exp_avg")
        found["state_can_be_read"] = bool(state.abs().sum() > 0)
    result = weights(engine)
    give_up(engine)
    return result, found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    join()
    plain: dict[tuple, torch.Tensor] = {}
    results: dict[str, dict] = {}
    for case in CASES:
        if case.name not in sys.argv[2:]:
            continue
        key = (case.stage, case.bf16, case.transformers)
        if key not in plain:
            plain[key] = run(case, is_applied=False)[0]
        actual, found = run(case, is_applied=True)
        difference = (actual - plain[key]).abs().max() / plain[key].abs().max()
        found["bitwise"] = torch.equal(actual, plain[key])
        found["difference"] = float(difference)
        results[case.name] = found
    assert len(found["saved"]) == WINDOWS
    Path(sys.argv[1], f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))

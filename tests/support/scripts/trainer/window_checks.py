"""Trains by windows split in many ways; writes the differences of the weights as JSON per rank.

`window_checks.py FOLDER NAME...`, of engines. Each case starts from the same weights and trains
on the same batches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import zerowatch

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

STEPS, SAMPLES, LENGTH, TOKENS, WIDTH = 4, 8, 6, 11, 10
QUIET = {
    "serve": {"enabled": False},
    "run_log": {"enabled": False},
    "cross_rank": {"enabled": False},
}
PLANS = {
    "whole": [8, 8, 8, 8],
    "again": [8, 8, 8, 8],
    "three": [3, 3, 3, 3],
    "changing": [1, 3, 8, 2],
}
ENGINES = {
    **{f"stage {stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)},
    "stage 1, offload": {
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    },
    "stage 3, small buckets": {
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 100,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
        },
    },
    "bf16, stage 0": {"bf16": {"enabled": True}},
    "bf16": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}},
    "BF16_Optimizer": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(TOKENS, WIDTH)
        self.body = torch.nn.Linear(WIDTH, WIDTH + 1)
        self.head = torch.nn.Linear(WIDTH + 1, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.nn.functional.gelu(self.body(self.embedding(tokens))))


def batches() -> list[dict[str, torch.Tensor]]:
    """Return global batches; the targets of a sample end after one to all tokens."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(STEPS):
        tokens = torch.randint(
            TOKENS, (SAMPLES * dist.get_world_size(), LENGTH + 1), generator=generator
        )
        ends = torch.randint(1, LENGTH + 1, (len(tokens), 1), generator=generator)
        is_target = torch.arange(LENGTH) < ends
        made.append(
            {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].masked_fill(~is_target, -100)}
        )
    return made


def mean_over_samples(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["tokens"]).float()
    each = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), batch["labels"], reduction="none"
    )
    return each.mean(dim=1).mean()


def mean_over_tokens(
    model: Any, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(batch["tokens"]).to(torch.float64 if exact(model) else torch.float32)
    targets = (batch["labels"] >= 0).sum()
    total = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
    )
    return total / targets.clamp(min=1), targets


def exact(model: Any) -> bool:
    return next(model.parameters()).dtype == torch.float64


def train(options: dict[str, Any], plan: Sequence[int], loss: Any, shares: Any = None):
    """Train on all batches; return the weights, each step's result, and the counts."""
    torch.manual_seed(0)
    model = Net()
    run = zerowatch.TrainingRun(
        model,
        config={
            "train_micro_batch_size_per_gpu": 8,
            "gradient_clipping": 0.5,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **options,
        },
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        loss=loss,
        settings=QUIET,
    )
    results = []
    for batch, size in zip(batches(), plan, strict=True):
        run.set_micro_batch(size)
        results.append(run.train_batch(share_of(batch, shares)))
    found = weights(run.engine), results, (run.steps, run.samples, run.engine.global_samples)
    run.close()
    run.engine.destroy()
    return found


def share_of(batch: dict[str, torch.Tensor], shares: Sequence[int] | None):
    """Return this rank's rows of a global batch; by default in even shares."""
    rank, world = dist.get_rank(), dist.get_world_size()
    given = shares or [SAMPLES] * world
    start = sum(given[:rank])
    return {name: rows[start : start + given[rank]] for name, rows in batch.items()}


def weights(engine: Any) -> torch.Tensor:
    parts = []
    for parameter in engine.module.parameters():
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                parts.append(parameter.detach().clone().flatten())
        else:
            parts.append(parameter.detach().clone().flatten())
    return torch.cat(parts).double()


def closed_form() -> torch.Tensor:
    """Train in float64 on the whole global batches by plain torch: clipping, then SGD."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for batch in batches():
        optimizer.zero_grad()
        mean_over_tokens(model, batch)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def relative_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).norm() / right.norm())


def uneven() -> list[int]:
    """Return shares that differ between ranks, with fewer samples than micro-batches on one."""
    world = dist.get_world_size()
    given = [SAMPLES] * world
    if world > 1:
        given[0], given[-1] = 2 * SAMPLES - 1, 1
    return given


def main(folder: Path, names: Sequence[str]) -> None:
    """Run all cases on these engines."""
    deepspeed.init_distributed("gloo", verbose=False)
    found: dict[str, Any] = {}
    truth = closed_form()
    for name in names:
        options = ENGINES[name]
        whole, results, counts = train(options, PLANS["whole"], mean_over_samples)
        found[name] = {
            "counts": counts,
            "losses": [result.loss for result in results],
            "difference": {},
        }
        for plan in list(PLANS)[1:]:
            trained, results, _ = train(options, PLANS[plan], mean_over_samples)
            found[name]["difference"][plan] = relative_difference(trained, whole)
            found[name][f"losses, {plan}"] = [result.loss for result in results]
        trained, results, _ = train(options, PLANS["changing"], mean_over_tokens, uneven())
        found[name]["tokens, uneven"] = relative_difference(trained, truth)
        found[name]["micro-batches"] = [result.micro_batches for result in results]
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

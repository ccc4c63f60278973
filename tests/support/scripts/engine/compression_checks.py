"""Trains small engines with and without compression and writes the results as JSON per rank.

`compression_checks.py FOLDER CASE...`; rank r writes FOLDER/rank-r.json. Two
ranks run all checks, more of them only what depends on their number.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from compression_engine import (
    backward,
    make_engine,
    same_on_all_ranks,
    train,
    weights,
)

import zerowatch
from zerowatch.metrics.catalog import communication
from zerowatch.runtime.engine.compression import compressed_all_reduce
from zerowatch.runtime.engine.compression.compressed_all_reduce import run_collective_steps
from zerowatch.runtime.engine.compression.encoding import FORMATS
from zerowatch.runtime.engine.compression.error_feedback import CompressionError
from zerowatch.runtime.engine.compression.gradient_compressor import GradientCompressor
from zerowatch.runtime.trainer.oom_recovery.abort_window import abort_window

STEPS = 4
KINDS = ("fp32", "bf16", "fp16", "int8", "fp8")
THOROUGH = {  # the other cases differ in their buckets only
    "stage 0": ("fp32", "bf16", "int8"),
    "stage 1": ("fp32", "int8"),
    "stage 2": KINDS,
    "stage 3": KINDS,
}


def relative(values: torch.Tensor, reference: torch.Tensor) -> float:
    return float((values - reference).norm() / reference.norm())


def owner_of_the_reductions(engine: Any) -> Any:
    return engine if engine.zero_optimization_stage() == 0 else engine.optimizer


def compare(name: str) -> dict[str, Any]:
    """Train without compression and with each format; return how far the weights differ."""
    plain = make_engine(name)
    before = weights(plain)
    train(plain, None, range(STEPS))
    reference = weights(plain)
    is_thorough = name in THOROUGH and dist.get_world_size() == 2
    found: dict[str, Any] = {"moved": relative(reference, before)}
    for kind in THOROUGH[name] if is_thorough else ("int8",):
        engine, compressor = make_engine(name), GradientCompressor(kind)
        compressor.attach(engine)
        train(engine, compressor, range(STEPS))
        trained = weights(engine)
        found[kind] = {
            "difference": relative(trained, reference),
            "same on all ranks": same_on_all_ranks(trained),
            "ratio": compressor.error_ratio,
        }
    if is_thorough:
        found |= {"undone": undone(name, reference), "repeated": repeated(name)}
    if engine.zero_optimization_stage() in (1, 2):
        found["asynchronous"] = asynchronous(name, reference)
    return found


def undone(name: str, reference: torch.Tensor) -> dict[str, bool]:
    """Attach, undo at once, and train: equal to training without compression."""
    engine = make_engine(name)
    owner = owner_of_the_reductions(engine)
    before = dict(vars(owner))
    undo = GradientCompressor("int8").attach(engine)
    undo()
    undo()
    after = dict(vars(owner))
    train(engine, None, range(STEPS))
    return {
        "attributes": before.keys() == after.keys() and all(before[k] is after[k] for k in before),
        "weights": torch.equal(weights(engine), reference),
    }


def repeated(name: str) -> dict[str, bool]:
    """Abort a window and run it again; save the compressor, and resume with another one."""
    engine, compressor = make_engine(name), GradientCompressor("int8")
    undo = compressor.attach(engine)
    train(engine, compressor, range(2))
    second, other = make_engine(name), GradientCompressor("int8")
    other.attach(second)
    train(second, other, range(2))
    other.begin_window()
    backward(second, 99)
    abort_window(second)
    other.abort_window()
    train(second, other, range(2, STEPS))
    saved = compressor.state_dict()
    undo()
    resumed = GradientCompressor("int8")
    resumed.load_state_dict(saved)
    resumed.attach(engine)
    train(engine, resumed, range(2, STEPS))
    return {
        "replayed": torch.equal(weights(engine), weights(second)),
        "states agree": all(
            torch.equal(kept, other.state_dict()[key]) for key, kept in resumed.state_dict().items()
        ),
        "states": len(saved) >= len(list(engine.module.parameters())),
    }


def asynchronous(name: str, reference: torch.Tensor) -> dict[str, bool]:
    """Train with buckets in flight during backward, uncompressed and compressed."""
    found = {}
    for kind in ("plain", "int8"):
        engine = make_engine(name)
        compressor = GradientCompressor(kind, asynchronous=True)
        if compressor.unsupported_reason(engine) is not None:
            return {}
        compressor.attach(engine)
        train(engine, compressor, range(2))
        compressor.begin_window()
        backward(engine, 99)
        abort_window(engine)
        compressor.abort_window()
        train(engine, compressor, range(2, STEPS))
        if kind == "int8":
            waiting, synchronous = make_engine(name), GradientCompressor(kind)
            synchronous.attach(waiting)
            train(waiting, synchronous, range(STEPS))
            reference = weights(waiting)
        found[kind] = torch.equal(weights(engine), reference)
    return found


def non_finite(name: str) -> dict[str, Any]:
    """Train with an infinite loss on one rank."""
    engine, compressor = make_engine(name), GradientCompressor("int8")
    compressor.attach(engine)
    train(engine, compressor, range(1))
    compressor.begin_window()
    backward(engine, 1, scale=float("inf") if dist.get_rank() == 0 else 1.0)
    engine.step()
    compressor.commit_window()
    return {
        "detected": engine.skipped_steps == 1 or not bool(weights(engine).isfinite().all()),
        "residuals": all(bool(kept.isfinite().all()) for kept in compressor.state_dict().values()),
        "ratio": compressor.error_ratio,
    }


def loss_scaling() -> list[Any]:
    """Train in fp16 from too high a loss scale, without and with compression."""
    found: list[Any] = []
    for kind in (None, "int8"):
        fp16 = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}
        engine = make_engine("stage 2", **fp16)
        compressor = GradientCompressor(kind) if kind else None
        if compressor is not None:
            compressor.attach(engine)
        scaler, follows_scale = engine.optimizer.loss_scaler, True
        for step in range(12):
            skipped = engine.skipped_steps
            if compressor is not None:
                compressor.begin_window()
                follows_scale &= compressor._compressor.gradient_scale == scaler.cur_scale
            backward(engine, step)
            engine.step()
            if compressor is not None and engine.skipped_steps > skipped:
                compressor.abort_window()
            elif compressor is not None:
                compressor.commit_window()
        finite = bool(weights(engine).isfinite().all())
        found.append([engine.skipped_steps, scaler.cur_scale, finite, follows_scale])
    return found


def conserved() -> dict[str, float]:
    """Reduce values of odd sizes; return how much of the sum is in neither result nor errors."""
    compressed_all_reduce.CHUNK_VALUES, default = 1024, compressed_all_reduce.CHUNK_VALUES
    error = CompressionError()
    world, rank = dist.get_world_size(), dist.get_rank()
    worst: dict[str, float] = {}
    for kind, total in itertools.product(KINDS, (5, 700, 10_001)):
        exchange = compressed_all_reduce.CompressedAllReduce(FORMATS[kind], None, error)
        values = torch.randn(total, generator=torch.Generator().manual_seed(rank))
        expected = values.double()
        dist.all_reduce(expected)
        errors, result = values.clone(), torch.empty(total)
        run_collective_steps(exchange.all_reduce(errors, result))
        lost = errors.double()
        dist.all_reduce(lost)
        scattered = values.clone()
        sizes = [total // 3, 0, total - total // 3, 0][:world] if world > 2 else [0, total]
        run_collective_steps(exchange.reduce_scatter(scattered, sizes))
        scattered_sum = scattered.double()
        dist.all_reduce(scattered_sum)  # each rank's sums, and the errors of the others
        largest = float(expected.abs().max())
        away = max(
            float((result.double() + lost - expected).abs().max()),
            float((scattered_sum - expected).abs().max()),
        )
        worst[kind] = max(worst.get(kind, 0.0), away / largest)
        assert same_on_all_ranks(result)
    compressed_all_reduce.CHUNK_VALUES = default
    return worst


def recorded_traffic() -> dict[str, float]:
    """Train a watched engine; return the payload bytes of each kind of call."""
    model = torch.nn.Linear(640, 100, bias=False)
    engine = zerowatch.initialize(
        settings={"serve": {"enabled": False}, "run_log": {"enabled": False}},
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 0},
        },
    )[0]
    GradientCompressor("int8").attach(engine)
    engine.backward(engine(torch.ones(2, 640)).square().mean())
    engine.step()
    engine.watch.close()
    seen = engine.watch.snapshot().values[communication.COLLECTIVE_BYTES]
    return {"/".join(labels): value for labels, value in seen.items()}


def main(folder: str, *names: str) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    deepspeed.init_distributed("gloo", verbose=False)
    report: dict[str, Any] = {name: compare(name) for name in names}
    report["conserved"] = conserved()
    if dist.get_world_size() == 2:
        report["non finite"] = {
            name: non_finite(name) for name in ("stage 0", "stage 2", "stage 3")
        }
        report["loss scaling"] = loss_scaling()
        report["recorded"] = recorded_traffic()
    Path(folder, f"rank-{dist.get_rank()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])

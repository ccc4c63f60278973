"""Trains with torch.compile and CUDA graphs, with and without monitoring: `FOLDER`."""

from __future__ import annotations

from typing import Any

import torch
from gpu.jobs import engines

import zerowatch
from zerowatch.metrics.catalog.communication import COMM_COVERAGE_RATIO

WIDTH, STEPS = 256, 12


def train(engine: Any) -> torch.Tensor:
    data = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        batch = torch.randn(4, WIDTH, generator=data).to(engine.device)
        torch.compiler.cudagraph_mark_step_begin()
        engines.step(engine, batch)
    engines.synchronize()
    return engines.weights(engine)


def compiled(mode: str | None) -> dict[str, Any]:
    results, failures, steps, coverage = [], {}, 0, None
    for is_monitored in (False, True):
        model = engines.layers(WIDTH, 3)
        engine = engines.make_engine(model, engines.ds_config(1))
        engine.module.compile(mode=mode)
        if is_monitored:
            watch = zerowatch.watch(engine, engines.QUIET)
            records: list[Any] = []
            watch.subscribe(records.append)
        results.append(train(engine))
        if is_monitored:
            watch.close()
            failures, steps = engines.hook_failures(watch), len(records)
            coverage = watch.snapshot().value(COMM_COVERAGE_RATIO)
        engines.give_up(engine)
        torch.compiler.reset()
    return {
        "bitwise": torch.equal(*results),
        "failures": failures,
        "steps": steps,
        "coverage": coverage,
    }


def captured() -> dict[str, Any]:
    """Capture a forward pass between the steps of a monitored run, in the strictest mode."""
    engine = engines.make_engine(engines.layers(WIDTH, 2), engines.ds_config(1))
    watch = zerowatch.watch(engine, engines.QUIET)
    x = torch.randn(4, WIDTH, device=engine.device)
    engines.step(engine, x)
    layer = torch.nn.Linear(WIDTH, WIDTH).to(engine.device).eval()
    with torch.no_grad():
        for _ in range(3):
            layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        for _ in range(20):  # the watch thread queries meanwhile
            engines.step(engine, x)
            with torch.cuda.graph(graph, capture_error_mode="global"):
                y = layer(x)
            graph.replay()
            graph = torch.cuda.CUDAGraph()
    expected = layer(x)
    torch.cuda.synchronize()
    watch.close()
    found = {"equal": bool(torch.allclose(y, expected)), "failures": engines.hook_failures(watch)}
    engines.give_up(engine)
    return found


if __name__ == "__main__":
    engines.meet()
    report = {"default": compiled(None), "reduce-overhead": compiled("reduce-overhead")}
    if engines.ON_CUDA:
        report["captured"] = captured()
    engines.report(report)

"""Trains with torch.compile and CUDA graphs, with and without monitoring: `FOLDER PART...`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gpu.jobs import engines

import zerowatch
from zerowatch.metrics.catalog.communication import COMM_COVERAGE_RATIO

WIDTH, STEPS, CAPTURES = 256, 12, 20


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


@contextmanager
def capture() -> Iterator[Callable[[], None]]:
    """Capture a graph in the strictest mode, and yield its replay; on a CPU, capture nothing."""
    if not engines.ON_CUDA:
        yield lambda: None
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        yield graph.replay


def captured() -> dict[str, Any]:
    """Capture a forward pass between the steps of a monitored run."""
    engine = engines.make_engine(engines.layers(WIDTH, 2), engines.ds_config(1))
    watch = zerowatch.watch(engine, engines.QUIET)
    x = torch.randn(4, WIDTH, device=engine.device)
    layer = torch.nn.Linear(WIDTH, WIDTH).to(engine.device).eval()
    replays = []
    with torch.no_grad():
        for _ in range(3):
            layer(x)
    engines.synchronize()
    for _ in range(CAPTURES):  # the watch thread queries meanwhile
        engines.step(engine, x)
        with torch.no_grad(), capture() as replay:
            y = layer(x)
        replay()
        replays.append(replay)  # a graph lives until the device has run it
    with torch.no_grad():
        expected = layer(x)
    engines.synchronize()
    watch.close()
    found = {
        "equal": bool(torch.allclose(y, expected)),
        "captures": len(replays),
        "failures": engines.hook_failures(watch),
    }
    engines.give_up(engine)
    return found


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "default": lambda: compiled(None),
    "reduce-overhead": lambda: compiled("reduce-overhead"),
    "captured": captured,
}

if __name__ == "__main__":
    engines.meet()
    engines.report({part: PARTS[part]() for part in sys.argv[2:]})

"""Trains with passes of known length on a GPU, and writes its phases: `FOLDER`.

The passes sleep on the device. The host queues them in a fraction of that time.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from gpu.jobs import engines

import zerowatch
from zerowatch.metrics.catalog import devices

FORWARD_MS, BACKWARD_MS, LOADING_SECONDS = 20.0, 40.0, 0.1
WARM_UP, STEPS = 4, 12


def cycles_per_ms() -> float:
    """Return the clock of `torch.cuda._sleep`, after the GPU's clocks have risen."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for cycles in (10**9, 10**9):
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize()
    return 10**9 / begin.elapsed_time(end)


class Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rate: float) -> torch.Tensor:
        ctx.rate = rate
        torch.cuda._sleep(int(FORWARD_MS * rate))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.cuda._sleep(int(BACKWARD_MS * ctx.rate))
        return gradient, None


class Model(torch.nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.inner, self.rate = torch.nn.Linear(64, 64), rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleeping.apply(self.inner(x), self.rate)


def main() -> None:
    engines.meet()
    rate = cycles_per_ms()
    engine = engines.make_engine(Model(rate), engines.ds_config(1))
    watch = zerowatch.watch(engine, engines.QUIET)
    records: list[Any] = []
    watch.subscribe(records.append)
    batch = torch.randn(4, 64, device=engine.device)
    host = []
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP:
            engines.synchronize()
            warmed_up = time.perf_counter()
        began = time.perf_counter()
        loss = engine(batch).square().mean()
        host.append(time.perf_counter() - began)
        engine.backward(loss)
        engine.step()
    engines.synchronize()
    trained = time.perf_counter()
    time.sleep(LOADING_SECONDS)  # the device is idle; counts for what comes next
    # The device waits for the host to launch, and its clock may have fallen: measured, not known.
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    output = engine(batch)
    end.record()
    engine.backward(output.square().mean())
    engine.step()
    engines.synchronize()
    ended = time.perf_counter()
    time.sleep(2.5)  # two samples of the device
    watch.close()
    seconds = watch.snapshot().values.get(devices.DEVICE_SECONDS, {}).items()
    engines.report(
        {
            "host forward": sorted(host[WARM_UP:])[STEPS // 2],
            "phases": [dict(record.phase_seconds) for record in records],
            "seconds": [record.seconds for record in records],
            "script's last forward": begin.elapsed_time(end) / 1e3,
            "script's seconds": {"steps": trained - warmed_up, "last": ended - trained},
            "device seconds": {" ".join(labels): value for labels, value in seconds},
            "failures": engines.hook_failures(watch),
        }
    )


if __name__ == "__main__":
    main()

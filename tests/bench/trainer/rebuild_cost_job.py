"""One rank of the rebuild bench: one engine rebuilt again and again, and what that takes.

Memory is counted with the host as it is: of what a rebuild needs the states on this rank's host
are in it, and on CPU the engines too, the old one before and the new one after.
"""

from __future__ import annotations

import ctypes
import gc
import time
import warnings
from typing import Any

import deepspeed
import torch
from bench import gpt_training

from zerowatch.runtime.common.host_group import HostGroup
from zerowatch.runtime.devices.host_memory import HostMemory
from zerowatch.runtime.engine.rebuild import engine_replacement

WIDTH, LAYERS = 512, 7  # 22 million parameters
# glibc's way to give every larger block back at once; RSS then is what is in use.
_MMAP_THRESHOLD, _BYTES = -3, 131_072
_LIBC = ctypes.CDLL(None)


def main() -> None:
    asked = gpt_training.arguments()
    warnings.simplefilter("ignore")
    _LIBC.mallopt(_MMAP_THRESHOLD, _BYTES)
    gpt_training.meet()
    host_group = HostGroup()
    torch.manual_seed(0)
    model = gpt_training.TinyGpt(WIDTH, LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def make_engine(module: torch.nn.Module, config: dict[str, Any]) -> Any:
        return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]

    path = asked["path"]
    engine = make_engine(model, path[0])
    step(engine)
    host = HostMemory(reset_peak=True)
    report = []
    for config in path[1:]:
        engine, found = measure(engine, config, make_engine, host_group, host)
        step(engine)
        report.append(found)
    parameters = sum(getattr(one, "ds_numel", one.numel()) for one in model.parameters())
    gpt_training.report({"rebuilds": report, "parameters": parameters})


def step(engine: Any) -> None:
    engine.backward(engine(torch.randint(0, gpt_training.VOCABULARY, (1, 33))))
    engine.step()


def measure(
    engine: Any, config: dict[str, Any], make_engine: Any, host_group: Any, host: HostMemory
) -> tuple[Any, dict[str, float]]:
    """Rebuild once; return the engine, and seconds and bytes."""
    taken: list[int] = []
    original = engine_replacement.take_snapshot

    def counted(*args: Any) -> Any:
        snapshot = original(*args)
        taken.append(snapshot.num_bytes)
        return snapshot

    engine_replacement.take_snapshot = counted  # type: ignore[assignment]
    before = in_use(host)
    began = time.perf_counter()
    engine = engine_replacement.rebuild(
        engine, config, make_engine=make_engine, host_group=host_group
    )
    seconds = time.perf_counter() - began
    peak = host.read()["peak_allocated"]
    engine_replacement.take_snapshot = original
    after = in_use(host)
    found = {
        "seconds": seconds,
        "moved": taken[0],
        "before": before,
        "after": after,
        "peak": peak,
    }
    return engine, found


def in_use(host: HostMemory) -> float:
    gc.collect()
    _LIBC.malloc_trim(0)
    return host.read()["allocated"]


if __name__ == "__main__":
    main()

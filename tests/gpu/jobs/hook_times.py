"""Times of each hook of monitoring on the threads of training, for jobs of `tests/gpu/`."""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.monitoring_cost.own_threads import own_threads

from zerowatch.runtime.common.fail_open import FailOpen


@dataclass(slots=True)
class HookTimes:
    """What one hook has used on one thread."""

    calls: int = 0
    cpu_ns: int = 0
    wall_ns: int = 0


Times = dict[tuple[int, str], HookTimes]  # by thread and hook


@contextmanager
def timed_hooks() -> Iterator[Times]:
    """Time the hooks of all watches that are opened inside. A hook may be inside another one.

    Reading the two clocks takes less than a microsecond of each call, which is included.
    """
    found: Times = defaultdict(HookTimes)
    original = FailOpen.wrap

    @functools.wraps(original)
    def wrap(
        self: FailOpen, name: str, body: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        key = f"{name}: {getattr(body, '__qualname__', type(body).__name__)}"

        def timed(*inputs: Any, **named: Any) -> Any:
            wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
            try:
                return body(*inputs, **named)
            finally:
                times = found[threading.get_native_id(), key]
                times.calls += 1
                times.cpu_ns += time.thread_time_ns() - cpu_ns
                times.wall_ns += time.perf_counter_ns() - wall_ns

        return original(self, name, timed, *args, **options)

    FailOpen.wrap = wrap  # type: ignore[method-assign]
    try:
        yield found
    finally:
        FailOpen.wrap = original  # type: ignore[method-assign]


def on_training_threads(found: Times) -> dict[str, HookTimes]:
    """Return the sums by hook, without threads of zerowatch that still run."""
    own = own_threads()
    sums: dict[str, HookTimes] = defaultdict(HookTimes)
    for (thread_id, key), times in list(found.items()):
        if thread_id not in own:
            total = sums[key]
            total.calls += times.calls
            total.cpu_ns += times.cpu_ns
            total.wall_ns += times.wall_ns
    return dict(sums)


def per_step(
    before: dict[str, HookTimes], after: dict[str, HookTimes], num_steps: int
) -> dict[str, list[float]]:
    """Return calls, microseconds of CPU and of wall time for each step, the longest hook first."""
    none, rows = HookTimes(), {}
    for key, now in after.items():
        then = before.get(key, none)
        if now.calls > then.calls:
            rows[key] = [
                round((now.calls - then.calls) / num_steps, 2),
                round((now.cpu_ns - then.cpu_ns) / num_steps / 1e3, 1),
                round((now.wall_ns - then.wall_ns) / num_steps / 1e3, 1),
            ]
    return dict(sorted(rows.items(), key=lambda row: -row[1][2]))

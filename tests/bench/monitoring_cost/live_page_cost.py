"""Measures the live page with 10,000 steps: memory and frames of a browser, cost of the server."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bench.bench_options import Options
from bench.monitoring_cost.scrape_client import scrape
from bench.result_table import Row
from browser import Visit, open_browser
from live_runs import LiveRun
from recorded_runs import STARTED, step_record

from zerowatch.metrics.catalog.overhead import WATCH_SECONDS
from zerowatch.runtime.live_page.step_history import CAUSES, StepHistory

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Steps of more than a second, so that each is a point.
STEP_SECONDS = 1.1
QUIET_SECONDS = 10.0
GOAL_HEAP_MIB = 60
GOAL_UPDATE_MS = 50
GOAL_EVENT_MS = 5
GOAL_HISTORY_MIB = 8
_MIB = 2**20
# Collects the time between two frames until it is stopped.
_WATCH_FRAMES = """() => {
  const frames = window.frames_ms = [];
  let last = performance.now();
  const next = now => {
    frames.push(now - last);
    last = now;
    if (!window.stop_frames) requestAnimationFrame(next);
  };
  requestAnimationFrame(next);
}"""


def bench(options: Options) -> Iterator[Row]:
    """Yield memory and times while steps arrive at a page that is open all the time."""
    num_steps = 1000 if options.quick else 10_000
    yield _history(num_steps)
    run = LiveRun()
    try:
        with open_browser("--enable-precise-memory-info", "--js-flags=--expose-gc") as browser:
            visit = Visit(browser, viewport={"width": 1280, "height": 900})
            visit.page.goto(f"http://{run.address}/")
            visit.page.wait_for_selector(".card")
            yield from _steps_arrive(run, visit, browser, num_steps)
    finally:
        run.close()


def _history(num_steps: int) -> Row:
    tracemalloc.start()
    history = StepHistory(lambda: [0.0] * len(CAUSES))
    for step in range(1, num_steps + 1):
        history.add(_record(step))
    used = tracemalloc.get_traced_memory()[0] / _MIB
    tracemalloc.stop()
    return Row(
        what=f"history of {num_steps:,} steps in the process",
        measured=f"{used:.1f} MiB, {len(history.points()):,} points",
        goal=f"<= {GOAL_HISTORY_MIB} MiB",
        met=used <= GOAL_HISTORY_MIB,
    )


def _record(step: int) -> object:
    at = STARTED + STEP_SECONDS * step
    return step_record(step, seconds=STEP_SECONDS, ended_at_unix_seconds=at)


def _steps_arrive(run: LiveRun, visit: Visit, browser: Browser, num_steps: int) -> Iterator[Row]:
    page, heaps, scrapes, parts = visit.page, [], [], 20
    page.evaluate(_WATCH_FRAMES)
    for part in range(parts):
        for _ in range(num_steps // parts):
            run.add_steps(
                1, ended_at=STARTED + STEP_SECONDS * (run.steps + 1), seconds=STEP_SECONDS
            )
        page.wait_for_function(
            "steps => Number(document.querySelector('[data-key=\"training.steps\"]')"
            ".dataset.value) >= steps",
            arg=run.steps,
        )
        asked = time.monotonic()
        scrape(run.address)
        scrapes.append(time.monotonic() - asked)
        if part % 5 == 4:
            page.evaluate("gc()")
            heaps.append(page.evaluate("performance.memory.usedJSHeapSize") / _MIB)
    page.evaluate("window.stop_frames = true")
    frames = sorted(page.evaluate("frames_ms"))
    p99 = frames[int(0.99 * (len(frames) - 1))]
    update_ms, serve_ms = _costs_per_second(run, browser)
    yield Row(
        what=f"heap of the page, {num_steps:,} steps",
        measured=f"{heaps[-1]:.0f} MiB",
        spread="at each quarter " + ", ".join(f"{each:.0f}" for each in heaps),
        goal=f"<= {GOAL_HEAP_MIB} MiB",
        met=max(heaps) <= GOAL_HEAP_MIB,
    )
    yield Row(
        what="wall time between two frames, 500 steps a second",
        measured=f"99 % <= {p99:.0f} ms",
        spread=f"median {statistics.median(frames):.0f} ms, slowest {frames[-1]:.0f} ms",
    )
    yield Row(
        what="CPU time of an update in the page, all points shown",
        measured=f"{update_ms:.0f} ms",
        goal=f"<= {GOAL_UPDATE_MS} ms",
        met=update_ms <= GOAL_UPDATE_MS,
    )
    yield Row(
        what="CPU time of the HTTP thread for an event",
        measured=f"{serve_ms:.1f} ms",
        goal=f"<= {GOAL_EVENT_MS} ms",
        met=serve_ms <= GOAL_EVENT_MS,
    )
    yield Row(
        what="scrape beside the page",
        measured=f"slowest {1000 * max(scrapes):.0f} ms",
        spread=f"median {1000 * statistics.median(scrapes):.0f} ms",
    )


def _costs_per_second(run: LiveRun, browser: Browser) -> tuple[float, float]:
    """Return milliseconds of CPU time per second of the page and of the HTTP thread.

    There is a step and an event each second, and no scrape.
    """
    page, server, began = _page_seconds(browser), _http_seconds(run), time.monotonic()
    while time.monotonic() - began < QUIET_SECONDS:
        run.add_steps(1, ended_at=STARTED + STEP_SECONDS * (run.steps + 1), seconds=STEP_SECONDS)
        time.sleep(1.0)
    seconds = time.monotonic() - began
    spent = _page_seconds(browser) - page, _http_seconds(run) - server
    return 1000 * spent[0] / seconds, 1000 * spent[1] / seconds


def _page_seconds(browser: Browser) -> float:
    """Return the CPU time of the processes that run pages."""
    devtools = browser.new_browser_cdp_session()
    processes = devtools.send("SystemInfo.getProcessInfo")["processInfo"]
    devtools.detach()
    return sum(float(each["cpuTime"]) for each in processes if each["type"] == "renderer")


def _http_seconds(run: LiveRun) -> float:
    return run.recorder.snapshot().value(WATCH_SECONDS, "http_thread") or 0.0

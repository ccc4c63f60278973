"""Checks of a monitored engine; run as `engine_checks.py FOLDER`, or with a check's name behind it.

They need DeepSpeed in the process, which pytest's own process is kept free of. Each runs in a fork
of this one, made before anything was initialized, and leaves its output in FOLDER/NAME.txt and its
exit status in FOLDER/NAME.status.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from torch.distributed import distributed_c10d as c10d
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

sys.path.append(str(Path(__file__).parents[2]))

from fakes.host_accelerator import GIB, host_accelerator
from servers.free_port import free_port

import zerowatch
import zerowatch.runtime.monitor.build_watch
from zerowatch.metrics.catalog import communication, memory, overhead, training
from zerowatch.metrics.step_record import StepRecord
from zerowatch.runtime import entry_points
from zerowatch.runtime.collectives.collective_table import OPERATIONS
from zerowatch.runtime.common import accelerator, interrupts
from zerowatch.runtime.instrumentation import engine_hooks
from zerowatch.runtime.instrumentation.engine_hooks import ENGINE_METHODS
from zerowatch.runtime.monitor import memory_monitor, run_folder
from zerowatch.runtime.monitor.comparison_monitor import ComparisonMonitor
from zerowatch.runtime.monitor.subscriptions import Subscriptions
from zerowatch.runtime.monitor.watch_thread import WatchThread
from zerowatch.runtime.reports.metrics_reader import read_metrics

# DeepSpeed imports this with the first engine, and the compiler with it: once, before the forks.
importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

# By default a close gives threads five seconds, in which a busy machine may not run them at all.
for closing in (WatchThread.stop, Subscriptions.close):
    closing.__defaults__ = (120.0,)

# What the C++ runtime prints if a thread of torch's gloo outlives the interpreter.
ABORTED = "terminate called without an active exception"
QUIET = {"serve": {"enabled": False}, "run_log": {"enabled": False}}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


def make(stage: int = 2, watched: bool = True, **config: object):
    torch.manual_seed(0)
    model = Net()
    options = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "config": {
            "train_micro_batch_size_per_gpu": 2,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            **config,
        },
    }
    if watched:
        return zerowatch.initialize(settings=QUIET, **options)[0]
    return deepspeed.initialize(**options)[0]


def listen(engine) -> list[StepRecord]:
    records: list[StepRecord] = []
    engine.watch.subscribe(records.append)
    return records


def step(engine, batch: torch.Tensor | None = None) -> None:
    loss = engine(torch.ones(2, 8) if batch is None else batch)
    engine.backward(loss)
    engine.step()


def wrapped_places(engine) -> list[tuple[object, str]]:
    """Return every attribute that monitoring may replace, with its owner."""
    functions = [function for row in OPERATIONS for function in row.functions]
    in_torch = [function.name for function in functions if function.in_torch]
    in_backend = [function.name for function in functions if function.backend_parameters]
    backend = deepspeed.comm.comm.cdb
    return [
        *((owner, name) for name in in_torch for owner in (dist, c10d) if hasattr(owner, name)),
        *((backend, name) for name in in_backend if hasattr(backend, name)),
        *((engine, name) for name in ENGINE_METHODS),
        (dist.Work, "wait"),
        (_BaseDataLoaderIter, "__next__"),
        (DeepSpeedDataLoader, "__next__"),
    ]


def standing(places: list[tuple[object, str]]) -> list[object]:
    return [vars(owner).get(name, "absent") for owner, name in places]


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def own_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("zerowatch")]


def every_name_is_restored() -> None:
    engine = make(watched=False)
    places = wrapped_places(engine)
    before = standing(places)

    watch = zerowatch.watch(engine, QUIET)
    during = standing(places)
    watch.close()
    after = standing(places)

    unwrapped = [p for p, b, d in zip(places, before, during, strict=True) if b is d]
    assert not unwrapped, unwrapped
    left = [p for p, b, a in zip(places, before, after, strict=True) if b is not a]
    assert not left, left


def a_watch_can_be_opened_again() -> None:
    engine = make()
    engine.watch.close()
    step(engine)

    again = zerowatch.watch(engine, QUIET)
    records = listen(engine)
    step(engine)
    again.close()

    assert [record.step for record in records] == [2]
    assert again.snapshot().value(training.STEPS) == 1
    assert again.snapshot().value(communication.COMM_COVERAGE_RATIO) == 1.0


def a_wrapper_over_ours_stays_and_ours_becomes_inert() -> None:
    engine = make()
    ours = dist.all_reduce

    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    dist.all_reduce = theirs
    engine.watch.close()
    before = engine.watch.snapshot().total(communication.COLLECTIVE_CALLS)
    dist.all_reduce(torch.ones(1))

    assert dist.all_reduce is theirs
    assert engine.watch.snapshot().total(communication.COLLECTIVE_CALLS) == before


def a_backend_made_during_measurement_gets_its_functions_back() -> None:
    engine = make()  # zerowatch had replaced them when DeepSpeed captured torch's functions
    backend = deepspeed.comm.comm.cdb
    captured = backend.all_gather_function

    engine.watch.close()

    assert captured is not backend.all_gather_function
    assert backend.all_gather_function is dist.all_gather_into_tensor


def plain_backward_counts_micro_batches_and_time() -> None:
    engine = make()
    records = listen(engine)

    for _ in range(3):
        engine(torch.ones(2, 8)).backward()
        engine.step()
    engine.watch.close()

    assert [record.micro_batches for record in records] == [1, 1, 1]
    assert all(record.phase_seconds["backward"] > 0 for record in records)
    assert all(record.loss is not None for record in records)


def steps_only_at_boundaries_count_every_micro_batch() -> None:
    engine = make(gradient_accumulation_steps=2)
    records = listen(engine)

    for _ in range(2):  # as Accelerate does it
        for is_boundary in (False, True):
            engine.set_gradient_accumulation_boundary(is_boundary)
            engine.backward(engine(torch.ones(2, 8)))
        engine.step()
    engine.watch.close()

    assert [(record.step, record.micro_batches) for record in records] == [(1, 2), (2, 2)]
    assert [record.samples for record in records] == [4, 4]


def phases_add_up_to_wall_time() -> None:
    def clocks() -> tuple[float, float]:
        return time.perf_counter(), time.time()

    engine = make()
    records = listen(engine)
    step(engine)
    ends = []  # each step ends between a pair of readings, however long that takes
    for _ in range(6):
        time.sleep(0.02)
        before = clocks()
        step(engine)
        ends.append((before, clocks()))
    engine.watch.close()

    _, second, *rest = records
    (first_before, _), (first_after, _) = ends[0]
    (last_before, _), (last_after, _) = ends[-1]
    measured = sum(record.seconds for record in rest)
    least, most = last_before - first_after, last_after - first_before
    assert least - 1e-6 <= measured <= most + 1e-6, (least, measured, most)
    for record, ((_, before), (_, after)) in zip([second, *rest], ends, strict=True):
        assert before - 1e-6 <= record.ended_at_unix_seconds <= after + 1e-6
        assert abs(sum(record.phase_seconds.values()) - record.seconds) < 1e-9
        assert {"forward", "backward", "optimizer"} <= record.phase_seconds.keys()
    assert all(record.phase_seconds["other"] >= 0.02 for record in rest)


def loading_evaluation_and_checkpoints_are_phases_of_their_own() -> None:
    class Slow(TensorDataset):
        def __getitem__(self, index: int):
            time.sleep(0.01)
            return super().__getitem__(index)

    loading: list[float] = []  # the seconds of each request, the one that finds the end included

    def timed(loader: DataLoader):
        batches, end = iter(loader), object()
        while True:
            began = time.perf_counter()
            batch = next(batches, end)
            loading.append(time.perf_counter() - began)
            if batch is end:
                return
            yield batch

    engine = make()
    records = listen(engine)
    loader = DataLoader(Slow(torch.ones(6, 8)), batch_size=2)

    for (batch,) in timed(loader):
        step(engine, batch)
    engine.eval()
    for (batch,) in loader:
        engine(batch)
    engine.train()
    engine.save_checkpoint(os.environ["CHECKPOINTS"])
    step(engine)
    engine.watch.close()

    *trained, last = records
    *batches, the_end = loading
    for record, seconds in zip(trained, batches, strict=True):
        assert 0.02 <= record.phase_seconds["data"] <= seconds
    assert all("eval" not in record.phase_seconds for record in trained)
    assert last.phase_seconds["eval"] >= 0.06
    assert last.phase_seconds["checkpoint"] > 0
    assert last.phase_seconds.get("data", 0.0) <= the_end
    assert last.samples == 2
    assert last.training_seconds < last.seconds - 0.06


def two_engines_share_one_watch() -> None:
    first = make()
    second = make()
    records = listen(first)

    step(first)
    step(second)
    first.watch.close()

    assert second.watch is first.watch
    assert len(records) == 1
    assert first.watch.snapshot().value(communication.COMM_COVERAGE_RATIO) == 1.0
    assert "forward" not in vars(second)


def a_failing_hook_is_counted_and_dropped() -> None:
    engine = make()
    records = listen(engine)
    engine.watch._instrumentation._engine_hooks._counts = None  # every hook that counts will raise
    expected = make(watched=False)

    for _ in range(3):
        step(engine)
        step(expected)
    engine.watch.close()

    assert records == []
    failures = engine.watch.snapshot().values[overhead.HOOK_FAILURES]
    assert sum(failures.values()) >= 1, failures
    for ours, theirs in zip(engine.module.parameters(), expected.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def a_loss_that_cannot_be_read_loses_neither_its_micro_batch_nor_a_phase() -> None:
    read, results = engine_hooks.extract_loss, iter((None, torch.OutOfMemoryError("no memory")))

    def extract(output: object) -> object:
        error = next(results, None)
        if error is not None:
            raise error
        return read(output)

    engine_hooks.extract_loss = extract
    engine_hooks.host_value = lambda output: None  # as for a loss on a device
    engine = make()
    records = listen(engine)
    for _ in range(3):
        step(engine)
    engine.watch.close()

    assert [record.loss is None for record in records] == [False, True, False]
    assert [record.micro_batches for record in records] == [1, 1, 1]
    assert all(record.phase_seconds["backward"] > 0 for record in records)
    assert engine.watch.fail_open.failures == {"loss": 1}


def an_exception_in_training_passes_and_the_next_step_is_whole() -> None:
    engine = make()
    records = listen(engine)
    step(engine)

    try:
        engine(torch.ones(2, 7))
    except RuntimeError as error:
        caught = error
    step(engine)
    engine.watch.close()

    assert "zerowatch" not in str(caught)
    assert [(record.step, record.samples) for record in records] == [(1, 2), (2, 2)]
    assert set(records[1].phase_seconds) == {"forward", "backward", "optimizer", "other"}


def compiled_code_with_a_collective_keeps_one_graph() -> None:
    engine = make()

    def f(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x * 2

    compiled = torch.compile(f, fullgraph=True, backend="eager")

    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    engine.watch.close()
    torch._dynamo.reset()
    assert torch.equal(
        torch.compile(f, fullgraph=True, backend="eager")(torch.ones(3)), torch.full((3,), 2.0)
    )


def a_watched_engine_can_be_collected() -> None:
    engine = make(stage=1)
    step(engine)
    watch, gone, module_gone = engine.watch, weakref.ref(engine), weakref.ref(engine.module)
    watch.close()

    engine.destroy()
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    del engine
    gc.collect()

    assert gone() is None
    assert module_gone() is None


def a_backward_that_raised_is_no_micro_batch() -> None:
    engine = make()
    records = listen(engine)
    failing = engine(torch.ones(2, 8))
    failing.register_hook(lambda gradient: torch.ones(3))  # of the wrong shape

    try:
        engine.backward(failing)
    except RuntimeError:
        engine.zero_grad()
    else:
        raise AssertionError("the backward should have failed")
    engine.watch.close()

    assert engine.watch._instrumentation._engine_hooks._counts.micro_batches == 0
    assert records == []


def forwards_before_one_backward_all_count() -> None:
    engine = make()
    records = listen(engine)

    chosen, rejected = engine(torch.ones(2, 8)), engine(torch.zeros(2, 8))
    engine.backward(chosen - rejected)
    engine.step()
    engine.watch.close()

    assert [(record.micro_batches, record.samples) for record in records] == [(1, 4)]


def losses_that_the_caller_has_divided_add_up() -> None:
    engine = make(gradient_accumulation_steps=2)
    records = listen(engine)
    losses = []

    for _ in range(2):  # as Hugging Face's Trainer does it
        loss = engine(torch.ones(2, 8))
        losses.append(float(loss.detach()))
        engine.backward(loss / 2, scale_wrt_gas=False)
        engine.step()
    engine.watch.close()

    (record,) = records
    assert abs(record.loss - sum(losses) / 2) < 1e-6


def a_loaded_checkpoint_is_no_skipped_step() -> None:
    engine = make()
    records = listen(engine)
    step(engine)
    engine.skipped_steps = 3  # as in a checkpoint of an earlier run

    step(engine)
    engine.watch.close()

    assert [record.skipped for record in records] == [False, False]


def a_switched_off_watch_has_the_same_face() -> None:
    os.environ["ZEROWATCH_ENABLED"] = "false"

    engine = make()
    engine.watch.subscribe(print)
    step(engine)

    assert engine.watch.snapshot().values == {}
    assert engine.watch.address is None
    engine.watch.close()
    assert dist.all_reduce.__qualname__ == "all_reduce"


def a_watch_that_cannot_start_lets_training_be() -> None:
    def refuse(**_: object) -> None:
        raise PermissionError("no /proc here")

    zerowatch.runtime.monitor.build_watch.memory_probes = refuse
    engine = make()
    step(engine)

    wait_until(lambda: not own_threads())
    assert "forward" not in vars(engine)
    engine.watch.close()


def a_watch_whose_comparison_thread_cannot_start_leaves_no_thread() -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    ComparisonMonitor.start = refuse
    engine = make()
    step(engine)

    wait_until(lambda: not own_threads())
    assert "forward" not in vars(engine)
    engine.watch.close()


def twenty_watches_leave_no_descriptor() -> None:
    engine = make(watched=False)
    numbers = []
    for _ in range(21):
        watch = zerowatch.watch(engine, QUIET)
        step(engine)
        watch.close()
        numbers.append(len(os.listdir("/proc/self/fd")))

    # Any thread may have a file open just now.
    assert min(numbers[10:]) <= min(numbers[:10]), numbers


def a_listener_that_exits_is_dropped_and_all_steps_are_recorded() -> None:
    engine = make()
    engine.watch.subscribe(lambda _: sys.exit("the script's own exit"))
    records = listen(engine)
    for _ in range(5):
        step(engine)
    engine.watch.close()

    snapshot = engine.watch.snapshot()
    assert len(records) == 5
    assert snapshot.value(training.STEPS) == 5
    assert snapshot.value(overhead.HOOK_FAILURES, "listener") == 1
    assert snapshot.value(overhead.DEAD_THREADS) == 0


def calls_of_an_evaluation_are_published_before_the_next_step() -> None:
    engine, tensor = make(), torch.ones(8)
    step(engine)
    world = c10d._get_default_group()

    def published() -> float:
        return sum(
            calls
            for (_, group, _), calls in engine.watch.snapshot()
            .values.get(communication.COLLECTIVE_CALLS, {})
            .items()
            if group == "world"
        )

    wait_until(lambda: engine.watch.snapshot().value(training.STEPS) == 1)
    counted = world._get_sequence_number_for_group() - published()  # before monitoring, at most
    engine.eval()
    for _ in range(3):  # an evaluation that waits for the metrics thrice lasts several seconds
        for _ in range(5):
            with torch.no_grad():
                engine(torch.ones(2, 8))
            dist.all_reduce(tensor)
        issued = world._get_sequence_number_for_group() - counted
        wait_until(lambda issued=issued: published() == issued)
    assert engine.watch.snapshot().value(training.STEPS) == 1
    engine.train()
    step(engine)
    engine.watch.close()

    assert published() == world._get_sequence_number_for_group() - counted
    assert engine.watch.snapshot().value(communication.COMM_COVERAGE_RATIO) == 1.0


def checkpoints_are_counted() -> None:
    engine = make()
    step(engine)
    engine.save_checkpoint(os.environ["CHECKPOINTS"])
    engine.checkpoint_engine.save = lambda *args, **kwargs: 1 / 0
    try:
        engine.save_checkpoint(os.environ["CHECKPOINTS"], tag="fails")
    except ZeroDivisionError:
        failed = True
    engine.watch.close()

    snapshot = engine.watch.snapshot()
    assert failed
    assert snapshot.value(training.CHECKPOINTS, "saved") == 1
    assert snapshot.value(training.CHECKPOINTS, "failed") == 1
    assert snapshot.value(training.CHECKPOINT_SECONDS) > 0
    assert snapshot.value(training.LAST_CHECKPOINT_TIMESTAMP) <= time.time()


def an_end_by_an_exception_leaves_run_active_at_one() -> None:
    engine = make()
    step(engine)
    try:
        raise ValueError("bad sample")
    except ValueError:
        engine.watch.close()

    snapshot = engine.watch.snapshot()
    assert snapshot.value(training.RUN_ACTIVE) == 1
    assert snapshot.value(training.RUN_END_INFO, "exception") == 1


def a_good_end_and_the_start_of_the_run_are_published() -> None:
    engine = make()
    step(engine)
    wait_until(lambda: engine.watch.snapshot().value(training.RUN_ATTEMPT) == 0)
    wait_until(lambda: engine.watch.snapshot().value(training.STEP_DURATION_QUANTILE, "0.99"))
    engine.watch.close()

    snapshot = engine.watch.snapshot()
    assert snapshot.value(training.RUN_ACTIVE) == 0
    assert snapshot.value(training.RUN_END_INFO, "completed") == 1
    assert snapshot.value(training.WORLD_SIZE) == 1
    assert 0 < snapshot.value(training.RUN_START_TIMESTAMP) <= time.time()
    assert snapshot.value(training.PRODUCTIVE_SECONDS) > 0
    assert snapshot.value(communication.HANG_ACTIVE) == 0


def a_listener_that_blocks_stops_neither_the_metrics_nor_the_close() -> None:
    engine, release, last_update = make(), threading.Event(), overhead.WATCH_LAST_UPDATE_TIMESTAMP
    engine.watch.subscribe(lambda _: release.wait())
    step(engine)
    wait_until(lambda: engine.watch.snapshot().value(training.STEPS) == 1)
    for _ in range(4):
        step(engine)
    blocked_at = time.time()
    # The hang detector is checked on the same thread.
    wait_until(lambda: (engine.watch.snapshot().value(last_update) or 0) > blocked_at)
    wait_until(lambda: engine.watch.snapshot().value(training.STEPS) == 5)
    engine.watch._subscriptions.close(timeout_seconds=0.1)
    engine.watch.close()

    snapshot = engine.watch.snapshot()
    assert snapshot.value(training.STEPS) == 5
    assert snapshot.value(overhead.DROPPED_RECORDS, "listeners") == 4
    assert snapshot.value(overhead.DROPPED_RECORDS, "steps") == 0
    release.set()


def steps_that_a_blocked_disk_keeps_are_counted_at_close() -> None:
    engine, release, entered = make(), threading.Event(), threading.Event()
    watch_thread = engine.watch._thread
    watch_thread._analysis._append = lambda _: (entered.set(), release.wait())
    for _ in range(5):
        step(engine)
    assert entered.wait(120)
    watch_thread.stop(timeout_seconds=0.1)
    engine.watch.close()

    snapshot = engine.watch.snapshot()
    assert snapshot.value(overhead.DROPPED_RECORDS, "steps") >= 4
    release.set()


def files_that_no_disk_took_at_the_start_are_written_later() -> None:
    run_folder.RETRY_SECONDS = memory_monitor.RETRY_SECONDS = 0.2
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("zerowatch").addHandler(handler)
    runs = Path(tempfile.mkdtemp()) / "runs"
    runs.touch()  # no folder can be made here, as on a full disk
    settings = {"run_log": {"folder": runs}, "serve": {"port": free_port()}, "run_id": "night-7"}
    ds_config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = zerowatch.initialize(
        model=model,
        optimizer=optimizer,
        config={**ds_config, "zero_allow_untested_optimizer": True},
        settings=settings,
    )[0]
    step(engine)
    expected = {"settings.json", "ds_config.json", "targets.json", "rank-0.alive.json"}
    wait_until(lambda: all(any(name in line for line in lines) for name in expected))
    runs.unlink()

    wait_until(lambda: expected | {"run.lock"} <= {path.name for path in runs.glob("night-7/*")})
    engine.watch.close()


def a_watch_thread_that_is_interrupted_starts_over() -> None:
    engine = make()
    records = listen(engine)
    step(engine)
    wait_until(lambda: len(records) == 1)
    for name in ("zerowatch-watch", "zerowatch-cross-rank"):
        [thread] = [thread for thread in threading.enumerate() if thread.name == name]
        target = ctypes.c_ulong(thread.ident)
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(target, ctypes.py_object(SystemExit)) == 1
    failures = zerowatch.runtime.entry_points._process.fail_open.failures
    wait_until(lambda: failures.total() == 2)
    step(engine)
    wait_until(lambda: len(records) == 2)
    engine.watch.close()

    snapshot = engine.watch.snapshot()
    assert snapshot.value(training.STEPS) == 2
    assert snapshot.value(overhead.HOOK_FAILURES, "watch thread") == 1
    assert snapshot.value(overhead.HOOK_FAILURES, "cross-rank thread") == 1
    assert snapshot.value(overhead.DEAD_THREADS) == 0


def a_part_that_cannot_be_closed_keeps_no_other_open() -> None:
    def refuse() -> None:
        raise OSError(5, "Input/output error")

    engine = make(watched=False)
    before = standing(wrapped_places(engine))
    watch = zerowatch.watch(engine, QUIET)
    step(engine)
    watch._instrumentation.restore, restore = refuse, watch._instrumentation.restore
    watch._folder.close = watch._memory.close_hooks = refuse
    watch.close()
    restore()

    assert standing(wrapped_places(engine)) == before
    assert not own_threads()
    # Memory closes its hooks first.
    assert watch.snapshot().value(overhead.HOOK_FAILURES, "close") == 3
    assert watch.snapshot().value(training.RUN_ACTIVE) == 0

    watch._server.close = refuse
    watch.close(failed=True)  # closes only the server
    assert watch.fail_open.failures["close"] == 4


def a_second_ctrl_c_ends_the_wait_for_the_last_scrape_and_the_targets_are_withdrawn() -> None:
    def wait(**_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not interrupted")

    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts.PASSED_ON_SECONDS = 0.0
    folder = Path(os.environ["CHECKPOINTS"])
    engine = make(watched=False)
    watch = zerowatch.watch(engine, {"serve": {"port": 0}, "run_log": {"folder": str(folder)}})
    step(engine)
    wait_until(
        lambda: watch.run_folder is not None and (watch.run_folder / "targets.json").exists()
    )
    targets = watch.run_folder / "targets.json"
    before = targets.read_text()
    entry_points._process.watch._server.wait_for_final_scrape = wait
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        entry_points.close_watch(failed=True)

    assert watch.address in before
    assert targets.read_text() == "[]\n"
    assert watch.snapshot().value(training.RUN_ACTIVE) == 0
    assert not own_threads()


def the_last_record_of_the_metrics_has_the_end_of_the_run() -> None:
    folder = Path(os.environ["CHECKPOINTS"])
    engine = make(watched=False)
    watch = zerowatch.watch(
        engine, {"serve": {"enabled": False}, "run_log": {"folder": str(folder)}}
    )
    for _ in range(3):
        step(engine)
    watch.close()

    assert watch.run_folder is not None
    found = read_metrics(watch.run_folder)
    [rank] = found.ranks.values()
    assert found.problems == []
    assert rank.value(training.STEPS.name) == 3
    assert rank.value(training.RUN_ACTIVE.name) == 0
    assert rank.value(training.RUN_END_INFO.name, reason="completed") == 1
    last = watch.snapshot()
    for spec in (training.PHASE_SECONDS, memory.MEMORY_CATEGORY_BYTES, communication.COMM_SECONDS):
        for labels, value in last.values.get(spec, {}).items():
            by_name = dict(zip(spec.label_names, labels, strict=True))
            assert rank.value(spec.name, **by_name) == value
    [head] = rank.heads
    assert (head.run_id, head.instance) == (watch.run_id, None)


def what_cannot_be_called_is_no_listener() -> None:
    engine = make()
    try:
        engine.watch.subscribe("print")
    except TypeError as error:
        message = str(error)
    engine.watch.close()

    assert "Watch.subscribe" in message


def a_forked_child_lets_go_of_everything() -> None:
    settings = {"serve": {"port": 0}, "run_log": {"enabled": False}}
    engine = make(watched=False)
    watch = zerowatch.watch(engine, settings)
    port = int(watch.address.rpartition(":")[2])

    child = os.fork()
    if child == 0:
        held = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{fd}")
        ]
        sockets = {link.removeprefix("socket:[").rstrip("]") for link in held if "socket" in link}
        listening = {
            line.split()[9]
            for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]
            if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
        }
        inert = dist.all_reduce.__qualname__ == "all_reduce" and "forward" not in vars(engine)
        os._exit(0 if inert and not sockets & listening else 1)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    step(engine)
    watch.close()
    assert watch.snapshot().value(training.STEPS) == 1


def only_collectives_that_all_ranks_issue_in_one_order_are_numbered() -> None:
    engine = make()
    (rank_set,) = engine.watch._collectives.call_recorder.groups.rank_sets()
    numbers = [rank_set.issued]

    dist.all_reduce(torch.ones(1))
    numbers.append(rank_set.issued)
    aside = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),))
    aside.start()
    aside.join()
    numbers.append(rank_set.issued)
    try:
        dist.all_reduce("no tensor")
    except TypeError:
        numbers.append(rank_set.issued)
    step(engine)  # autograd's thread issues some of its collectives
    engine.watch.close()

    first = numbers[0]
    assert numbers == [first, first + 1, first + 1, first + 1]
    assert rank_set.issued > first + 1
    assert engine.watch.snapshot().value(communication.COMM_COVERAGE_RATIO) == 1.0


def profiled_steps_report_their_phases() -> None:
    engine = make(watched=False)
    watch = zerowatch.watch(engine, {**QUIET, "profile": {"every_steps": 2}})

    for _ in range(6):
        step(engine)
    watch.close()

    shares = watch.snapshot().values[communication.STEP_TIME_RATIO]
    assert abs(sum(shares.values()) - 1) < 1e-6, shares
    assert watch.snapshot().value(communication.COMM_EXPOSED_ERROR_RATIO) is not None
    assert not torch.autograd._profiler_enabled()


def the_thresholds_of_the_settings_are_exported() -> None:
    engine = make(watched=False)
    settings = {**QUIET, "alerts": {"thresholds": {"exposed_comm_ratio_high": 0.35}}}

    watch = zerowatch.watch(engine, settings)
    snapshot = watch.snapshot()
    watch.close()

    assert snapshot.values[training.ALERT_THRESHOLD] == {("exposed_comm_ratio_high",): 0.35}


def deepspeeds_comms_logger_is_warned_of_and_left_on() -> None:
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("zerowatch").addHandler(handler)

    engine = make(comms_logger={"enabled": True, "verbose": False, "prof_all": True})
    engine.watch.close()

    assert [line for line in warned if "comms_logger" in line]
    assert deepspeed.comm.comm.comms_logger.enabled


def a_loader_with_forked_workers_works_while_watched() -> None:
    engine = make()
    records = listen(engine)

    for (batch,) in DataLoader(TensorDataset(torch.ones(8, 8)), batch_size=2, num_workers=2):
        step(engine, batch)
    engine.watch.close()

    assert len(records) == 4
    assert all(record.phase_seconds["data"] > 0 for record in records)


def another_kind_of_accelerator_needs_nothing_but_its_class() -> None:
    accelerator.current = host_accelerator()
    engine = make()
    records = listen(engine)

    for (batch,) in DataLoader(TensorDataset(torch.ones(16, 8)), batch_size=2):
        step(engine, batch)
        dist.all_reduce(torch.ones(4))
    # What the device has not passed when the watch is closed has times of the host.
    wait_until(lambda: len(records) == 8)
    engine.watch.close()
    values = engine.watch.snapshot().values

    for record in records:  # by its events, which are a millisecond apart
        milliseconds = [1000 * seconds for seconds in record.phase_seconds.values()]
        assert all(abs(each - round(each)) < 1e-6 for each in milliseconds), milliseconds
        assert set(record.phase_seconds) >= {"forward", "backward", "optimizer"}, record
        assert abs(sum(milliseconds) - 1000 * record.seconds) < 1e-6
        # Timed by the host: the tensors are in its memory.
        assert record.collectives["all_reduce"].calls >= 1
        assert record.collectives["all_reduce"].seconds is not None
    assert records[-1].phase_seconds["data"] > 0
    assert values[memory.MEMORY_BYTES]["cpu:0", "allocated"] == GIB
    assert values[memory.MEMORY_LIMIT][("cpu:0",)] == 8 * GIB
    assert values[memory.MEMORY_PEAK]["cpu:0", "allocated"] > 2 * GIB  # of the whole run
    in_phases = values.get(memory.MEMORY_PHASE_PEAK, {}).items()
    assert {size for (device, _), size in in_phases if device == "cpu:0"} <= {GIB}
    assert not [each for each in values.get(overhead.HOOK_FAILURES, {}).values() if each]


CHECKS = [
    value
    for value in list(globals().values())
    if callable(value)
    and getattr(value, "__module__", None) == "__main__"
    and value not in (Net, make, listen, step, wrapped_places, standing, wait_until, own_threads)
]


def run_to_its_end(check: Callable[[], None]) -> NoReturn:
    """Run a check, and end this process as the interpreter does, but without freeing all modules.

    Freeing them copies the memory that the fork shares, which takes most of a check.
    """
    status = 0
    try:
        check()
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def run_in_fork(check: Callable[[], None], folder: Path) -> None:
    """Run a check in a child; once more if torch aborts at exit, as `launching.start` does."""
    output = folder / f"{check.__name__}.txt"
    for may_abort in (True, False):
        child = os.fork()
        if child == 0:
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            own = Path(tempfile.mkdtemp(prefix=check.__name__, dir=folder))
            os.environ.update(CHECKPOINTS=str(own), MASTER_PORT=str(free_port()))
            run_to_its_end(check)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not (may_abort and status == -signal.SIGABRT and ABORTED in output.read_text()):
            break
    folder.joinpath(f"{check.__name__}.status").write_text(str(status))


if __name__ == "__main__":
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    for chosen in CHECKS:
        if chosen.__name__ in (sys.argv[2:] or [chosen.__name__]):
            run_in_fork(chosen, Path(sys.argv[1]))

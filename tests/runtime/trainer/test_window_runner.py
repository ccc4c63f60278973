"""Tests of windows on one rank: the result, the order of the steps, and the state after errors."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.rank_threads import FakeHostGroup, on_ranks

from zerowatch.errors import BatchError, NonFiniteLossError, ZerowatchError
from zerowatch.runtime.common import accelerator
from zerowatch.runtime.trainer import window_runner
from zerowatch.runtime.trainer.oom_recovery import replay as replay_module
from zerowatch.runtime.trainer.run_end import RunEnd
from zerowatch.runtime.trainer.window.step_result import StepResult
from zerowatch.runtime.trainer.window.window_agreement import TunerStatus
from zerowatch.runtime.trainer.window_runner import WindowRunner

pytestmark = pytest.mark.usefixtures("frozen_imports")  # each replay collects garbage

OUT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes."


class Engine:
    """Engine that logs its passes and the loss scale of its updates."""

    device = torch.device("cpu")

    def __init__(self, log: list[Any]) -> None:
        self._log = log
        self.module = torch.nn.Dropout()
        self.optimizer = SimpleNamespace(
            loss_scale=1.0, external_loss_scale=None, custom_loss_scaler=False
        )
        self.listeners: list[Callable[[Any], None]] = []
        self.restarts: list[int] = []
        self.uses: list[object] = []
        self.watch = SimpleNamespace(
            subscribe_internal=self.listeners.append,
            memory_limit_bytes=lambda device: None,
            restart_forecasts=self._on_restart,
        )
        self.global_steps = 0
        self.global_samples = self.skipped_steps = 0
        self.is_fp16 = self.is_dynamic = self.overflows = False
        self.error: Exception | None = None

    def _on_restart(self, *, after_step: int, use: object) -> None:
        self.restarts.append(after_step)
        self.uses.append(use)

    def eval(self) -> None:
        self.module.eval()

    def fp16_enabled(self) -> bool:
        return self.is_fp16

    def dynamic_loss_scale(self) -> bool:
        return self.is_dynamic

    def backward(self, loss: torch.Tensor, *, scale_wrt_gas: bool) -> None:
        self._log.append("backward")

    def step(self) -> None:
        if self.error is not None:
            raise self.error
        self.skipped_steps += self.overflows
        self.global_steps += 1
        self._log.append(("step", self.optimizer.external_loss_scale))


class Holder:
    """Engine holder that logs its calls."""

    compressor = None
    num_changes = 0

    def __init__(self, engine: Engine, log: list[Any]) -> None:
        self.engine, self._log = engine, log
        self.chosen: list[Any] = []

    def memory_savings(self, chosen: Any) -> list[Any]:
        self.chosen.append(chosen)
        return []

    def begin_window(self, unit: float) -> None:
        self._log.append(("begin", unit))

    def reload_optimizer_states(self) -> None:
        self._log.append("reload")

    def commit_window(self, *, skipped: bool) -> None:
        self._log.append(("commit", skipped))

    def abort_window(self) -> None:
        self._log.append("abort")


class Run:
    """Window runner on one rank, whose loss is the mean of its micro-batch."""

    def __init__(self, *, activation_checkpointing: Any = False, weight: float = 1.0) -> None:
        self.log: list[Any] = []
        self.weight = weight
        self.error: Exception | None = None
        self.fails_above = math.inf
        self.engine = Engine(self.log)
        self.holder: Any = Holder(self.engine, self.log)
        metrics: Any = SimpleNamespace(
            count_oom=lambda error: self.log.append("count oom"),
            count_failed_window=lambda: self.log.append("count failed window"),
            publish_window=lambda result, **values: self.published.append((result, values)),
        )
        self.published: list[tuple[StepResult, dict[str, Any]]] = []

        def make(host_group: FakeHostGroup) -> WindowRunner:
            self.run_end = RunEnd(host_group)
            return WindowRunner(
                self.loss,
                self.holder,
                host_group,  # type: ignore[arg-type]
                metrics,
                self.run_end,
                micro_batch_samples=2,
                activation_checkpointing=activation_checkpointing,
            )

        (self.runner,) = on_ranks(1, make)

    def loss(self, engine: Any, micro_batch: torch.Tensor) -> Any:
        random.random()
        if self.error is not None:
            raise self.error
        if len(micro_batch) > self.fails_above:
            raise RuntimeError(OUT)
        mean = micro_batch.mean() * torch.ones((), requires_grad=True)
        return mean, self.weight * len(micro_batch)


BATCH = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]])


@pytest.fixture(autouse=True)
def discarded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the engines whose passes were discarded."""
    engines: list[Any] = []
    for module in (window_runner, replay_module):
        monkeypatch.setattr(module, "abort_window", engines.append)
        monkeypatch.setattr(module, "abort_unsupported_reason", lambda engine: None)
    return engines


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """Let each reading of the clock be 1.5 s later than the one before."""
    times = itertools.count(100.0, 1.5)
    monkeypatch.setattr(window_runner, "perf_counter", times.__next__)
    monkeypatch.setattr(replay_module, "perf_counter", itertools.count(0.0, 7.0).__next__)
    return times


def test_a_window_makes_one_update_and_counts_its_samples() -> None:
    run = Run()

    result = run.runner.train(BATCH)

    assert result == StepResult(
        step=1,
        loss=31 / 5,
        samples=5,
        weight=5.0,
        micro_batches=(2, 2, 1),
        replays=0,
        skipped=False,
        seconds=4.5,
    )
    assert run.log == [("begin", 1.0), *["backward"] * 3, "reload", ("step", None), ("commit", 0)]
    assert run.published == [
        (result, {"own_samples": 5, "accumulation_steps": 3, "lost_seconds": 0, "device": "cpu"})
    ]
    assert (run.runner.steps, run.runner.samples, run.engine.global_samples) == (1, 5, 5)
    assert (run.runner.passes_seconds, run.runner.exponent) == (1.5, 0)


def test_steps_and_samples_add_up_over_windows_of_any_size() -> None:
    run = Run()

    results = [run.runner.train(BATCH[:size]) for size in (5, 3)]

    assert [result.step for result in results] == [1, 2]
    assert (run.runner.steps, run.runner.samples, run.engine.global_samples) == (2, 8, 8)


def test_an_update_is_corrected_by_the_weight_that_was_not_known_before() -> None:
    """A sample weighs 8: the first update divides by 8, the second window knows the weight."""
    run = Run(weight=8.0)

    results = [run.runner.train(BATCH) for _ in range(2)]

    assert [result.weight for result in results] == [40.0, 40.0]
    assert [result.loss for result in results] == [31 / 5] * 2
    assert [entry for entry in run.log if isinstance(entry, tuple)] == [
        ("begin", 1.0),
        ("step", 8.0),
        ("commit", False),
        ("begin", 0.125),
        ("step", None),
        ("commit", False),
    ]
    assert run.runner.exponent == 3


def test_an_update_that_the_engine_skips_counts_as_a_step() -> None:
    run = Run()
    run.engine.overflows = True

    result = run.runner.train(BATCH)

    assert (result.skipped, result.step, run.runner.steps) == (True, 1, 1)
    assert run.log[-1] == ("commit", True)


def test_a_window_that_ran_out_of_memory_is_replayed_in_smaller_micro_batches(
    discarded: list[Any],
) -> None:
    run = Run()
    run.fails_above = 1

    result = run.runner.train(BATCH)

    assert (result.micro_batches, result.replays) == ((1,) * 5, 1)
    assert result.loss == 31 / 5
    assert run.published[0][1]["lost_seconds"] == 7.0
    assert run.published[0][1]["accumulation_steps"] == 5
    assert run.log == [
        ("begin", 1.0),
        "count oom",
        "abort",
        *["backward"] * 5,
        "reload",
        ("step", None),
        ("commit", False),
    ]
    assert discarded == [run.engine]


def test_a_window_of_which_no_sample_fits_is_recorded_with_its_size_and_length() -> None:
    run, fatal = Run(), []
    run.runner.on_fatal_oom.append(lambda *args: fatal.append(args))
    run.fails_above = 0

    with pytest.raises(RuntimeError, match="allocate memory"):
        run.runner.train(torch.zeros(5, 13))

    assert fatal == [(13, 1)]
    assert run.log[-2:] == ["abort", "count failed window"]
    assert (run.runner.steps, run.published) == (0, [])


def test_a_window_whose_loss_raises_leaves_the_state_before_it(
    discarded: list[Any], seed: int
) -> None:
    run, error = Run(), KeyError("labels")
    run.error = error
    random.seed(seed)

    with pytest.raises(KeyError) as raised:
        run.runner.train(BATCH)

    assert raised.value is error
    drawn = random.random()
    random.seed(seed)
    assert drawn == random.random()
    assert run.log == [("begin", 1.0), "abort"]
    assert discarded == [run.engine]
    assert (run.runner.steps, run.runner.samples, run.published) == (0, 0, [])


def test_nothing_is_restored_after_a_kernel_has_failed(
    monkeypatch: pytest.MonkeyPatch, discarded: list[Any]
) -> None:
    run = Run()
    run.error = KeyError("labels")
    monkeypatch.setattr(accelerator, "has_failed", lambda: True)

    with pytest.raises(KeyError):
        run.runner.train(BATCH)

    assert run.log == [("begin", 1.0)]
    assert discarded == []


def test_an_update_that_runs_out_of_memory_is_recorded_and_not_repeated() -> None:
    run, fatal = Run(), []
    run.runner.on_fatal_oom.append(lambda *args: fatal.append(args))
    run.engine.error = RuntimeError(OUT)

    with pytest.raises(RuntimeError, match="allocate memory"):
        run.runner.train(BATCH)

    assert fatal == [(1, 2)]
    assert run.log[-1] == "count failed window"
    assert run.runner.steps == 0


def test_an_update_that_fails_otherwise_is_not_counted_as_out_of_memory() -> None:
    run = Run()
    run.engine.error = RuntimeError("a wrong shape")

    with pytest.raises(RuntimeError, match="a wrong shape"):
        run.runner.train(BATCH)

    assert "count failed window" not in run.log


@pytest.mark.parametrize(
    ("is_fp16", "is_dynamic", "is_raised"),
    [(False, False, True), (False, True, True), (True, False, True), (True, True, False)],
)
def test_a_loss_that_is_not_finite_raises_unless_the_engine_skips_such_updates(
    is_fp16: bool, is_dynamic: bool, is_raised: bool
) -> None:
    run = Run()
    run.runner.train(BATCH)
    run.engine.is_fp16, run.engine.is_dynamic = is_fp16, is_dynamic
    batch = torch.full((2, 1), math.inf)

    if is_raised:
        with pytest.raises(NonFiniteLossError, match="the loss of step 2 is inf"):
            run.runner.train(batch)
    else:
        assert run.runner.train(batch).loss == math.inf
    assert run.runner.steps == (1 if is_raised else 2)


def test_a_batch_that_cannot_be_used_opens_no_window() -> None:
    run = Run()
    run.runner.train(BATCH)
    assert run.runner.opened is not None

    with pytest.raises(BatchError):
        run.runner.train({"text": "words"})

    assert run.runner.opened is None
    assert run.log.count("abort") == 0


def test_each_window_has_the_status_of_the_tuner_and_the_requested_size() -> None:
    run = Run()
    status = TunerStatus(exchanges_switch_request=True, oom_risk=0.25, is_on_trial=False)
    run.runner.tuner_status_source = lambda: status
    run.runner.micro_batch_samples = 3

    result = run.runner.train(BATCH)

    assert result.micro_batches == (3, 2)
    assert run.runner.opened is not None
    assert run.runner.opened.tuner_statuses == [status]
    assert run.runner.opened.local_batches.micro_batch_samples == [3]
    assert not run.runner.opened.guard_requested


def record_of(step: int, memory_bytes: Mapping[str, Mapping[str, float]]) -> Any:
    return SimpleNamespace(
        step=step,
        memory_bytes=memory_bytes,
        micro_batch_shapes=[(2, 1)],
        peak_bytes_since_change={},
    )


def test_a_rank_whose_memory_is_low_requests_the_guard() -> None:
    run = Run()
    states = {"cpu": {"peak_allocated": 99.0, "limit": 100.0}}
    (listener,) = run.engine.listeners
    listener(record_of(1, states))

    run.runner.train(BATCH)

    assert run.runner.opened is not None
    assert run.runner.opened.guard_requested


@pytest.mark.parametrize(
    ("given", "chosen"), [(True, None), (False, None), ("blocks.*", "blocks.*")]
)
def test_activations_of_the_given_modules_are_a_memory_saving(given: Any, chosen: Any) -> None:
    run = Run(activation_checkpointing=given)

    assert run.runner.activation_checkpointing == chosen
    assert run.holder.chosen == [chosen]


def test_an_evaluation_returns_the_weighted_mean_and_changes_nothing(
    discarded: list[Any],
) -> None:
    run = Run(weight=3.0)
    sizes: list[int] = []
    loss = run.loss

    def recorded(engine: Any, micro_batch: torch.Tensor) -> Any:
        sizes.append(len(micro_batch))
        return loss(engine, micro_batch)

    run.runner._loss = recorded

    assert run.runner.evaluate(BATCH) == 31 / 5
    assert sizes == [2, 2, 1]
    assert (run.runner.steps, run.log, discarded) == (0, [], [])


def test_an_evaluation_that_fails_discards_its_passes_and_random_numbers(
    discarded: list[Any], seed: int
) -> None:
    run = Run()
    run.error = KeyError("labels")
    random.seed(seed)

    with pytest.raises(KeyError):
        run.runner.evaluate(BATCH)

    drawn = random.random()
    random.seed(seed)
    assert drawn == random.random()
    assert discarded == [run.engine]


def test_passes_of_a_run_that_has_ended_are_not_discarded(discarded: list[Any]) -> None:
    run = Run()
    with pytest.raises(KeyboardInterrupt), run.run_end.updating("engine.step()"):
        raise KeyboardInterrupt
    run.error = KeyError("labels")

    with pytest.raises(KeyError):
        run.runner.train(BATCH)

    assert discarded == []


def test_an_interrupted_update_ends_the_run() -> None:
    run = Run()
    run.engine.step = lambda: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]

    with pytest.raises(KeyboardInterrupt):
        run.runner.train(BATCH)

    assert run.run_end.has_ended


@pytest.mark.parametrize("windows", [0, 4])  # guarded, and not guarded
@pytest.mark.parametrize("error", [ValueError("a bad gradient"), RuntimeError(OUT)])
def test_an_update_that_fails_ends_the_run_and_no_later_batch_is_trained_on(
    discarded: list[Any], windows: int, error: Exception
) -> None:
    run = Run()
    for _ in range(windows):
        train(run)
    run.engine.error = error

    with pytest.raises(type(error)) as raised:
        train(run)

    assert raised.value is error
    assert run.runner._guard.armed == (windows == 0)
    run.engine.error = None
    passes = len(run.log)
    for _ in range(2):
        with pytest.raises(ZerowatchError, match="load the last checkpoint") as later:
            train(run)
        assert type(error).__name__ in str(later.value)
    assert len(run.log) == passes
    assert discarded == []
    assert run.runner.steps == windows


def test_an_error_after_the_weights_were_updated_ends_the_run() -> None:
    run = Run()
    run.holder.commit_window = lambda **_: (_ for _ in ()).throw(KeyError("kind"))

    with pytest.raises(KeyError):
        train(run)

    with pytest.raises(ZerowatchError, match="updated in part"):
        train(run)


@pytest.fixture
def keeps_gradients(monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the engine one whose windows cannot be discarded; return the reason."""
    reason = "Muon keeps state of its own between micro-batches"
    for module in (window_runner, replay_module):
        monkeypatch.setattr(module, "abort_unsupported_reason", lambda engine: reason)
    return reason


def train(run: Run, batch: Any = BATCH) -> StepResult:
    with run.run_end.call():
        return run.runner.train(batch)


@pytest.mark.parametrize(
    ("values", "error", "raised"),
    [
        ({"error": KeyError("labels")}, KeyError, "KeyError"),
        ({"error": KeyboardInterrupt()}, KeyboardInterrupt, "KeyboardInterrupt"),
        ({"weight": math.nan}, NonFiniteLossError, "NonFiniteLossError"),
        ({"weight": 0.0}, BatchError, "BatchError"),
        ({"fails_above": 1}, RuntimeError, "RuntimeError"),
    ],
)
def test_an_error_in_a_window_that_cannot_be_discarded_ends_the_run(
    discarded: list[Any],
    keeps_gradients: str,
    caplog: pytest.LogCaptureFixture,
    values: dict[str, Any],
    error: type[BaseException],
    raised: str,
) -> None:
    run = Run()
    train(run)
    vars(run).update(values)

    with pytest.raises(error):
        train(run)

    vars(run).update(error=None, weight=1.0, fails_above=math.inf)
    for _ in range(2):
        with pytest.raises(ZerowatchError) as later:
            train(run)
        for part in (raised, keeps_gradients, "load the last checkpoint"):
            assert part in str(later.value)
    assert str(later.value) in caplog.text
    assert discarded == []
    assert run.runner.steps == 1


@pytest.mark.parametrize("goes_on", [True, False])
def test_the_next_batch_is_advised_only_where_the_run_goes_on(
    request: pytest.FixtureRequest, goes_on: bool
) -> None:
    if not goes_on:
        request.getfixturevalue("keeps_gradients")
    run = Run()

    with pytest.raises(NonFiniteLossError) as raised:
        train(run, torch.full((2, 1), math.inf))

    assert ("train_batch with the next batch" in str(raised.value)) == goes_on


@pytest.mark.usefixtures("keeps_gradients")
def test_a_batch_of_which_no_pass_has_run_never_ends_the_run() -> None:
    run = Run()

    with pytest.raises(BatchError):
        train(run, {"text": "words"})

    assert train(run).step == 1


@pytest.mark.usefixtures("keeps_gradients")
def test_an_evaluation_that_fails_has_no_gradients_and_never_ends_the_run() -> None:
    run = Run()
    run.error = KeyError("labels")

    with pytest.raises(KeyError), run.run_end.call():
        run.runner.evaluate(BATCH)

    run.error = None
    assert train(run).step == 1


def test_a_change_of_memory_use_restarts_the_forecast_after_the_last_step_before_it() -> None:
    run = Run()
    for _ in range(2):
        train(run)
    assert run.engine.restarts == [0]

    run.runner.micro_batch_samples = 1  # by the script or by the tuner
    for _ in range(2):
        train(run)
    assert run.engine.restarts == [0, 2]

    run.runner.replay.planner.invalidate()  # another memory saving
    for _ in range(2):
        train(run)
    assert run.engine.restarts == [0, 2, 4]


def test_a_change_back_restores_the_use_of_memory() -> None:
    run = Run()
    for size in (2, 1, 2, 1):
        run.runner.micro_batch_samples = size
        for _ in range(4):
            train(run)
    first, smaller, larger, last = run.engine.uses
    assert last == smaller != larger == first

    run.fails_above = 1
    run.runner.micro_batch_samples = 2
    train(run)
    run.runner.micro_batch_samples = 1
    train(run)
    assert len(set(run.engine.uses)) == 4, "after a replay, the uses before do not come again"


def test_a_script_that_chooses_each_micro_batch_keeps_its_forecast() -> None:
    run = Run()
    for step in range(40):
        run.runner.micro_batch_samples = 1 + step % 2
        train(run)

    assert len(run.engine.restarts) < 12

    run.runner.replay.planner.invalidate()  # another memory saving
    train(run)
    assert run.engine.restarts[-1] == 40


def test_a_replay_restarts_the_forecast_after_its_step() -> None:
    run = Run()
    train(run)
    run.fails_above = 1

    result = train(run)

    assert (result.replays, run.engine.restarts) == (1, [0, 2])
    train(run)
    assert run.engine.restarts == [0, 2]


def test_a_failed_window_leaves_the_configurations_of_the_steps_before() -> None:
    """Their peaks may not have been recorded yet."""
    run = Run()
    planner = run.runner.replay.planner
    train(run)
    planner.configuration = 3
    run.error = KeyError("labels")
    with pytest.raises(KeyError):
        train(run)
    run.error, planner.configuration = None, 5
    train(run)

    for step in (1, 2):
        run.engine.listeners[0](record_of(step, {"cpu": {"peak_allocated": 1.0}}))

    peaks = run.runner.peak_history.measured().peaks
    assert [each.configuration for each in peaks] == [0, 5]


def test_peaks_have_the_configuration_of_their_step() -> None:
    run = Run()
    planner = run.runner.replay.planner
    for configuration in (0, 0, 3, 0):
        planner.configuration = configuration
        train(run)

    for step in range(1, 5):
        run.engine.listeners[0](record_of(step, {"cpu": {"peak_allocated": 1.0}}))

    peaks = run.runner.peak_history.measured().peaks
    assert [each.configuration for each in peaks] == [0, 0, 3, 0]

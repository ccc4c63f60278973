"""Knobs of the data: what they read and set, and what they refuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zerowatch.errors import BatchError, ZerowatchError
from zerowatch.runtime.tuner.knobs.data_knobs import (
    EngineMicroBatchKnob,
    GlobalBatchKnob,
    LoadBalanceKnob,
    MicroBatchKnob,
    data_knobs,
    largest_local_batch,
)
from zerowatch.runtime.tuner.policy.ab_comparison import MAX_UNUSABLE, AbComparison, design_trial


def windows(*samples: int, micro_batch: int = 4) -> Any:
    """A window runner whose last window gave the ranks so many samples."""
    batches = SimpleNamespace(samples=list(samples), micro_batch_samples=[micro_batch])
    opened = SimpleNamespace(local_batches=batches) if samples else None
    return SimpleNamespace(micro_batch_samples=micro_batch, opened=opened)


def data(**values: Any) -> Any:
    training_data = SimpleNamespace(
        balances=False,
        batch_samples=16,
        batch_sizes=lambda: (16, 32, 64),
        unsupported_balance_reason=lambda: "equal ranks",
        unsupported_resize_reason=lambda: "own loader",
        batches_ahead=0,
    )
    vars(training_data).update(values)
    return training_data


def test_the_largest_local_batch_is_that_of_the_last_window() -> None:
    assert largest_local_batch(windows(5, 11, 7)) == 11
    assert largest_local_batch(windows()) == 0


def test_a_micro_batch_is_set_and_undone() -> None:
    runner = windows(5, 11, 7)
    knob = MicroBatchKnob(runner)

    undo = knob.set(6)
    during = knob.get()
    undo()

    assert (during, knob.get()) == (6, 4)
    assert knob.options() == (1, 2, 3, 4, 6, 11)
    assert knob.set(1) is not None


@pytest.mark.parametrize("value", [0, -3, True, 2.0, None, "4"])
def test_a_micro_batch_has_a_sample_or_more(value: Any) -> None:
    runner = windows(8)

    with pytest.raises(BatchError, match=f"1 sample or more, got {value!r}"):
        MicroBatchKnob(runner).set(value)

    assert runner.micro_batch_samples == 4


def test_a_script_s_micro_batch_splits_the_accumulated_samples_evenly() -> None:
    engine = SimpleNamespace(
        train_micro_batch_size_per_gpu=lambda: 6, gradient_accumulation_steps=lambda: 3
    )
    knob = EngineMicroBatchKnob(SimpleNamespace(engine=engine, config={}))

    # 18 samples in 1, 2, 4, 8, 16 and 32 parts have 18, 9, 5, 3, 2 and 1 of them.
    assert (knob.get(), knob.options()) == (6, [1, 2, 3, 6, 9, 18])


def test_the_balance_of_the_load_is_switched_and_undone() -> None:
    training_data = data()
    knob = LoadBalanceKnob(training_data)

    undo = knob.set(True)
    during = knob.get()
    undo()

    assert (during, knob.get(), knob.unsupported_reason()) == (True, False, "equal ranks")


def test_the_global_batch_is_one_of_the_sizes_of_the_data() -> None:
    training_data = data()
    knob = GlobalBatchKnob(training_data)

    undo = knob.set(64)
    during = knob.get()
    undo()

    assert (during, knob.get(), knob.unsupported_reason()) == (64, 16, "own loader")
    for value in (48, "32", None):
        with pytest.raises(ZerowatchError, match=r"is one of \[16, 32, 64\], got"):
            knob.set(value)
    assert knob.get() == 16


@pytest.mark.parametrize("ahead", [MAX_UNUSABLE - 2, MAX_UNUSABLE - 1])
@pytest.mark.parametrize("knob", [LoadBalanceKnob, GlobalBatchKnob])
def test_batches_are_not_changed_if_a_trial_would_stall_before_the_first_changed_batch(
    knob: type[LoadBalanceKnob | GlobalBatchKnob], ahead: int
) -> None:
    trial = AbComparison(design_trial(0.3, number=1, apply_mode="live", settle_steps=2))
    for _ in range(ahead + 1):
        trial.add(None)
    reasons = {
        "unsupported_balance_reason": lambda: None,
        "unsupported_resize_reason": lambda: None,
    }

    reason = knob(data(batches_ahead=ahead, **reasons)).unsupported_reason()

    assert (reason is not None) == trial.is_stalled
    assert reason is None or f"load {ahead} batches ahead" in reason


@pytest.mark.parametrize(
    ("training_data", "names"),
    [
        (None, ["micro_batch_samples"]),
        (data(), ["micro_batch_samples", "balance", "batch_samples"]),
    ],
)
def test_without_data_of_its_own_a_run_has_the_micro_batch_only(
    training_data: Any, names: list[str]
) -> None:
    assert [knob.name for knob in data_knobs(windows(), training_data)] == names

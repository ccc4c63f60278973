"""Tests of `FrameworkHooks`, with the classes of transformers and Accelerate and a fake clock."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from accelerate.accelerator import Accelerator
from fakes.clock import FakeClock
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.trainer import Trainer

import zerowatch
from zerowatch.metrics.catalog.labels import PHASES
from zerowatch.metrics.step_record import StepRecord
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.phase_timer import EVAL, PhaseTimer
from zerowatch.runtime.instrumentation.framework_hooks import FrameworkHooks

SECONDS = 2.0
QUIET = {"serve": {"enabled": False}, "run_log": {"enabled": False}, "tuner": {"mode": "off"}}


class Losses:
    """Stands in for the hooks on an engine."""

    def __init__(self) -> None:
        self.divided = 0

    def expect_divided_losses(self) -> None:
        self.divided += 1


class Job:
    """A training thread with hooks on the training loops of libraries."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.losses = FakeClock(), Losses()
        self.timer = PhaseTimer(lambda: round(self.clock() * 1e9))
        for owner, name in (
            (Trainer, "evaluate"),
            (Trainer, "predict"),
            (Trainer, "_save_checkpoint"),
            (Trainer, "save_model"),
            (Trainer, "training_step"),
            (PreTrainedModel, "save_pretrained"),
            (Accelerator, "save_model"),
            (Accelerator, "save_state"),
            (Accelerator, "load_state"),
        ):
            monkeypatch.setattr(owner, name, self._take)  # raises if there is no such method
        self.hooks = FrameworkHooks(self.timer, FailOpen(), self.losses)

    def _take(self, *args: object, **kwargs: object) -> tuple[object, ...]:
        if "error" in kwargs:
            raise KeyboardInterrupt
        self.clock.seconds += SECONDS
        return args

    def phase_seconds(self) -> dict[str, float]:
        return {PHASES[place]: ns / 1e9 for place, ns in enumerate(self.timer.drain()) if ns}


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    job = Job(monkeypatch)
    yield job
    job.hooks.restore()


def test_a_trainers_evaluation_is_eval_and_its_save_is_checkpoint(job: Job) -> None:
    trainer = Trainer.__new__(Trainer)

    trainer.evaluate()
    trainer.predict(None)
    trainer._save_checkpoint(None, None)

    assert job.phase_seconds() == {"eval": 2 * SECONDS, "checkpoint": SECONDS}


def test_models_that_libraries_save_outside_of_training_are_checkpoints(job: Job) -> None:
    Trainer.__new__(Trainer).save_model("final")
    Accelerator.__new__(Accelerator).save_model(None, "final")
    PreTrainedModel.__new__(PreTrainedModel).save_pretrained("final")

    assert job.phase_seconds() == {"checkpoint": 3 * SECONDS}


def test_the_states_that_accelerate_saves_and_loads_are_checkpoints(job: Job) -> None:
    accelerator = Accelerator.__new__(Accelerator)

    accelerator.save_state()
    accelerator.load_state()

    assert job.phase_seconds() == {"checkpoint": 2 * SECONDS}


def test_a_call_that_raises_ends_its_phase(job: Job) -> None:
    with pytest.raises(KeyboardInterrupt):
        Trainer.__new__(Trainer).evaluate(error=True)
    job.clock.seconds += SECONDS

    assert job.phase_seconds() == {"other": SECONDS}


def test_calls_on_another_thread_and_after_a_restore_are_not_counted(job: Job) -> None:
    trainer = Trainer.__new__(Trainer)
    thread = threading.Thread(target=trainer.evaluate)
    thread.start()
    thread.join()
    wrapper = Trainer.evaluate
    job.hooks.restore()
    wrapper(trainer)
    job.timer.enter(EVAL)

    assert "eval" not in job.phase_seconds()
    assert Trainer.evaluate is not wrapper


def test_a_trainers_step_says_that_its_losses_are_divided(job: Job) -> None:
    Trainer.__new__(Trainer).training_step(None, None)

    assert job.losses.divided == 1


def test_the_loss_of_a_trainers_step_is_the_sum_of_what_it_divides_by_tokens(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    torch.manual_seed(seed)
    model, tokens, losses = nn.Linear(8, 1), (3, 5), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def micro_batch(trainer: Trainer, *args: object) -> None:
        loss = model(torch.ones(args[0], 8)).square().sum() / torch.tensor(sum(tokens))
        losses.append(loss.item())
        (loss / 1).backward()  # as Accelerate does

    monkeypatch.setattr(Trainer, "training_step", micro_batch)
    watch = zerowatch.watch(model, optimizer, QUIET)
    records: list[StepRecord] = []
    watch.subscribe(records.append)
    for number in tokens:
        Trainer.__new__(Trainer).training_step(number)
    optimizer.step()
    watch.close()

    assert records[0].loss == pytest.approx(sum(losses), rel=1e-6)

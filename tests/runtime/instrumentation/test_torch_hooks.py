"""Tests of a watch on a torch model without DeepSpeed: `torch_hooks.py` and `torch_engine.py`.

Real models, optimizers and watches, in this process.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes.scraper import eventually
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

import zerowatch
from zerowatch.errors import SettingsError
from zerowatch.metrics.catalog import training
from zerowatch.metrics.step_record import StepRecord
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.optimizer_steps import call_after_steps
from zerowatch.runtime.common.phase_timer import PhaseTimer
from zerowatch.runtime.common.torch_engine import steps_so_far, torch_engine, trained_model
from zerowatch.runtime.instrumentation.torch_hooks import OTHER_STEPS, TorchHooks, divisor_of
from zerowatch.runtime.monitor.watch import Watch

QUIET = {"serve": {"enabled": False}, "run_log": {"enabled": False}, "tuner": {"mode": "off"}}
SAMPLES, WIDTH = 4, 8

Step = Callable[[nn.Module, torch.optim.Optimizer], None]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a model, always with the same weights, and its optimizer."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    with torch.no_grad():
        for weights in model.parameters():
            weights.copy_(torch.linspace(-0.3, 0.3, weights.numel()).view_as(weights))
    return model, torch.optim.AdamW(model.parameters(), lr=0.5)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(SAMPLES, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def records_of(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[Callable[[], list[StepRecord]]]:
    """Watch a model. The function that it yields closes the watch, and returns the records."""
    watch = zerowatch.watch(model, optimizer, QUIET)
    records: list[StepRecord] = []
    watch.subscribe(records.append)

    def end() -> list[StepRecord]:
        watch.close()
        return records

    try:
        yield end
    finally:
        watch.close()


def record_of(step: Step) -> StepRecord:
    model, optimizer = make()
    with records_of(model, optimizer) as end:
        step(model, optimizer)
        (record,) = end()
    return record


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process the only rank of a job."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def places() -> list[object]:
    """What the hooks replace, apart from the hooks of the optimizer."""
    scaler = torch.amp.grad_scaler.GradScaler
    return [
        nn.Sequential.__dict__.get("__call__"),
        torch.autograd.backward,
        scaler.__dict__["scale"],
        scaler.__dict__["step"],
    ]


def test_a_step_has_its_phases_samples_loss_and_learning_rate() -> None:
    record = record_of(train_step)

    assert record.step == 1
    assert record.micro_batches == 1
    assert record.samples == SAMPLES
    assert record.learning_rate == 0.5
    assert {"forward", "backward", "optimizer"} <= record.phase_seconds.keys()
    model, _ = make()
    assert record.loss == pytest.approx(
        model(torch.ones(SAMPLES, WIDTH)).square().mean().item(), rel=1e-6
    )
    assert record.gradient_norm is None  # torch keeps none
    assert record.comm_exposed_seconds == 0  # there is no communication


def test_the_weights_are_the_same_with_and_without_a_watch() -> None:
    plain, watched = make(), make()

    for _ in range(3):
        train_step(*plain)
    with records_of(*watched):
        for _ in range(3):
            train_step(*watched)

    pairs = zip(plain[0].parameters(), watched[0].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_close_restores_everything() -> None:
    model, optimizer = make()
    before, attributes = places(), dict(vars(model))

    with records_of(model, optimizer):
        assert all(a is not b for a, b in zip(before, places(), strict=True))
        assert vars(model) == attributes  # nothing is written to the model

    assert all(a is b for a, b in zip(before, places(), strict=True))
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_an_optimizer_without_hooks_leaves_nothing_patched() -> None:
    model, optimizer = make()
    before = places()
    del optimizer._optimizer_step_pre_hooks
    names = ("on_batch_start", "on_backward_end", "on_update_start", "on_exception", "on_step_end")
    unused: Any = SimpleNamespace(**dict.fromkeys(names, print))
    engine = torch_engine(model, optimizer)

    with pytest.raises(AttributeError):
        TorchHooks(engine, PhaseTimer(), FailOpen(), unused, unused, print)

    assert all(a is b for a, b in zip(before, places(), strict=True))


def test_copies_and_pickles_of_a_watched_model_are_not_watched() -> None:
    model, optimizer = make()

    with records_of(model, optimizer) as end:
        copied = copy.deepcopy(model)
        pickled = pickle.loads(pickle.dumps((model, optimizer)))
        copied(torch.ones(SAMPLES, WIDTH)).sum().backward()
        train_step(*pickled)
        train_step(model, optimizer)
        (record,) = end()

    assert record.micro_batches == 1
    assert record.samples == SAMPLES


@pytest.mark.parametrize(
    ("scaled", "loss"),
    [
        (lambda loss: loss, 2.0),
        (lambda loss: loss / 2, 2.0),  # divided by the number of micro-batches
        (lambda loss: loss * 0.5, 2.0),
        (lambda loss: loss / torch.full((1,), 4.0), 0.5),  # a part of the loss, such as tokens
        (lambda loss: loss / 8, None),  # what the losses were is not known
    ],
)
def test_the_loss_of_two_micro_batches_is_their_mean_or_unknown(
    scaled: Callable[[torch.Tensor], torch.Tensor], loss: float | None
) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for value in (1.0, 3.0):
            output = model(torch.ones(SAMPLES, WIDTH)).mean()
            scaled(output - output.detach() + value).backward()
        optimizer.step()

    record = record_of(step)

    assert record.micro_batches == 2
    assert record.samples == 2 * SAMPLES
    assert record.loss == (None if loss is None else pytest.approx(loss))


def step_scaled_by(kind: type[torch.amp.GradScaler]) -> Step:
    """Return a step whose loss is 2, and is scaled by 1024 before its backward pass."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scaler = kind("cpu", init_scale=1024.0)
        output = model(torch.ones(SAMPLES, WIDTH)).mean()
        scaler.scale(output - output.detach() + 2.0).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def test_the_loss_of_a_grad_scaler_is_the_loss_before_it() -> None:
    record = record_of(step_scaled_by(torch.amp.GradScaler))

    assert record.loss == pytest.approx(2.0)
    assert not record.skipped


class OwnScaler(torch.amp.grad_scaler.GradScaler):
    """Scales by its own method, as FSDP's ShardedGradScaler does, and by that of its class."""

    calls_super = False

    def scale(self, outputs: Any) -> Any:
        scaled = super().scale(outputs)  # which sets the scale
        return scaled * 1.0 if self.calls_super else outputs * 1024.0


@pytest.mark.parametrize("calls_super", [False, True])
def test_the_loss_of_a_scaler_with_its_own_method_is_the_loss_before_it(
    calls_super: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnScaler, "calls_super", calls_super)
    original = vars(OwnScaler)["scale"]

    record = record_of(step_scaled_by(OwnScaler))

    assert record.loss == pytest.approx(2.0)
    assert not record.skipped
    assert vars(OwnScaler)["scale"] is original


def test_a_step_that_a_grad_scaler_skips_is_a_skipped_step() -> None:
    model, _ = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    with records_of(model, optimizer) as end:
        for factor in (float("inf"), 1.0):
            scaler.scale(model(torch.ones(SAMPLES, WIDTH)).mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        records = end()

    assert [(record.step, record.skipped) for record in records] == [(1, True), (2, False)]
    assert [record.micro_batches for record in records] == [1, 1]


def test_evaluation_and_another_model_are_no_micro_batches() -> None:
    other, _ = make()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            model(torch.ones(SAMPLES, WIDTH))
        other(torch.ones(SAMPLES, WIDTH)).sum().backward()
        train_step(model, optimizer)

    record = record_of(step)

    assert record.micro_batches == 1
    assert record.samples == SAMPLES
    assert record.phase_seconds["eval"] > 0


def records_in_evaluation_mode(step: Step, num_steps: int = 3) -> list[StepRecord]:
    model, optimizer = make()
    model.eval()
    with records_of(model, optimizer) as end:
        for _ in range(num_steps):
            step(model, optimizer)
        return end()


def test_a_model_that_trains_in_evaluation_mode_has_its_samples_loss_and_forward_time() -> None:
    records = records_in_evaluation_mode(train_step)

    assert [(each.samples, each.micro_batches) for each in records] == [(SAMPLES, 1)] * 3
    assert all(each.loss is not None for each in records)
    assert "forward" in records[1].phase_seconds and "eval" not in records[1].phase_seconds


def test_a_model_that_trains_in_evaluation_mode_waits_for_training_data() -> None:
    data = DataLoader(TensorDataset(torch.ones(SAMPLES, WIDTH)))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        next(iter(data))
        train_step(model, optimizer)

    first, *later = records_in_evaluation_mode(step)

    assert "data" not in first.phase_seconds  # it is not known yet
    for record in later:
        assert "data" in record.phase_seconds and "eval" not in record.phase_seconds


def test_a_model_in_evaluation_mode_beside_another_that_trains_is_not_counted() -> None:
    other = nn.Linear(1, 1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        other(model(torch.ones(SAMPLES, WIDTH)).detach()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    records = records_in_evaluation_mode(step)

    assert [(each.samples, each.loss) for each in records] == [(None, None)] * 3
    assert all("eval" in each.phase_seconds for each in records)


def test_a_model_that_trains_in_training_mode_is_not_counted_in_evaluation_mode() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.train()
        train_step(model, optimizer)
        model.eval()
        model(torch.ones(64, WIDTH))  # a validation with gradients
        model(torch.ones(64, WIDTH)).sum().backward()  # an attack
        optimizer.zero_grad()

    records = records_in_evaluation_mode(step)

    assert [(each.samples, each.micro_batches) for each in records] == [(SAMPLES, 1)] * 3


def test_only_the_last_forward_pass_in_evaluation_mode_counts_until_it_is_known_to_train() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(64, WIDTH))
        with torch.no_grad():
            model(torch.ones(64, WIDTH))
        train_step(model, optimizer)

    records = records_in_evaluation_mode(step, num_steps=1)

    assert [each.samples for each in records] == [SAMPLES]


def test_an_evaluation_within_a_step_in_evaluation_mode_leaves_the_mode_known() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss = model(torch.ones(SAMPLES, WIDTH)).sum()
        with torch.no_grad():
            model(torch.ones(64, WIDTH))
        loss.backward()
        optimizer.step()

    records = records_in_evaluation_mode(step, num_steps=4)

    assert [each.samples for each in records] == [SAMPLES] * 4
    assert all("forward" in each.phase_seconds for each in records[1:])


def test_a_validation_with_gradients_does_not_count_after_training_in_either_mode() -> None:
    modes = iter((False, False, True, True, True, False, False))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.train(next(modes))
        train_step(model, optimizer)
        model.eval()
        for _ in range(3):
            model(torch.ones(64, WIDTH))

    records = records_in_evaluation_mode(step, num_steps=7)

    # Whether the sixth step trains is known only at its end.
    assert [each.samples for each in records] == [*[SAMPLES] * 5, None, SAMPLES]


def test_several_forward_passes_in_evaluation_mode_are_one_micro_batch() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.stack([model(torch.ones(SAMPLES, WIDTH)) for _ in range(3)]).sum().backward()
        optimizer.step()

    records = records_in_evaluation_mode(step, num_steps=4)

    # Not more passes than in the micro-batch before.
    assert [each.samples for each in records] == [SAMPLES, SAMPLES, 3 * SAMPLES, 3 * SAMPLES]


def test_a_backward_pass_in_evaluation_mode_that_raises_does_not_change_the_next_one() -> None:
    model, optimizer = make()
    batch, other = torch.ones(SAMPLES, WIDTH), torch.ones(64, WIDTH)
    model.eval()
    with records_of(model, optimizer) as end:
        with pytest.raises(RuntimeError):
            model(batch).sum().backward(torch.ones(3))
        model.train()
        loss = model(batch).sum()
        model.eval()
        model(other)
        loss.backward()
        optimizer.step()
        (record,) = end()

    assert (record.samples, record.micro_batches) == (SAMPLES, 1)


def test_a_model_that_goes_on_in_evaluation_mode_is_counted_after_a_step() -> None:
    model, optimizer = make()
    with records_of(model, optimizer) as end:
        train_step(model, optimizer)
        model.eval()
        for _ in range(3):
            train_step(model, optimizer)
        records = end()

    assert [each.samples for each in records] == [SAMPLES, None, SAMPLES, SAMPLES]


class LightningModule(nn.Module):
    """A model whose trainer calls `training_step`, as Lightning does on one device."""

    automatic_optimization = True

    def __init__(self) -> None:
        super().__init__()
        self.inner, _ = make()

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        model = self.inner if self.automatic_optimization else self
        loss: torch.Tensor = model(batch).square().mean()
        return loss

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(batch)
        return output


def test_a_lightning_module_that_is_not_wrapped_has_its_samples_loss_and_forward_time() -> None:
    model = LightningModule()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    original = vars(LightningModule)["training_step"]

    with records_of(model, optimizer) as end:
        loss = model.training_step(torch.ones(SAMPLES, WIDTH), 0)
        loss.backward()
        optimizer.step()
        (record,) = end()

    assert (record.micro_batches, record.samples) == (1, SAMPLES)
    assert record.loss == pytest.approx(loss.item(), rel=1e-6)
    assert record.phase_seconds["forward"] > 0
    assert vars(LightningModule)["training_step"] is original


class ManualModule(LightningModule):
    """A module whose `training_step` trains by itself. Under DDP, Lightning calls it as forward.

    Args:
        calls_itself: Whether `training_step` calls the module.
    """

    automatic_optimization = False
    optimizer: torch.optim.Optimizer

    def __init__(self, *, calls_itself: bool = False) -> None:
        super().__init__()
        self.calls_itself, self.is_redirected = calls_itself, False

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        self.is_redirected = False
        for part in batch.split(SAMPLES // 2):
            output = self(part) if self.calls_itself else self.inner(part)
            (output.square().mean() / 2).backward()
        self.optimizer.step()
        return batch.sum()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.training_step(batch, 0) if self.is_redirected else super().forward(batch)


@pytest.mark.parametrize("calls_itself", [False, True])
def test_a_lightning_module_that_optimizes_by_itself_has_its_own_passes(calls_itself: bool) -> None:
    model = ManualModule(calls_itself=calls_itself)
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with records_of(model, model.optimizer) as end:
        for number in range(2):
            model.training_step(torch.ones(SAMPLES, WIDTH), number)
        records = end()

    assert [(one.micro_batches, one.samples) for one in records] == [(1, SAMPLES)] * 2
    assert all(one.loss is not None for one in records)
    assert {"forward", "backward", "optimizer"} <= records[1].phase_seconds.keys()


def test_a_lightning_module_that_optimizes_by_itself_under_ddp_has_its_own_passes(
    one_rank: None,
) -> None:
    model = ManualModule()
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = DistributedDataParallel(model)

    with records_of(wrapper, model.optimizer) as end:
        for _ in range(2):
            model.is_redirected = True
            with wrapper.no_sync():
                wrapper(torch.ones(SAMPLES, WIDTH))
        records = end()

    assert [(one.micro_batches, one.samples) for one in records] == [(1, SAMPLES)] * 2
    assert all(one.loss is not None for one in records)
    assert {"forward", "backward", "optimizer"} <= records[1].phase_seconds.keys()


def test_a_closure_runs_its_passes_within_the_step() -> None:
    model, _ = make()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(SAMPLES, WIDTH)).square().mean()
        loss.backward()
        return loss

    with records_of(model, optimizer) as end:
        optimizer.step(closure)
        (record,) = end()

    assert record.micro_batches >= 1
    assert {"forward", "backward", "optimizer"} <= record.phase_seconds.keys()


def test_a_pass_that_raises_ends_its_phase() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with pytest.raises(RuntimeError):
            model(torch.ones(SAMPLES, WIDTH + 1))
        with pytest.raises(RuntimeError):
            torch.ones(1).backward()
        train_step(model, optimizer)

    record = record_of(step)

    assert record.step == 1
    assert "optimizer" in record.phase_seconds


def test_a_pass_that_raises_is_no_micro_batch_and_has_no_samples_and_no_loss() -> None:
    class Interrupted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with pytest.raises(RuntimeError):
            model(torch.ones(SAMPLES, WIDTH + 1))
        loss = 1000 * Interrupted.apply(model(torch.ones(SAMPLES, WIDTH))).mean()
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        train_step(model, optimizer)

    record = record_of(step)

    assert (record.micro_batches, record.samples) == (1, SAMPLES)
    assert record.loss == record_of(train_step).loss


def test_recomputed_activations_are_part_of_backward() -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = torch.utils.checkpoint.checkpoint(
                self.inner, x, use_reentrant=True
            )
            return output

    model = Recomputed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with records_of(model, optimizer) as end:
        model(torch.ones(SAMPLES, WIDTH, requires_grad=True)).sum().backward()
        optimizer.step()
        (record,) = end()

    assert record.micro_batches == 1


def test_steps_continue_at_the_number_in_the_optimizers_state() -> None:
    model, optimizer = make()
    for _ in range(3):
        train_step(model, optimizer)

    with records_of(model, optimizer) as end:
        train_step(model, optimizer)
        (record,) = end()

    assert record.step == 4
    assert steps_so_far(torch.optim.SGD(model.parameters(), lr=0.1)) == 0


@pytest.mark.parametrize(
    ("save", "num_saved"),
    [(Watch.saving_checkpoint, 2), (Watch.waiting_for_checkpoint, 0)],
)
def test_a_checkpoint_that_the_script_saves_is_counted_and_is_in_the_checkpoint_phase(
    save: Callable[[Any], AbstractContextManager[None]], num_saved: int
) -> None:
    model, optimizer = make()
    watch = zerowatch.watch(model, optimizer, QUIET)
    records: list[StepRecord] = []
    watch.subscribe(records.append)

    for _ in range(2):
        with save(watch), save(watch):
            pass
        train_step(model, optimizer)
    watch.close()

    assert all(record.phase_seconds["checkpoint"] > 0 for record in records)
    assert watch.snapshot().value(training.CHECKPOINTS, "saved") == num_saved


def test_a_checkpoint_that_another_thread_saves_is_counted_and_is_no_phase_of_training() -> None:
    model, optimizer = make()
    watch = zerowatch.watch(model, optimizer, QUIET)
    records: list[StepRecord] = []
    watch.subscribe(records.append)
    begun, trained = Event(), Event()

    def save() -> None:
        with watch.saving_checkpoint():
            begun.set()
            trained.wait()

    thread = Thread(target=save)
    thread.start()
    assert begun.wait(30)
    for _ in range(2):
        train_step(model, optimizer)
    trained.set()
    thread.join()
    watch.close()

    assert [record.phase_seconds.get("checkpoint", 0) for record in records] == [0, 0]
    assert watch.snapshot().value(training.CHECKPOINTS, "saved") == 1


def test_steps_on_another_thread_than_that_of_the_watch_are_measured_after_the_first() -> None:
    model, optimizer = make()
    with records_of(model, optimizer) as end:

        def train() -> None:
            for _ in range(3):
                train_step(model, optimizer)

        thread = Thread(target=train)
        thread.start()
        thread.join()
        records = end()

    assert [(record.step, record.micro_batches, record.samples) for record in records] == [
        (1, 1, SAMPLES),
        (2, 1, SAMPLES),
    ]
    assert all(
        {"forward", "backward", "optimizer"} <= each.phase_seconds.keys() for each in records
    )


def test_a_watch_may_close_within_a_step_between_hooks_of_the_script() -> None:
    model, optimizer = make()
    calls: list[str] = []
    own = [register_optimizer_step_post_hook(lambda *_: watch.close())]
    watch = zerowatch.watch(model, optimizer, QUIET)
    own.append(register_optimizer_step_post_hook(lambda *_: calls.append("own")))

    train_step(model, optimizer)
    for handle in own:
        handle.remove()

    assert calls == ["own"]
    assert not watch.is_open


def test_the_step_in_which_a_watch_opens_is_not_counted() -> None:
    # As `zerowatch run` opens it, before the optimizer's own hooks are called.
    model, optimizer = make()
    steps: list[int] = []
    watches: list[Any] = []

    def watch(stepped: torch.optim.Optimizer) -> None:
        opening.remove()
        watches.append(zerowatch.watch(model, stepped, QUIET))
        watches[0].subscribe(lambda record: steps.append(record.step))

    opening = call_after_steps(watch)
    for _ in range(3):
        train_step(model, optimizer)
    watches[0].close()

    assert len(steps) == 2


@pytest.mark.filterwarnings("ignore")  # torch warns of its own compiler
def test_a_compiled_step_is_counted() -> None:
    model, optimizer = make()
    compiled = torch.compile(optimizer.step, backend="eager")

    with records_of(model, optimizer) as end:
        for _ in range(3):
            model(torch.ones(SAMPLES, WIDTH)).sum().backward()
            compiled()
        records = end()

    assert len(records) == 3


def test_a_second_call_returns_the_same_watch() -> None:
    model, optimizer = make()

    with records_of(model, optimizer):
        first = zerowatch.watch(model, optimizer, QUIET)

        assert zerowatch.watch(model, optimizer, QUIET) is first


def test_other_settings_for_an_open_watch_are_checked_and_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, optimizer = make()

    with records_of(model, optimizer):
        first = zerowatch.watch(model, optimizer)
        silent = not caplog.records
        second = zerowatch.watch(model, optimizer, {"serve": {"port": 9999}})
        with pytest.raises(SettingsError, match="port"):
            zerowatch.watch(model, optimizer, {"serve": {"prot": 9999}})

    assert silent and first is second
    assert "close()" in caplog.text


def test_an_optimizer_of_another_model_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    (model, _), (_, optimizer) = make(), make()

    with records_of(model, optimizer):
        assert "no parameter of the watched model" in caplog.text


def test_an_optimizer_that_takes_the_place_of_the_watched_one_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, optimizer = make()
    other = torch.optim.SGD(model.parameters(), lr=0.1)

    with records_of(model, optimizer):
        for _ in range(2 * OTHER_STEPS):  # two optimizers that take turns, as Muon and AdamW
            train_step(model, optimizer)
            train_step(model, other)
        silent = not caplog.records
        for _ in range(2 * OTHER_STEPS):
            train_step(*make())  # another model
        for _ in range(2 * OTHER_STEPS):
            train_step(model, other)
        watch_again = [each for each in caplog.records if "another optimizer" in each.message]

    assert silent and len(watch_again) == 1


def test_the_watch_keeps_neither_the_model_nor_the_optimizer() -> None:
    model, optimizer = make()
    watch = zerowatch.watch(model, optimizer, QUIET)
    train_step(model, optimizer)
    engine, released = torch_engine(model, optimizer), weakref.ref(optimizer)
    assert watch.watches(engine)

    def is_true(condition: Callable[[], bool]) -> bool:
        gc.collect()
        return condition()

    # The watch's thread may hold either for a moment.
    del optimizer
    assert eventually(lambda: is_true(lambda: released() is None))
    assert engine.optimizer is None
    del model, engine
    assert eventually(lambda: is_true(lambda: watch.watches(None)))
    watch.close()


def test_the_metrics_name_no_deepspeed_stage() -> None:
    model, optimizer = make()
    watch = zerowatch.watch(model, optimizer, QUIET)
    train_step(model, optimizer)
    watch.close()

    (labels,) = watch.snapshot().values[training.RUN_INFO]

    assert "none" in labels


@pytest.mark.parametrize("arguments", [(nn.Linear(1, 1),), (nn.Linear(1, 1), "adam"), (3,)])
def test_other_arguments_are_an_error_that_names_what_to_pass(arguments: tuple[object]) -> None:
    with pytest.raises(TypeError, match="optimizer"):
        zerowatch.watch(*arguments)


def test_the_model_of_an_optimizer_is_the_outermost_module() -> None:
    model, optimizer = make()
    outer = nn.Sequential(model)
    copied = copy.deepcopy(outer)

    found = trained_model(optimizer)

    assert found is outer
    assert copied is not found


def test_a_module_that_is_not_initialized_does_not_prevent_the_search() -> None:
    model, optimizer = make()
    unfinished = nn.Linear.__new__(nn.Linear)

    assert trained_model(optimizer) is model
    assert not vars(unfinished)


def test_a_loss_without_an_operation_is_not_divided() -> None:
    assert divisor_of(torch.ones(())) is None
    assert divisor_of(torch.ones((), requires_grad=True) / 4) == 4.0


def test_a_wrapper_that_was_left_in_evaluation_mode_trains(one_rank: None) -> None:
    """Lightning restores the mode of the modules within DDP, and not of DDP itself."""
    model, optimizer = make()
    wrapper = DistributedDataParallel(model)
    wrapper.eval()
    model.train()
    with records_of(wrapper, optimizer) as end:
        train_step(wrapper, optimizer)
        (record,) = end()

    assert record.samples == SAMPLES
    assert record.loss is not None
    assert "eval" not in record.phase_seconds

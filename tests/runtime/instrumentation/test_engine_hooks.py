"""Tests of the hooks on a DeepSpeed engine, on a stand-in engine and a clock that the test sets.

Covers `engine_hooks.py` and `pipeline_hooks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zerowatch.metrics.catalog.labels import PHASES
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.phase_timer import FORWARD, PhaseTimer
from zerowatch.runtime.instrumentation.engine_hooks import (
    EngineHooks,
    extract_loss,
    is_divided_by_lightning,
)
from zerowatch.runtime.instrumentation.raw_step import StepCounts


class Engine:
    """An engine that updates its weights after two micro-batches; each call takes some seconds."""

    global_steps = skipped_steps = 0
    micro_batches = 5

    def __init__(self, run: Run) -> None:
        self.run = run
        self.module = nn.Linear(2, 1)
        self.num_backward = 0
        self.skips = self.by_script = False
        self.error: Exception | None = None
        self.saves: Any = None

    def forward(self, batch: torch.Tensor, **options: Any) -> Any:
        """Take 2 s."""
        self.run.work(2)
        if self.error is not None:
            raise self.error
        return options.get("output", batch.float().sum())

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        """Take 3 s, of which 1 s before the first gradient."""
        self.run.work(1)
        self._backward_prologue()
        self.run.work(2)
        if self.error is not None:
            raise self.error
        self._backward_epilogue()

    def _backward_prologue(self) -> None: ...

    def _backward_epilogue(self) -> None:
        self.num_backward += 1

    def step(self) -> None:
        """Take 5 s, and end a step after two micro-batches."""
        self.run.work(5)
        if self.error is not None:
            raise self.error
        if self.is_gradient_accumulation_boundary() or self.by_script:
            self.num_backward = 0
            self.global_steps += 1
            self.skipped_steps += self.skips

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether two micro-batches have passed."""
        return self.num_backward == 2

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts the micro-batches."""
        return not self.by_script

    def save_checkpoint(self) -> Any:
        """Take 7 s."""
        self.run.work(7)
        if self.error is not None:
            raise self.error
        return self.saves

    def load_checkpoint(self) -> str:
        """Take 11 s."""
        self.run.work(11)
        return "loaded"

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the configured samples."""
        return 3


class Run:
    """An engine with hooks, and what they report."""

    def __init__(self, make: Callable[[Run], Engine] = Engine) -> None:
        self.now_ns = 0
        self.phases = PhaseTimer(lambda: self.now_ns)
        self.fail_open = FailOpen()
        self.engine = make(self)
        self.steps: list[StepCounts] = []
        self.events: list[Any] = []
        memory: Any = SimpleNamespace(
            on_batch_start=lambda shape, number: self.events.append(
                ("batch", shape.samples, number)
            ),
            on_backward_end=lambda: self.events.append("gradients"),
            on_update_start=lambda: self.events.append(("update", self.phase())),
            on_exception=lambda error: self.events.append(("error", error)),
            on_generation_start=lambda: None,
            on_generation_end=lambda: None,
        )
        collector: Any = SimpleNamespace(
            on_step_end=lambda engine, counts: self.steps.append(counts)
        )
        checkpoints: Any = SimpleNamespace(
            begin=lambda: self.events.append(("save", self.phase())),
            end=lambda *, saved: self.events.append(("saved", saved, self.phase())),
        )
        self.hooks = EngineHooks(
            self.engine, self.phases, self.fail_open, memory, collector, checkpoints
        )

    def sample_in_detail(self) -> None:
        """Begin a detailed sample of memory."""
        self.phases.on_change = lambda phase: None

    def work(self, seconds: int) -> None:
        self.now_ns += seconds * 1_000_000_000

    def phase(self) -> str:
        return PHASES[self.phases.current]

    def seconds(self) -> dict[str, float]:
        spent = zip(PHASES, self.phases.drain(), strict=True)
        return {phase: ns / 1e9 for phase, ns in spent if ns}

    def micro_batch(self, samples: int = 2, length: int = 7, loss: float = 0.5) -> None:
        self.engine.forward(torch.zeros(samples, length, dtype=torch.long))
        self.engine.backward(torch.tensor(loss))


@pytest.fixture
def run() -> Run:
    return Run()


def test_the_phases_of_a_step_are_those_of_the_engines_methods(run: Run) -> None:
    for _ in range(2):
        run.micro_batch()
        run.engine.step()

    assert run.seconds() == {"forward": 4, "backward": 6, "optimizer": 10}


def test_a_step_has_the_micro_batches_since_the_last_update(run: Run) -> None:
    run.micro_batch(2, 7, loss=0.5)
    run.engine.step()
    before = list(run.steps)
    run.micro_batch(3, 11, loss=0.25)
    run.engine.step()

    assert before == []
    assert run.steps == [
        StepCounts(micro_batches=2, samples=5, tokens=47, sequence_length=11, losses=[0.5, 0.25])
    ]


def test_each_step_is_counted_from_zero(run: Run) -> None:
    for samples in (2, 3, 5, 7):
        run.micro_batch(samples)
        run.engine.step()

    assert [(step.micro_batches, step.samples) for step in run.steps] == [(2, 5), (2, 12)]


def test_a_step_that_did_not_update_the_weights_is_skipped(run: Run) -> None:
    for skips in (False, True, False):
        run.engine.skips = skips
        for _ in range(2):
            run.micro_batch()
            run.engine.step()

    assert [step.skipped for step in run.steps] == [False, True, False]


def test_a_detailed_sample_gets_each_micro_batch_the_gradients_and_the_update(run: Run) -> None:
    run.sample_in_detail()

    for samples in (2, 3):
        run.micro_batch(samples)
        run.engine.step()

    assert run.events == [
        ("batch", 2, 1),
        "gradients",
        ("batch", 3, 2),
        "gradients",
        ("update", "other"),
    ]


def test_other_steps_give_the_memory_hooks_only_their_micro_batches(run: Run) -> None:
    for samples in (2, 3):
        run.micro_batch(samples)
        run.engine.step()

    assert run.events == [("batch", 2, 1), ("batch", 3, 2)]
    assert len(run.steps) == 1


def test_a_script_that_accumulates_by_itself_updates_in_each_step(run: Run) -> None:
    run.engine.by_script = True
    run.sample_in_detail()
    run.micro_batch()

    run.engine.step()

    assert run.events[-1] == ("update", "other")
    assert [step.micro_batches for step in run.steps] == [1]


@pytest.mark.parametrize("is_evaluation", [True, False])
def test_a_forward_pass_without_gradients_is_an_evaluation(run: Run, is_evaluation: bool) -> None:
    run.engine.module.train(not is_evaluation)
    with torch.set_grad_enabled(is_evaluation):
        run.engine.forward(torch.zeros(2, 7))

    assert run.seconds() == {"eval": 2}
    assert run.events == []


def test_an_engine_that_trains_in_evaluation_mode_has_its_samples_loss_and_forward_time(
    run: Run,
) -> None:
    run.engine.module.eval()

    for _ in range(3):
        for loss in (2.0, 3.0):
            run.engine.forward(torch.ones(4, 10))
            run.engine.backward(torch.tensor(loss))
        run.engine.step()

    records = [(each.samples, each.micro_batches) for each in run.steps]
    assert records == [(8, 2)] * 3
    assert run.steps[0].losses == [2.0, 3.0]
    seconds = run.seconds()
    assert (seconds["eval"], seconds["forward"]) == (2, 5 * 2)  # the first pass is not known


@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_data_of_an_evaluation_is_no_training_data(run: Run, mode: str) -> None:
    hooks, module = run.hooks, run.engine.module
    module.train(mode == "training")
    before = hooks.loads_training_data
    run.engine.forward(torch.ones(4, 10))
    run.engine.backward(torch.tensor(2.0))
    run.engine.step()

    assert (before, hooks.loads_training_data) == (mode == "training", True)
    module.eval()
    with torch.no_grad():
        assert not hooks.loads_training_data


def test_a_forward_pass_in_evaluation_mode_without_a_backward_pass_does_not_count(
    run: Run,
) -> None:
    module = run.engine.module
    for _ in range(2):
        run.engine.forward(torch.ones(4, 10))
        run.engine.backward(torch.tensor(2.0))
        module.eval()
        run.engine.forward(torch.ones(64, 10))
        module.train()
        run.engine.forward(torch.ones(4, 10))
        module.eval()
        run.engine.forward(torch.ones(64, 10))
        module.train()
        run.engine.backward(torch.tensor(2.0))
        run.engine.step()

    assert [each.samples for each in run.steps] == [8, 8]
    assert run.seconds()["eval"] == 4 * 2


def test_after_a_step_without_a_backward_pass_the_mode_shows_no_training(run: Run) -> None:
    run.engine.module.eval()
    run.engine.by_script = True
    for _ in range(2):
        run.engine.forward(torch.ones(4, 10))
        run.engine.backward(torch.tensor(2.0))
        run.engine.step()
    run.engine.forward(torch.ones(4, 10))
    run.engine.step()
    is_known = "forward" in run.seconds()

    run.engine.forward(torch.ones(4, 10))

    assert is_known and run.seconds() == {"eval": 2}


def test_an_evaluation_within_a_step_in_evaluation_mode_leaves_the_mode_known(run: Run) -> None:
    run.engine.module.eval()
    run.engine.by_script = True
    run.seconds()
    for _ in range(3):
        run.engine.forward(torch.ones(4, 10))
        with torch.no_grad():
            run.engine.forward(torch.ones(64, 10))
        run.engine.backward(torch.tensor(2.0))
        run.engine.step()

    assert [each.samples for each in run.steps] == [4, 4, 4]
    seconds = run.seconds()
    assert (seconds["eval"], seconds["forward"]) == (4 * 2, 2 * 2)  # the first pass is not known


def test_a_validation_with_gradients_does_not_count_after_training_in_either_mode(
    run: Run,
) -> None:
    module = run.engine.module
    run.engine.by_script = True
    for is_training in (False, False, True, True, False, False):
        module.train(is_training)
        run.engine.forward(torch.ones(4, 10))
        run.engine.backward(torch.tensor(2.0))
        run.engine.step()
        module.eval()
        for _ in range(3):
            run.engine.forward(torch.ones(64, 10))

    assert [each.samples for each in run.steps] == [4] * 6


def test_several_forward_passes_in_evaluation_mode_are_one_micro_batch(run: Run) -> None:
    run.engine.module.eval()
    run.engine.by_script = True
    for _ in range(4):
        for _ in range(3):
            run.engine.forward(torch.ones(4, 10))
        run.engine.backward(torch.tensor(2.0))
        run.engine.step()

    assert [each.samples for each in run.steps] == [4, 4, 12, 12]  # not more passes than before


def test_the_samples_of_a_forward_pass_in_evaluation_mode_that_raises_do_not_count(
    run: Run,
) -> None:
    run.engine.module.eval()
    run.engine.by_script = True
    run.engine.error = RuntimeError("bad batch")
    with pytest.raises(RuntimeError, match="bad batch"):
        run.engine.forward(torch.ones(64, 10))
    run.engine.error = None
    run.engine.backward(torch.tensor(2.0))
    run.engine.step()

    assert [each.samples for each in run.steps] == [None]


def test_several_forward_passes_before_one_backward_pass_are_one_micro_batch(run: Run) -> None:
    for _ in range(2):
        run.engine.forward(torch.zeros(2, 7, dtype=torch.long))
        run.micro_batch(3, 7)
        run.engine.step()

    assert [(step.micro_batches, step.samples) for step in run.steps] == [(2, 10)]


def test_a_forward_pass_that_no_backward_pass_follows_does_not_count(run: Run) -> None:
    for _ in range(2):
        for _ in range(2):
            run.micro_batch(3)
            run.engine.forward(torch.zeros(5, 7))
            run.engine.step()

    # The first of each step's lone forward passes is part of the micro-batch that follows.
    assert [step.samples for step in run.steps] == [11, 11]


def test_the_samples_of_a_forward_pass_that_raises_do_not_count(run: Run) -> None:
    error = RuntimeError("out of memory")
    run.engine.error = error
    with pytest.raises(RuntimeError):
        run.engine.forward(torch.zeros(64, 7))
    run.engine.error = None
    for _ in range(2):
        run.micro_batch(3)
        run.engine.step()

    assert ("error", error) in run.events
    assert run.steps[0].samples == 6
    assert run.phase() == "other"


def test_a_backward_pass_that_raises_counts_no_micro_batch(run: Run) -> None:
    run.engine.forward(torch.zeros(64, 7))
    run.engine.error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError):
        run.engine.backward(torch.tensor(9.0))
    run.engine.error = None
    for _ in range(2):
        run.micro_batch(3)
        run.engine.step()

    assert (run.steps[0].micro_batches, run.steps[0].samples) == (2, 6)
    assert run.steps[0].losses == [0.5, 0.5]


@pytest.mark.parametrize(
    ("error", "is_reported"),
    [(RuntimeError(), True), (MemoryError(), True), (ValueError(), False)],
)
def test_errors_that_may_be_a_lack_of_memory_are_reported(
    run: Run, error: Exception, is_reported: bool
) -> None:
    run.engine.error = error

    with pytest.raises(type(error)):
        run.engine.step()

    assert (("error", error) in run.events) is is_reported
    assert run.seconds() == {"optimizer": 5}


@pytest.mark.parametrize(
    ("args", "kwargs", "divided"),
    [
        ((), {}, False),
        ((), {"scale_wrt_gas": False}, True),
        ((False, False), {}, True),
        ((False, True), {}, False),
        ((), {"scale_wrt_gas": True}, False),
    ],
)
def test_a_caller_that_has_divided_the_losses_says_so(
    run: Run, args: tuple[Any, ...], kwargs: dict[str, Any], divided: bool
) -> None:
    for _ in range(2):
        run.engine.backward(torch.tensor(1.0), *args, **kwargs)
        run.engine.step()

    assert run.steps[0].losses_are_divided is divided


def test_a_loss_that_is_given_by_name_is_read(run: Run) -> None:
    for loss in (3.0, 5.0):
        run.engine.backward(loss=torch.tensor(loss))
        run.engine.step()

    assert run.steps[0].losses == [3.0, 5.0]


def test_losses_that_a_framework_divides_are_expected_for_one_step(run: Run) -> None:
    run.hooks.expect_divided_losses()
    for _ in range(4):
        run.micro_batch()
        run.engine.step()

    assert [step.losses_are_divided for step in run.steps] == [True, False]


class LightningModule(nn.Module):
    """Stands in for Lightning's class of this name."""

    automatic_optimization = True


class Model(LightningModule): ...


class Manual(LightningModule):
    automatic_optimization = False


class Other(nn.Module):
    automatic_optimization = True


@pytest.mark.parametrize(
    ("module", "divides"), [(Model(), True), (Manual(), False), (Other(), False)]
)
def test_lightnings_own_loop_divides_the_losses(module: nn.Module, divides: bool) -> None:
    assert is_divided_by_lightning(module) is divides


def plain_backward(run: Run, output: Any) -> None:
    """Call `loss.backward()` on the output of the engine, as Accelerate's users do."""
    kept = run.engine.forward(torch.zeros(3, 7, dtype=torch.long), output=output)
    run.work(1)
    run.engine._backward_prologue()
    run.work(4)
    run.engine._backward_prologue()  # for each of several outputs
    run.engine._backward_epilogue()
    del kept


@pytest.mark.parametrize(
    "output",
    [
        torch.tensor(0.75),
        {"logits": torch.zeros(2), "loss": torch.tensor(0.75)},
        (torch.tensor(0.75), torch.zeros(2)),
        [torch.tensor(0.75)],
    ],
)
def test_a_backward_pass_of_the_script_begins_with_the_first_gradient(
    run: Run, output: Any
) -> None:
    for _ in range(2):
        plain_backward(run, output)
        run.engine.step()

    assert run.seconds() == {"forward": 4, "other": 2, "backward": 8, "optimizer": 10}
    assert run.steps == [
        StepCounts(micro_batches=2, samples=6, tokens=42, sequence_length=7, losses=[0.75, 0.75])
    ]


@pytest.mark.parametrize("output", [torch.zeros(2), {"logits": torch.zeros(2)}, (), "text"])
def test_an_output_without_a_loss_gives_none(run: Run, output: Any) -> None:
    for _ in range(2):
        plain_backward(run, output)
        run.engine.step()

    assert run.steps[0].losses == [None, None]


@pytest.mark.parametrize("next_call", ["forward", "step"])
def test_a_backward_pass_of_the_script_that_raises_ends_with_the_next_call(
    run: Run, next_call: str
) -> None:
    run.engine.forward(torch.zeros(3, 7))
    run.engine._backward_prologue()
    run.work(4)

    run.engine.forward(torch.zeros(3, 7)) if next_call == "forward" else run.engine.step()

    run.work(13)
    assert run.phase() == "other"
    assert run.seconds()["backward"] == 4


def test_a_discarded_window_has_no_micro_batches_and_its_time_is_known(run: Run) -> None:
    run.micro_batch(64, loss=9.0)
    run.engine.num_backward = 0
    run.hooks.discard_window()
    for _ in range(2):
        run.micro_batch(3)
        run.engine.step()

    [step] = run.steps
    assert (step.micro_batches, step.samples, step.losses) == (2, 6, [0.5, 0.5])
    assert step.discarded_ns == 5_000_000_000


@pytest.mark.parametrize(
    ("saves", "saved"), [(True, True), (None, True), ("folder", True), (False, False)]
)
def test_a_checkpoint_is_saved_unless_the_engine_says_that_it_is_not(
    run: Run, saves: Any, saved: bool
) -> None:
    run.engine.saves = saves

    result = run.engine.save_checkpoint()

    assert result is saves
    assert run.events == [("save", "checkpoint"), ("saved", saved, "checkpoint")]
    assert run.seconds() == {"checkpoint": 7}


def test_a_checkpoint_that_raises_is_not_saved(run: Run) -> None:
    run.engine.error = OSError("disk full")

    with pytest.raises(OSError, match="disk"):
        run.engine.save_checkpoint()

    assert run.events == [("save", "checkpoint"), ("saved", False, "checkpoint")]


@pytest.mark.parametrize("name", ["save_checkpoint", "load_checkpoint"])
def test_a_checkpoint_on_another_thread_does_not_change_the_phase_of_training(
    run: Run, name: str
) -> None:
    run.phases.enter(FORWARD)
    call_on_thread(getattr(run.engine, name))

    assert run.phase() == "forward"
    assert not run.seconds().get("checkpoint")


def test_training_may_move_to_another_thread_whose_checkpoints_are_phases(
    run: Run,
) -> None:
    def train() -> None:
        for _ in range(2):
            run.micro_batch()
            run.engine.step()
        run.engine.save_checkpoint()
        run.engine.load_checkpoint()

    call_on_thread(train)
    run.engine.save_checkpoint()  # this thread does not train any more

    phases = [event[-1] for event in run.events if event[0] in ("save", "saved")]
    assert phases == ["checkpoint", "checkpoint", "other", "other"]
    assert run.seconds() == {
        "forward": 4,
        "backward": 6,
        "optimizer": 10,
        "checkpoint": 7 + 11,
        "other": 7,
    }


def test_an_evaluation_on_another_thread_does_not_make_it_the_training_thread(run: Run) -> None:
    def evaluate() -> None:
        with torch.no_grad():
            run.engine.forward(torch.zeros(2, 7))

    call_on_thread(evaluate)
    run.engine.save_checkpoint()

    assert run.seconds() == {"eval": 2, "checkpoint": 7}


def test_the_phase_of_a_checkpoint_ends_although_another_thread_makes_a_step_meanwhile(
    run: Run,
) -> None:
    work, run.work = run.work, lambda seconds: None

    def step_within(seconds: int) -> None:
        run.work = work
        call_on_thread(run.engine.step)
        work(seconds)

    run.work = step_within
    run.engine.save_checkpoint()

    assert run.phase() == "other"


def call_on_thread(function: Callable[[], object]) -> None:
    thread = Thread(target=function)
    thread.start()
    thread.join()


def test_loading_is_a_checkpoint_phase_and_counts_none(run: Run) -> None:
    result = run.engine.load_checkpoint()

    assert (result, run.events, run.seconds()) == ("loaded", [], {"checkpoint": 11})


def test_an_engine_without_hooks_works_as_before(run: Run) -> None:
    kept = run.engine.forward
    run.hooks.restore()

    for _ in range(2):
        run.micro_batch()
        run.engine.step()
    kept(torch.zeros(2, 7))

    assert not {"forward", "backward", "step", "save_checkpoint"} & vars(run.engine).keys()
    assert (run.steps, run.events, run.seconds().keys()) == ([], [], {"other"})


def test_the_cost_of_the_hooks_is_counted(run: Run) -> None:
    run.micro_batch()

    assert 0 < run.hooks.cost_ns < 60_000_000_000


class PipelineEngine(Engine):
    """Runs a schedule of instructions in `train_batch` and `eval_batch`."""

    is_first = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.pipe_buffers = {"inputs": [torch.zeros(2, 7, dtype=torch.long), torch.zeros(3, 11)]}

    def is_first_stage(self) -> bool:
        """Whether this stage reads the data."""
        return self.is_first

    def instruct(self, kind: type, **options: Any) -> None:
        """Run one instruction."""
        self._INSTRUCTION_MAP[kind](self, **options)

    def train_batch(self) -> torch.Tensor:
        """Run a schedule."""
        self.run.work(1)
        for kind in (LoadMicroBatch, RecvActivation):
            self.instruct(kind)
        for buffer, phase in ((0, 0), (1, 0), (1, 1)):
            self.instruct(ForwardPass, buffer_id=buffer, **({"phase": 1} if phase else {}))
        for kind in (SendActivation, RecvGrad, BackwardPass, SendGrad, CommitP2P):
            self.instruct(kind)
        for kind in (ReduceTiedGrads, ReduceGrads, OptimizerStep):
            self.instruct(kind)
        self.global_steps += 1
        return torch.tensor(0.125)

    def eval_batch(self) -> None:
        """Run forward passes."""
        self.run.work(1)
        with torch.no_grad():
            self.instruct(ForwardPass, buffer_id=0)


class Instruction:
    """An instruction takes a second for each letter of its name."""


class LoadMicroBatch(Instruction): ...


class RecvActivation(Instruction): ...


class ForwardPass(Instruction): ...


class SendActivation(Instruction): ...


class RecvGrad(Instruction): ...


class BackwardPass(Instruction): ...


class SendGrad(Instruction): ...


class CommitP2P(Instruction): ...


class ReduceTiedGrads(Instruction): ...


class ReduceGrads(Instruction): ...


class OptimizerStep(Instruction): ...


def instruction(kind: type) -> Callable[..., None]:
    def execute(engine: PipelineEngine, **options: Any) -> None:
        engine.run.work(len(kind.__name__))

    return execute


INSTRUCTIONS: dict[type, Callable[..., None]] = {
    kind: instruction(kind) for kind in Instruction.__subclasses__()
}
PipelineEngine._INSTRUCTION_MAP = INSTRUCTIONS  # type: ignore[attr-defined]


@pytest.fixture
def pipeline() -> Run:
    return Run(PipelineEngine)


def test_the_instructions_of_a_pipeline_have_phases(pipeline: Run) -> None:
    pipeline.engine.train_batch()  # type: ignore[attr-defined]

    assert pipeline.seconds() == {
        "other": 1 + len("CommitP2P"),
        "data": len("LoadMicroBatch"),
        "forward": len("RecvActivation") + 3 * len("ForwardPass") + len("SendActivation"),
        "backward": len("RecvGrad") + len("BackwardPass") + len("SendGrad"),
        "optimizer": len("ReduceTiedGrads") + len("ReduceGrads") + len("OptimizerStep"),
    }


def test_the_first_stage_counts_the_samples_that_it_has_loaded(pipeline: Run) -> None:
    pipeline.sample_in_detail()

    pipeline.engine.train_batch()  # type: ignore[attr-defined]

    assert pipeline.steps == [
        StepCounts(micro_batches=5, samples=5, tokens=14, sequence_length=7, losses=[0.125])
    ]
    assert pipeline.events == [("batch", 2, 1), ("batch", 3, 2), ("update", "optimizer")]


def test_another_stage_has_the_configured_samples(
    pipeline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PipelineEngine, "is_first", False)

    pipeline.engine.train_batch()  # type: ignore[attr-defined]

    assert pipeline.steps == [StepCounts(micro_batches=5, samples=5 * 3, losses=[0.125])]


def test_an_evaluation_of_a_pipeline_is_no_step(pipeline: Run) -> None:
    pipeline.engine.eval_batch()  # type: ignore[attr-defined]

    assert pipeline.seconds() == {"eval": 1 + len("ForwardPass")}
    assert (pipeline.steps, pipeline.events) == ([], [])


def test_the_map_of_a_pipelines_class_is_restored(pipeline: Run) -> None:
    during = pipeline.engine._INSTRUCTION_MAP  # type: ignore[attr-defined]

    pipeline.hooks.restore()

    assert during is not INSTRUCTIONS
    assert during[CommitP2P] is INSTRUCTIONS[CommitP2P]
    assert pipeline.engine._INSTRUCTION_MAP is INSTRUCTIONS  # type: ignore[attr-defined]
    assert "_INSTRUCTION_MAP" not in vars(pipeline.engine)


def test_a_map_that_an_engine_had_of_its_own_is_restored() -> None:
    own = dict(INSTRUCTIONS)

    def make(run: Run) -> Engine:
        engine = PipelineEngine(run)
        engine._INSTRUCTION_MAP = own  # type: ignore[attr-defined]
        return engine

    run = Run(make)
    run.hooks.restore()

    assert vars(run.engine)["_INSTRUCTION_MAP"] is own


def test_a_map_that_another_library_has_set_stays(pipeline: Run) -> None:
    other = dict(INSTRUCTIONS)
    pipeline.engine._INSTRUCTION_MAP = other  # type: ignore[attr-defined]

    pipeline.hooks.restore()

    assert vars(pipeline.engine)["_INSTRUCTION_MAP"] is other


@pytest.mark.parametrize(
    ("output", "loss"),
    [(torch.tensor(3.0), 3.0), (torch.tensor([5.0]), 5.0), (torch.zeros(2), None), (7.0, None)],
)
def test_a_tensor_of_one_element_is_a_loss(output: Any, loss: float | None) -> None:
    assert extract_loss(output) == loss

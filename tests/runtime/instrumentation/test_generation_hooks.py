"""Tests of generation: calls of `generate` are a phase, and the module works as if unwatched."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.phase_timer import FORWARD, GENERATE, PhaseTimer
from zerowatch.runtime.instrumentation.engine_hooks import EngineHooks
from zerowatch.runtime.instrumentation.generated_tokens import GenerationCounts
from zerowatch.runtime.instrumentation.raw_step import StepCounts
from zerowatch.runtime.memory.memory_reader import MemoryReader


class Decoder(torch.nn.Module):
    """Appends its weight to each prompt, as transformers' decoders append tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(3.0))
        self.config = SimpleNamespace(is_encoder_decoder=False)
        self.generation_config = SimpleNamespace(eos_token_id=None)
        self.during: Any = lambda: None

    def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return each sequence with one new token."""
        self.during()
        return torch.nn.functional.pad(input_ids, (0, 1), value=int(self.weight.detach()))


class Engine:
    """An engine with a module, whose steps the test ends."""

    global_steps = skipped_steps = 0

    def __init__(self) -> None:
        self.module = Decoder()

    def step(self) -> None:
        """End a step."""
        self.global_steps += 1

    def managed_gradient_accumulation(self) -> bool:
        """The engine decides when a step ends."""
        return True

    def is_gradient_accumulation_boundary(self) -> bool:
        """Each step ends."""
        return True


class HybridEngine(Engine):
    """An engine whose own `generate` replaces that of its module, as DeepSpeed's does."""

    def __init__(self) -> None:
        super().__init__()
        self._generate = self.module.generate
        self.module.generate = self.generate

    def generate(self, *inputs: Any, **options: Any) -> Any:
        """Generate with the module's own method."""
        return self._generate(*inputs, **options)


class Run:
    """An engine with hooks, on a clock that the test sets and a memory probe."""

    def __init__(self, engine: Engine, generated_before: GenerationCounts | None = None) -> None:
        self.engine = engine
        self.now_ns, self.peak_bytes = 0, 100.0
        self.reader = MemoryReader({"cpu": self._read}, {})
        self.phases = PhaseTimer(lambda: self.now_ns)
        self.fail_open = FailOpen()
        self.steps: list[StepCounts] = []
        memory = SimpleNamespace(
            on_batch_start=lambda *_: None,
            on_backward_end=lambda: None,
            on_update_start=lambda: None,
            on_exception=lambda error: None,
            on_generation_start=self.reader.begin_generation,
            on_generation_end=self.reader.end_generation,
        )
        collector = SimpleNamespace(on_step_end=lambda engine, counts: self.steps.append(counts))
        checkpoints = SimpleNamespace()
        self.hooks = EngineHooks(
            engine, self.phases, self.fail_open, memory, collector, checkpoints, generated_before
        )
        engine.module.during = self._work

    def generated_seconds(self) -> float:
        """End the step, and return its time of generation."""
        return self.phases.drain()[GENERATE] / 1e9

    def _work(self) -> None:
        self.now_ns += 2_000_000_000
        self.peak_bytes = 900.0

    def _read(self) -> dict[str, float]:
        peak, self.peak_bytes = self.peak_bytes, 100.0
        return {"allocated": 100.0, "peak_allocated": peak}


PROMPT = torch.tensor([[1, 2], [3, 4]])


@pytest.fixture(params=[Engine, HybridEngine])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    run = Run(request.param())
    yield run
    assert not run.fail_open.failures


def test_a_call_is_a_phase_with_its_tokens_in_the_next_step(run: Run) -> None:
    result = run.engine.module.generate(PROMPT)
    run.engine.module.generate(input_ids=PROMPT)
    run.engine.step()
    run.engine.step()

    assert result.tolist() == [[1, 2, 3], [3, 4, 3]]
    assert run.generated_seconds() == 4.0
    assert run.hooks.generated_ns >= 0
    first, second = (step.generation for step in run.steps)
    assert first is not None
    assert (first.calls, first.sequences, first.total_tokens()) == (2, 4, 4)
    assert second is None


def test_a_call_of_the_hybrid_engine_itself_counts_once() -> None:
    run = Run(HybridEngine())

    run.engine.generate(PROMPT)
    run.engine.step()

    assert run.generated_seconds() == 2.0
    assert run.steps[0].generation.total_tokens() == 2


def test_a_call_within_a_call_counts_once(run: Run) -> None:
    module = run.engine.module

    def generate_again() -> None:
        module.during = run._work
        module.generate(PROMPT)

    module.during = generate_again
    module.generate(PROMPT)
    run.engine.step()

    assert run.generated_seconds() == 2.0
    assert run.steps[0].generation.calls == 1


def test_a_call_within_a_forward_pass_is_part_of_it(run: Run) -> None:
    run.phases.enter(FORWARD)
    run.engine.module.generate(PROMPT)
    run.phases.leave()
    run.engine.step()

    assert run.phases.drain()[FORWARD] == 2e9
    assert run.steps[0].generation is None


def test_a_call_on_another_thread_changes_no_phase(run: Run) -> None:
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.append(run.engine.module.generate(PROMPT)))
    thread.start()
    thread.join()
    run.engine.step()

    assert results[0].shape == (2, 3)
    assert run.generated_seconds() == 0
    assert run.steps[0].generation is None


def test_a_call_that_raises_ends_the_phase_and_passes_the_error_on(run: Run) -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    run.engine.module.during = fail
    with pytest.raises(RuntimeError, match="no memory"):
        run.engine.module.generate(PROMPT)
    run.engine.module.during = run._work
    run.engine.module.generate(PROMPT)
    run.engine.step()

    assert run.generated_seconds() == 2.0
    assert run.steps[0].generation.calls == 1


def test_a_dropped_hook_of_one_wrapper_leaves_those_of_the_other_in_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = HybridEngine()
    run = Run(engine)
    with monkeypatch.context() as patch:
        patch.setattr(PhaseTimer, "enter", fail)
        engine.module.generate(PROMPT)
    engine.module.generate(PROMPT)

    engine.generate(PROMPT)
    engine.generate(PROMPT)

    assert run.phases.current != GENERATE
    assert run.hooks.take_generated().calls == 2
    assert run.fail_open.failures == {"generate": 1}


def fail(*_: object) -> None:
    raise ValueError


def test_memory_of_a_generation_is_apart_from_the_step(run: Run) -> None:
    run.peak_bytes = 300.0
    run.engine.module.generate(PROMPT)
    run.peak_bytes = 500.0

    assert run.reader.sample_step()["cpu"]["peak_allocated"] == 500.0
    assert run.reader.take_generation_peaks() == {"cpu": {"peak_allocated": 900.0}}
    assert run.reader.take_generation_peaks() == {}


def test_a_step_without_a_reading_keeps_the_peak_before_the_generation(run: Run) -> None:
    run.peak_bytes = 700.0
    run.engine.module.generate(PROMPT)

    assert run.reader.sample_step()["cpu"]["peak_allocated"] == 700.0


def test_a_copy_of_a_watched_module_generates_with_its_own_weights() -> None:
    run = Run(Engine())
    run.engine.module.during = int
    copied = copy.deepcopy(run.engine.module)
    restored = pickle.loads(pickle.dumps(run.engine.module))

    for each in (copied, restored):
        with torch.no_grad():
            each.weight.fill_(7.0)
        assert each.generate(PROMPT)[0].tolist() == [1, 2, 7]
    run.engine.step()

    assert run.steps[0].generation is None  # a copy is not watched


def test_restoring_leaves_the_module_and_the_engine_as_they_were(run: Run) -> None:
    unwatched = type(run.engine)()

    run.hooks.restore()

    assert ("generate" in vars(run.engine.module)) == ("generate" in vars(unwatched.module))
    assert "generate" not in vars(run.engine)
    run.engine.module.generate(PROMPT)
    assert run.generated_seconds() == 0


def test_a_generation_before_the_engine_is_replaced_counts_with_the_next_step() -> None:
    run = Run(Engine())
    run.engine.module.generate(PROMPT)
    run.hooks.restore()

    replaced = Run(Engine(), run.hooks.take_generated())
    replaced.engine.module.generate(PROMPT)
    replaced.engine.step()

    assert replaced.steps[0].generation.calls == 2
    assert replaced.steps[0].generation.total_tokens() == 4


def test_a_module_that_does_not_generate_is_left_alone() -> None:
    engine = Engine()
    engine.module = torch.nn.Linear(1, 1)
    before = dict(vars(engine.module))

    run = Run(engine)

    del engine.module.during
    assert vars(engine.module) == before
    run.hooks.restore()

"""Installs the hooks of one watch: on its engine, on data loading, frameworks and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...metrics.catalog import generation
from ..collectives.call_batch import CallBatch
from ..collectives.group_roles import set_roles
from ..collectives.unseen_calls import UnseenCallCounter
from ..common.phase_timer import CHECKPOINT
from ..common.torch_engine import TorchEngine
from .checkpoint_metrics import CheckpointMetrics
from .dataloader_hooks import DataLoaderHooks
from .engine_hooks import EngineHooks
from .framework_hooks import FrameworkHooks
from .generated_tokens import GenerationCounts
from .generation_hooks import is_hybrid
from .memory_hooks import MemoryHooks
from .notebook_cells import NotebookCells
from .profiled_steps import ProfiledSteps
from .raw_step import RawStep
from .step_collector import StepCollector
from .torch_hooks import TorchHooks
from .watch_context import WatchContext


class EngineInstrumentation:
    """Installs the hooks of one watch, and removes them with `restore`.

    The wrappers of collectives are not part of these hooks, because they serve the whole process.

    Attributes:
        checkpoints: Counts the checkpoints.
    """

    def __init__(
        self,
        context: WatchContext,
        engine: Any,
        memory: MemoryHooks,
        enqueue: Callable[[CallBatch | RawStep], None],
        profiler: ProfiledSteps | None,
    ) -> None:
        """Install the hooks.

        Args:
            context: The watch.
            engine: The first engine.
            memory: The memory hooks, which the engine's hooks call.
            enqueue: Called with each step, and with the calls issued between two engines.
            profiler: Profiles some steps. None if profiling is off.
        """
        self._context = context
        self._memory = memory
        self._enqueue = enqueue
        self._profiler = profiler
        self._earlier_ns = self._earlier_generated_ns = 0
        self.checkpoints = CheckpointMetrics(
            context.recorder, context.fail_open, context.phase_timer
        )
        if is_hybrid(engine):  # other engines rarely generate
            context.recorder.start_counters(generation.METRICS)
        self._engine_hooks = self._hook(engine)
        self._dataloader_hooks = DataLoaderHooks(
            context.phase_timer, context.fail_open, self._engine_hooks
        )
        self._cells = NotebookCells(context.fail_open.wrap("notebook", context.phase_timer.stop))
        self._framework_hooks = FrameworkHooks(
            context.phase_timer, context.fail_open, self._engine_hooks
        )

    @property
    def cost_ns(self) -> int:
        """Nanoseconds that the hooks on engines have taken on the training thread."""
        return self._earlier_ns + self._engine_hooks.cost_ns

    @property
    def forward_only_ns(self) -> int:
        """Nanoseconds in forward and evaluation since the last step; 0 after a backward pass."""
        return self._context.phase_timer.forward_only_ns()

    @property
    def generated_ns(self) -> int:
        """Nanoseconds of the host in calls of `generate`, since the hooks were installed."""
        return self._earlier_generated_ns + self._engine_hooks.generated_ns

    @property
    def last_cell_failed(self) -> bool | None:
        """Whether the last cell of a notebook raised. None if no cell has ended, as in a script."""
        return self._cells.last_failed

    def rebind_engine(self, engine: Any) -> None:
        """Move the hooks to another engine, between two steps.

        Collectives between the two engines do not belong to any step. An example is the broadcast
        of the new engine's weights.
        """
        self._engine_hooks.restore()
        generated = self._engine_hooks.take_generated()
        self._earlier_ns += self._engine_hooks.cost_ns
        self._earlier_generated_ns += self._engine_hooks.generated_ns
        self._memory.rebind_engine(engine)
        calls = self._context.call_recorder
        set_roles(calls.groups, engine)
        self._enqueue(calls.drain())
        calls.groups.drain_coverage()
        self._engine_hooks = self._hook(engine, generated)
        self._dataloader_hooks.engine_hooks = self._engine_hooks
        self._framework_hooks.engine_hooks = self._engine_hooks

    def discard_window(self) -> None:
        """Discard the micro-batches since the last step."""
        self._context.step_errors.add(
            "window_discarded",
            "zerowatch.WindowDiscarded",
            "the micro-batches of this step so far were discarded after an error on this rank or "
            "another, and are repeated or skipped",
        )
        self._context.fail_open.call("discard window", self._engine_hooks.discard_window)
        if self._context.device_phases is not None:
            self._context.device_phases.discard()

    @contextmanager
    def checkpoint_phase(self) -> Iterator[None]:
        """Return a context manager; time inside it is checkpoint time, not training or a hang.

        On other threads than the training thread, it is no phase.
        """
        call, phase_timer = self._context.fail_open.call, self._context.phase_timer
        call("checkpoint phase", phase_timer.enter_pause, CHECKPOINT)
        try:
            yield
        finally:
            call("checkpoint phase", phase_timer.leave_pause)

    def restore(self) -> None:
        """Remove the hooks. Safe to call twice."""
        self._engine_hooks.restore()
        self._dataloader_hooks.restore()
        self._cells.restore()
        self._framework_hooks.restore()

    def _hook(
        self, engine: Any, generated_before: GenerationCounts | None = None
    ) -> EngineHooks | TorchHooks:
        context, memory = self._context, self._memory
        if isinstance(engine, TorchEngine):
            counter = UnseenCallCounter(context.call_recorder.groups)
            collector = StepCollector(
                context, engine, memory, self._enqueue, self._profiler, counter.take
            )
            return TorchHooks(
                engine, context.phase_timer, context.fail_open, memory, collector, counter.mark
            )
        collector = StepCollector(context, engine, memory, self._enqueue, self._profiler)
        return EngineHooks(
            engine,
            context.phase_timer,
            context.fail_open,
            memory,
            collector,
            self.checkpoints,
            generated_before,
        )

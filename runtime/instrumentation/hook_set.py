"""What a watch has in the training: hooks on its engine, on data loading and the collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..collectives.batch import Batch
from ..collectives.roles import p2p_role, role_of
from ..common.phase_timer import CHECKPOINT
from .dataloader_hooks import DataHooks
from .engine_hooks import EngineHooks
from .memory_hooks import MemoryHooks
from .raw_step import RawStep
from .step_closer import StepCollector
from .watch_context import WatchContext


class EngineInstrumentation:
    """Hooks of one watch until `restore`; its collectives are those of the whole process.

    Args:
        context: The watch.
        engine: The engine to begin with.
        memory: What the engine's hooks call.
        give: Takes what was noted.
        profile: Is told the number of each step; None if not needed.
    """

    def __init__(
        self,
        context: WatchContext,
        engine: Any,
        memory: MemoryHooks,
        give: Callable[[Batch | RawStep], None],
        profile: Callable[[int], None] | None,
    ) -> None:
        self._context = context
        self._memory = memory
        self._give = give
        self._profile = profile
        self._earlier_ns = 0
        self._engine_hooks = self._hook(engine)
        self._data_hooks = DataHooks(
            context.clock, context.fail_open, lambda: self._engine_hooks.training
        )

    @property
    def cost_ns(self) -> int:
        """Nanoseconds that the hooks on engines took on the training thread."""
        return self._earlier_ns + self._engine_hooks.cost_ns

    def rebind_engine(self, engine: Any) -> None:
        """Take the hooks from one engine and put them on another, between two windows.

        What was sent meanwhile, as the weights of the new engine, is in no step.
        """
        self._engine_hooks.restore()
        self._earlier_ns += self._engine_hooks.cost_ns
        self._memory.rebind_engine(engine)
        calls = self._context.call_recorder
        calls.groups.set_roles(role_of, p2p_role)
        self._give(calls.drain())
        calls.groups.drain_coverage()
        self._engine_hooks = self._hook(engine)

    def discard_window(self) -> None:
        """Forget the micro-batches since the last step."""
        self._context.fail_open.wrap("discard window", self._engine_hooks.discard_window)()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Count the time inside as that of a checkpoint: no training, and no hang either."""
        wrap, clock = self._context.fail_open.wrap, self._context.clock
        wrap("suspend", clock.enter)(CHECKPOINT)
        try:
            yield
        finally:
            wrap("suspend", clock.leave)()

    def restore(self) -> None:
        """Take the hooks off. Safe to call twice."""
        self._engine_hooks.restore()
        self._data_hooks.restore()

    def _hook(self, engine: Any) -> EngineHooks:
        context, memory = self._context, self._memory
        close_step = StepCollector(
            engine,
            context.clock,
            context.call_recorder,
            context.fail_open,
            self._give,
            memory.step_ended,
            self._profile,
        )
        return EngineHooks(engine, context.clock, context.fail_open, memory, close_step)

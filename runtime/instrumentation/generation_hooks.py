"""Measures calls of `generate`, as of DeepSpeed's hybrid engine: a phase, tokens and memory.

Scripts for reinforcement learning generate text and train on it in turns, with one engine. They
call `generate` of the engine's module, or of the hybrid engine itself, which then replaces the
module's method by its own.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter_ns
from typing import Any

from ..common.fail_open import FailOpen
from ..common.phase_timer import GENERATE, PASSES, PhaseTimer
from .generated_tokens import GenerateOptions, GenerationCounts, count_result, generate_options
from .memory_hooks import MemoryHooks

GENERATE_METHOD = "generate"


def generating_objects(engine: Any) -> Iterator[Any]:
    """Yield the objects whose method `generate` a script calls: the module, a hybrid engine."""
    if callable(getattr(engine.module, GENERATE_METHOD, None)):
        yield engine.module
    if is_hybrid(engine):
        yield engine


def is_hybrid(engine: Any) -> bool:
    """Whether the engine is DeepSpeed's hybrid engine, the only one whose class generates."""
    return hasattr(type(engine), GENERATE_METHOD)


class GenerateWrapper:
    """Calls a function in place of a method. A copy or a pickle of the owner has the method itself.

    A script may copy the module, such as for a reference model. A wrapper that is a function would
    be copied with it, and the copy would generate with the weights of the original.
    """

    def __init__(self, call: Callable[..., Any], method: Callable[..., Any]) -> None:
        self._call, self._method = call, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the method of the copied owner."""
        return copy.deepcopy(self._method, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the method."""
        return copy.copy, (self._method,)


class GenerationHooks:
    """Measures the outermost calls of `generate` on the training thread.

    Calls within a forward or backward pass, and on other threads, are not measured.

    Attributes:
        generated_ns: Nanoseconds of the host in these calls.
        counts: What was generated since the last step; None if nothing was.
    """

    def __init__(
        self,
        engine: Any,
        phase_timer: PhaseTimer,
        memory: MemoryHooks,
        fail_open: FailOpen,
        earlier: GenerationCounts | None = None,
    ) -> None:
        """Create the hooks.

        Args:
            engine: A DeepSpeed engine.
            phase_timer: The phases of training.
            memory: Keeps the memory of generation apart.
            fail_open: Guards the functions that run inside training.
            earlier: The counts since the last step of the engine that this one replaces.
        """
        self.generated_ns = 0
        self._module = weakref.ref(engine.module)
        self._phase_timer = phase_timer
        self._begin_memory = fail_open.wrap("generation memory", memory.on_generation_start)
        self._end_memory = fail_open.wrap("generation memory", memory.on_generation_end)
        # Calls do not depend on each other.
        self._read_options = fail_open.wrap("generation", generate_options, is_kept=True)
        self._count_result = fail_open.wrap("generation", count_result, is_kept=True)
        self._began_ns: int | None = None  # None unless a measured call runs
        self._options: GenerateOptions | None = None
        self.counts = earlier

    def take_counts(self) -> GenerationCounts | None:
        """Return the counts since the last call; None if nothing was generated."""
        counts, self.counts = self.counts, None
        return counts

    def on_start(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Begin a call, and return whether it is measured. Only then must `on_end` follow."""
        is_nested = self._began_ns is not None
        if is_nested or not self._phase_timer.is_on_training_thread():
            return False
        if self._phase_timer.current in PASSES:
            return False
        self._options = self._read_options(self._module(), args, kwargs)
        self._phase_timer.enter(GENERATE)
        self._begin_memory()
        self._began_ns = perf_counter_ns()
        return True

    def on_end(self, result: Any, returned: bool) -> None:
        """End a measured call."""
        if self._began_ns is None:
            return
        self.generated_ns += perf_counter_ns() - self._began_ns
        self._began_ns = None
        self._phase_timer.leave()
        self._end_memory()
        if returned:
            counted = self._count_result(result, self._options)
            self.counts = self.counts or GenerationCounts()
            self.counts.add(*(counted or (None, None)))

"""Measures the time that the training thread waits for the next batch of a data loader.

The hooks wrap `__next__` of the iterators of torch's DataLoader and of DeepSpeed's loader. Data
from other sources, such as a plain generator, is not measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, Protocol

from torch.utils.data import dataloader as torch_dataloader

from ..common.fail_open import FailOpen
from ..common.patching import PatchSet
from ..common.phase_timer import DATA, EVAL, PhaseTimer


class TrainingState(Protocol):
    """The hooks on an engine, as far as data loading needs them."""

    @property
    def loads_training_data(self) -> bool:
        """Whether a batch that is loaded now is one to train on."""


def loader_classes() -> Iterator[type]:
    """Yield the classes of iterators over batches. DeepSpeed's is absent until it is imported."""
    yield torch_dataloader._BaseDataLoaderIter  # with and without worker processes
    deepspeed = sys.modules.get("deepspeed.runtime.dataloader")
    if deepspeed is not None:
        yield deepspeed.DeepSpeedDataLoader


class DataLoaderHooks:
    """Counts the time in a loader's `__next__` as data loading, or as evaluation, until `restore`.

    Only the outermost loader on the training thread counts. The phase is `data` if the batch is
    one to train on, else `eval`.

    Attributes:
        engine_hooks: The hooks on the engine that trains with the data. A rebuild replaces them.
    """

    def __init__(
        self, phase_timer: PhaseTimer, fail_open: FailOpen, engine_hooks: TrainingState
    ) -> None:
        self._phase_timer = phase_timer
        self.engine_hooks = engine_hooks
        self._open = True
        self._enter = fail_open.wrap("data", self._on_start)
        self._leave = fail_open.wrap("data", phase_timer.leave)
        self._patches = PatchSet()
        for owner in loader_classes():
            self._patches.add(owner, "__next__", self._wrapper)

    def restore(self) -> None:
        """Restore the loader classes. Safe to call twice."""
        self._open = False
        self._patches.restore()

    def _on_start(self) -> None:
        self._phase_timer.enter(DATA if self.engine_hooks.loads_training_data else EVAL)

    def _wrapper(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def hooked(iterator: Any) -> Any:
            timer = self._phase_timer
            is_outermost = self._open and timer.current not in (DATA, EVAL)
            if not is_outermost or get_ident() != timer.training_thread:
                return original(iterator)
            self._enter()
            try:
                return original(iterator)
            finally:
                self._leave()

        return hooked

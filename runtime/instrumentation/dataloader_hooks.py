"""Hooks on data loading: the time that the training thread waits for the next batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from torch.utils.data import dataloader as torch_dataloader

from ..common.fail_open import FailOpen
from ..common.patching import AttributePatch
from ..common.phase_timer import DATA, EVAL, PhaseTimer

LOADER_CLASSES = (torch_dataloader._BaseDataLoaderIter, DeepSpeedDataLoader)


class DataHooks:
    """Times `__next__` of loaders, the outermost on the training thread, until `restore`."""

    def __init__(
        self, clock: PhaseTimer, fail_open: FailOpen, is_training: Callable[[], bool]
    ) -> None:
        self._thread = threading.get_ident()
        self._clock = clock
        self._is_training = is_training
        self._open = True
        self._enter = fail_open.wrap("data", self._begin)
        self._leave = fail_open.wrap("data", clock.leave)
        self._wraps = [AttributePatch(owner, "__next__", self._wrapper) for owner in LOADER_CLASSES]

    def restore(self) -> None:
        """Take the hooks off again."""
        self._open = False
        for wrap in reversed(self._wraps):
            wrap.restore()
        self._wraps.clear()

    def _begin(self) -> None:
        self._clock.enter(DATA if self._is_training() else EVAL)

    def _wrapper(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def hooked(iterator: Any) -> Any:
            outermost = self._clock.current not in (DATA, EVAL)
            if not (self._open and outermost and threading.get_ident() == self._thread):
                return original(iterator)
            self._enter()
            try:
                return original(iterator)
            finally:
                self._leave()

        return hooked

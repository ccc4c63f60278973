"""Calls functions after each step of any optimizer, without torch's hooks of all optimizers.

torch iterates over the dictionary of its hooks while it calls them. If a hook is added or removed
meanwhile, `optimizer.step` raises "OrderedDict mutated during iteration": a watch opens within the
first step of a script, and the garbage collector or another thread may close one at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .patching import AttributePatch

StepCallback = Callable[[torch.optim.Optimizer], object]

# torch calls it after each step, before the hooks; it exists for profilers, and does nothing.
METHOD = "_optimizer_step_code"


class StepCallbackHandle:
    """Ends the calls of one function."""

    def __init__(self, callback: StepCallback) -> None:
        self.callback = callback

    def remove(self) -> None:
        """End the calls. Safe to call twice, on any thread, and within a step."""
        with _changing:
            _callbacks.remove(self)


class _Callbacks:
    """The functions of this process, and the patch of torch that calls them, if there are any."""

    def __init__(self) -> None:
        self._handles: tuple[StepCallbackHandle, ...] = ()  # replaced, so that a loop goes on
        self._patch: AttributePatch | None = None

    def add(self, handle: StepCallbackHandle) -> None:
        self._handles = (*self._handles, handle)
        if self._patch is None:
            self._patch = AttributePatch(torch.optim.Optimizer, METHOD, self._wrapper)

    def remove(self, handle: StepCallbackHandle) -> None:
        self._handles = tuple(each for each in self._handles if each is not handle)
        if not self._handles and self._patch is not None:
            patch, self._patch = self._patch, None
            patch.restore()

    def _wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(optimizer: torch.optim.Optimizer) -> None:
            original(optimizer)
            # Also where the step is being compiled: torch.compile leaves the call to Python.
            for handle in self._handles:
                handle.callback(optimizer)

        return stepped


_callbacks = _Callbacks()
_changing = threading.RLock()  # the collector may remove one while another is added


def call_after_steps(callback: StepCallback) -> StepCallbackHandle:
    """Call a function with the optimizer after each step of any optimizer.

    Args:
        callback: Called on the thread of the step, before the optimizer's own hooks. It must not
            raise.

    Returns:
        A handle, whose `remove` ends the calls.

    Examples:
        >>> handle = call_after_steps(lambda optimizer: print(type(optimizer).__name__))
    """
    handle = StepCallbackHandle(callback)
    with _changing:
        _callbacks.add(handle)
    return handle

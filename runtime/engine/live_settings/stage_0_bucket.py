"""The bucket of stage 0 and BF16_Optimizer: DeepSpeed has no setting, only a default argument.

They flatten up to 500 million elements of gradients for one all-reduce: as much memory again as the
gradients take. `engine.allreduce_gradients` is wrapped to pass another size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from deepspeed.runtime.engine import MEMORY_OPT_ALLREDUCE_SIZE

from ...common.patching import AttributePatch
from ...common.undo import Undo, UndoOnce


class _Reduction:
    """In place of `engine.allreduce_gradients`; inert without a size.

    Slots, since `AttributePatch` copies the original's attributes over those of what it puts there.
    """

    __slots__ = ("__dict__", "__weakref__", "_original", "elements")

    def __init__(self, original: Callable[..., Any], elements: int) -> None:
        self._original = original
        self.elements: int | None = elements

    def __call__(self, *given: Any, **named: Any) -> Any:
        if self.elements is not None and not given and "bucket_size" not in named:
            named["bucket_size"] = self.elements
        return self._original(*given, **named)


def get(engine: Any) -> int:
    """Return the elements that are flattened at once."""
    set_by_us = [each.elements for each in _ours(engine) if each.elements is not None]
    return set_by_us[0] if set_by_us else int(MEMORY_OPT_ALLREDUCE_SIZE)


def change(engine: Any, elements: int) -> Undo:
    """Have so many elements flattened at once."""
    made: list[_Reduction] = []

    def make(original: Callable[..., Any]) -> _Reduction:
        made.append(_Reduction(original, elements))
        return made[0]

    wrap = AttributePatch(engine, "allreduce_gradients", make)

    def undo() -> None:
        made[0].elements = None  # where somebody wrapped over it since
        wrap.restore()

    return UndoOnce(undo)


def _ours(engine: Any) -> Iterator[_Reduction]:
    """Yield ours, the outermost first, below other people's wrappers too."""
    function = engine.allreduce_gradients
    while function is not None:
        if isinstance(function, _Reduction):
            yield function
        function = getattr(function, "__wrapped__", None)

"""Several methods of one object, replaced until closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...common.patching import AttributePatch


class PatchSet:
    """Methods of one object in whose place others are called, until closed."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._wraps: list[AttributePatch] = []
        self._closed = False

    def replace(self, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a method by what `make` makes of the original."""

        def made(original: Callable[..., Any]) -> Callable[..., Any]:
            own = make(original)

            def call(*args: Any, **kwargs: Any) -> Any:
                return (original if self._closed else own)(*args, **kwargs)

            return call

        self._wraps.append(AttributePatch(self._owner, name, made))

    def close(self) -> None:
        """Put the originals back; where somebody wrapped over ours, it passes calls on."""
        self._closed = True
        for wrap in reversed(self._wraps):
            wrap.restore()

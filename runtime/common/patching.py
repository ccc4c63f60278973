"""Patches attributes, and restores them exactly.

After a restore the dictionary of the owner contains the same object as before, or no entry if it
had no entry. If the attribute was wrapped again in the meantime, our wrapper stays inside the
other wrapper. The caller must therefore make its wrapper call the original unchanged after a
restore.

wrapt is not used because it cannot restore. Also, a call of a wrapt wrapper takes three times as
long as a call of a closure (1.6 against 0.55 us, measured with wrapt 2.5).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

_ABSENT = object()


class AttributePatch:
    """Wraps one attribute of a module, class or instance, until `restore` is called.

    The patch has only weak references to the owner and to bound methods, so an engine can be freed.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Wrap the attribute.

        Args:
            owner: The object that has the attribute itself or through its class.
            name: The name of the attribute.
            make: Returns the replacement of the original callable.
        """
        self.name = name
        self._previous = vars(owner).get(name, _ABSENT)
        original = getattr(owner, name)
        wrapper = functools.wraps(original)(make(original))
        self._owner = weakref.ref(owner)
        self._wrapper = weakref.ref(wrapper)
        setattr(owner, name, wrapper)

    def restore(self) -> None:
        """Restore the attribute, unless it is restored already or was wrapped again."""
        owner, wrapper = self._owner(), self._wrapper()
        if owner is None or wrapper is None or vars(owner).get(self.name) is not wrapper:
            return
        if self._previous is _ABSENT:
            delattr(owner, self.name)
        else:
            setattr(owner, self.name, self._previous)


class PatchSet:
    """Patches of several attributes that are restored together."""

    def __init__(self) -> None:
        self._patches: list[AttributePatch] = []

    def __len__(self) -> int:
        """Return how many attributes are patched."""
        return len(self._patches)

    def add(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Wrap one more attribute; see `AttributePatch`."""
        self._patches.append(AttributePatch(owner, name, make))

    def add_existing(self, owner: Any, names: Iterable[str], make: Callable[[Any], Any]) -> None:
        """Wrap each of the attributes that the owner has."""
        for name in names:
            if hasattr(owner, name):
                self.add(owner, name, make)

    def restore(self) -> None:
        """Restore all attributes, the last one first. Safe to call twice."""
        for patch in reversed(self._patches):
            patch.restore()
        self._patches.clear()


class MethodPatches:
    """Replaces methods of one object, until `close` is called.

    If another wrapper still calls a replacement after `close`, the replacement calls the original.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._patches = PatchSet()
        self._closed = False

    def replace(self, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a method by the result of `make(original)`."""

        def make_call(original: Callable[..., Any]) -> Callable[..., Any]:
            replacement = make(original)

            def call(*args: Any, **kwargs: Any) -> Any:
                return (original if self._closed else replacement)(*args, **kwargs)

            return call

        self._patches.add(self._owner, name, make_call)

    def close(self) -> None:
        """Restore the methods. Safe to call twice."""
        self._closed = True
        self._patches.restore()

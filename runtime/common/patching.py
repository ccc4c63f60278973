"""Patches of attributes, which can be restored exactly.

After a restore the owner's own dictionary has the same object as before, or no entry if it had
none. If another wrapper was put around ours in the meantime, ours stays inside it. The caller must
therefore make its wrapper call the original unchanged after a restore.

wrapt is not used: it has no restore, and a call of its wrapper takes three times as long as that of
a closure (1.6 against 0.55 us, measured with wrapt 2.5).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

_ABSENT = object()


class AttributePatch:
    """Wraps one attribute of a module, class or instance, until `restore` is called.

    It has only weak references to the owner and to bound methods, so that an engine can be freed.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Wrap the attribute.

        Args:
            owner: Has the attribute, itself or by its class.
            name: The attribute.
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
        """Restore the attribute; do nothing the second time, or if it was wrapped again since."""
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
        """Wrap those of the attributes that the owner has."""
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

    After that, a replacement that another wrapper still calls passes the call to the original.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._patches = PatchSet()
        self._closed = False

    def replace(self, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a method by what `make` returns for the original."""

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

"""Patches of attributes that are restored exactly.

Restored means: the owner's own dictionary has the very same object as before, or no entry if it had
none. If another wrapper was put over ours meanwhile, ours stays below it; the caller must therefore
make a closed wrapper a plain pass-through.

wrapt is not used: it has no restore, and a call of its wrapper takes three times as long as that of
a closure (1.6 against 0.55 us, measured with wrapt 2.5).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

_ABSENT = object()


class AttributePatch:
    """A wrapper on one attribute of a module, class or instance, until `restore`.

    It references neither the owner nor a bound method strongly, so that an engine can be collected.
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

"""Replacing an attribute by a wrapper, so that it can be taken back exactly.

Restored means: the name is absent from the owner's own attributes again if it was absent, else the
very object that stood there is back. Where somebody wrapped over us since, ours stays below theirs;
the caller must therefore make a closed wrapper a plain pass-through.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

_ABSENT = object()


class AttributePatch:
    """One attribute of a module, class or instance that is wrapped until `restore`.

    Holds neither the owner nor a bound method of it, so that a watched engine can be collected.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Wrap.

        Args:
            owner: Whose attribute it is.
            name: The attribute.
            make: Gets the original callable and returns the function to put in its place.
        """
        self.name = name
        self._previous = vars(owner).get(name, _ABSENT)
        original = getattr(owner, name)
        wrapper = functools.wraps(original)(make(original))
        self._owner = weakref.ref(owner)
        self._wrapper = weakref.ref(wrapper)
        setattr(owner, name, wrapper)

    def restore(self) -> None:
        """Put back what was there; does nothing the second time, or where somebody wrapped over."""
        owner, wrapper = self._owner(), self._wrapper()
        if owner is None or wrapper is None or vars(owner).get(self.name) is not wrapper:
            return
        if self._previous is _ABSENT:
            delattr(owner, self.name)
        else:
            setattr(owner, self.name, self._previous)

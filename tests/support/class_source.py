"""Reads the source of a class once, because Python parses the whole module each time."""

from __future__ import annotations

import inspect
from functools import cache


@cache
def source_of(kind: type) -> str:
    """Return the source of a class."""
    return inspect.getsource(kind)

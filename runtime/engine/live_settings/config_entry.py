"""Reads and replaces single entries of a ds config, in the form in which they were given.

A path has the names of the nested blocks and, at its end, the key. DeepSpeed accepts the keys of
stage 3 with and without the prefix `stage3_`; a path has the prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

STAGE_3: Final = "stage3_"
MISSING: Final[Any] = object()  # the entry of a key that a ds config does not have


def entry_in(config: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Return the entry at a path, or `MISSING`."""
    found: Any = config
    for key in _path_in(config, path):
        if not isinstance(found, Mapping) or key not in found:
            return MISSING
        found = found[key]
    return found


def with_entry(config: Mapping[str, Any], path: Sequence[str], entry: Any) -> dict[str, Any]:
    """Return a copy of a ds config with this entry at a path. `MISSING` removes the key."""
    copy = dict(config)
    block = copy
    *names, key = _path_in(config, path)
    for name in names:
        below = block.get(name)
        if below is True:  # the old form of zero_optimization
            below = {"stage": 1}
        block[name] = dict(below) if isinstance(below, Mapping) else {}
        block = block[name]
    if entry is MISSING:
        block.pop(key, None)
    else:
        block[key] = entry
    return copy


def _path_in(config: Mapping[str, Any], path: Sequence[str]) -> Sequence[str]:
    """Return the path under which a ds config has the key, if it has the key."""
    block, key = config.get(path[0]), path[-1]
    short = key.removeprefix(STAGE_3)
    if isinstance(block, Mapping) and short in block and key not in block:
        return (*path[:-1], short)
    return path

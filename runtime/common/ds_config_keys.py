"""Finds misspelt top-level keys in the ds config, which DeepSpeed passes over in silence.

DeepSpeed is read and not imported, which takes seconds; reading takes 0.1 to 0.2 s, once a process.
"""

from __future__ import annotations

import ast
import difflib
import logging
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .ds_config import config_origin, read_config

logger = logging.getLogger(__name__)

_READ_ELSEWHERE = ("zerowatch", "data_parallel_size")  # by us, and in DeepSpeed's engine
_ALIKE = 0.85  # of difflib's ratio: a letter or two; keys that resemble none are the user's own
_SOURCES = ("*config.py", "*constants.py")


def warn_of_misspelt_keys(config: object) -> None:
    """Log one line for each top-level key that is nearly, but not quite, one of DeepSpeed's."""
    for key, meant in misspelt_keys(read_config(config)):
        logger.warning(
            "%s: DeepSpeed does not know the key %r and ignores it; did you mean %r?",
            config_origin(config),
            key,
            meant,
        )


def misspelt_keys(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each top-level key that is nearly one of DeepSpeed's, and the one it is near to."""
    known = _known_keys()
    for key in config:
        close = difflib.get_close_matches(key, known, n=1, cutoff=_ALIKE)
        if key not in known and close:
            yield key, close[0]


@cache
def _known_keys() -> frozenset[str]:
    """Collect names and texts of DeepSpeed's modules on configuration; none without DeepSpeed."""
    package = find_spec("deepspeed")
    if package is None or package.origin is None:
        return frozenset()
    root = Path(package.origin).parent
    known = set(_READ_ELSEWHERE)
    for pattern in _SOURCES:
        for file in root.rglob(pattern):
            known.update(_names(ast.parse(file.read_text(encoding="utf-8"))))
    return frozenset(known)


def _names(module: ast.Module) -> Iterator[str]:
    """Yield the texts that could be keys, and the fields of classes."""
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.isidentifier():
                yield node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id

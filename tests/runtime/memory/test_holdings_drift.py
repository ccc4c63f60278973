"""Every name in the table of places is one that this version of DeepSpeed or torch still sets."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from zerowatch.runtime.memory.engine_tensors import PLACES

ROOTS = {"parameters", "buffers", "optimizer"}
# Of torch's tensors, and of a UserDict.
OF_OTHERS = {"grad", "data", "state"}
NAMES = sorted({name for place, _ in PLACES for name in place.split(".")[1:]} - OF_OTHERS)


@cache
def sources() -> str:
    """Return all of DeepSpeed's code, without importing it."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    rooms = (folder / "runtime", folder / "ops" / "adam")
    return "\n".join(file.read_text() for room in rooms for file in sorted(room.rglob("*.py")))


@pytest.mark.parametrize("name", [name for name in NAMES if not name.isdigit()])
def test_deepspeed_still_sets_the_name(name: str) -> None:
    written = re.sub(r"^_[A-Za-z]\w*?__", "__", name)  # as it reads within its class
    sets = rf"\.{written}\s*(:[^=\n]+)?=[^=]|^\s+{written}:.*=|\.{written}\[.*\]\s*="

    assert re.search(sets, sources(), re.MULTILINE), (
        f"nothing sets {name!r} any more: find what replaced it, and change engine_tensors.py"
    )


def test_every_place_starts_at_a_root() -> None:
    assert {place.split(".")[0] for place, _ in PLACES} == ROOTS

"""Every name in the table of tensor paths is still set by this version of DeepSpeed or torch."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from zerowatch.runtime.memory.engine_memory import TENSOR_PATHS

ROOTS = {"parameters", "buffers", "optimizer"}
# Attributes of torch's tensors, and of a UserDict.
NOT_DEEPSPEED = {"grad", "data", "state"}
NAMES = sorted({name for path, _ in TENSOR_PATHS for name in path.split(".")[1:]} - NOT_DEEPSPEED)


@cache
def sources() -> str:
    """Return all of DeepSpeed's code, without importing it."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    folders = (folder / "runtime", folder / "ops" / "adam")
    return "\n".join(file.read_text() for each in folders for file in sorted(each.rglob("*.py")))


@pytest.mark.parametrize("name", [name for name in NAMES if not name.isdigit()])
def test_deepspeed_still_sets_the_name(name: str) -> None:
    written = re.sub(r"^_[A-Za-z]\w*?__", "__", name)  # as it reads within its class
    sets = rf"\.{written}\s*(:[^=\n]+)?=[^=]|^\s+{written}:.*=|\.{written}\[.*\]\s*="

    assert re.search(sets, sources(), re.MULTILINE), (
        f"nothing sets {name!r} any more: find what replaced it, and change engine_memory.py"
    )


def test_every_path_starts_at_a_root() -> None:
    assert {path.split(".")[0] for path, _ in TENSOR_PATHS} == ROOTS

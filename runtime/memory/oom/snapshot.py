"""Torch's own record of all blocks of a GPU's memory, for its viewer."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from pathlib import Path

from ...common.report_files import create_private


def dump_snapshot(device: str, path: Path) -> bool:
    """Write the memory snapshot of CUDA to a file for its owner alone; say whether it is there.

    Where `torch.cuda.memory._record_memory_history` is on, it holds stacks and history too; else
    the blocks. Never raises.
    """
    torch = sys.modules.get("torch")  # importing it takes memory, and it is there if it ran out
    if torch is None or not device.startswith("cuda"):
        return False
    try:
        os.close(create_private(path))
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError, MemoryError, AttributeError, ValueError, pickle.PickleError):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # half a file would not load
        return False
    return True

"""A snapshot of the accelerator's allocator, for torch's memory viewer."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path

from ..common import accelerator
from ..common.report_files import create_private


def dump_snapshot(device: str, path: Path) -> bool:
    """Write all blocks of the allocator to a file that only its owner can read. Never raises.

    Stacks and history are included where `_record_memory_history` is on.

    Returns:
        Whether the file was written.
    """
    if not device.startswith(accelerator.current.kind):
        return False
    try:
        os.close(create_private(path))
        accelerator.current.dump_memory_snapshot(str(path))
    except (OSError, RuntimeError, MemoryError, AttributeError, ValueError, pickle.PickleError):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # half a file would not load
        return False
    return True

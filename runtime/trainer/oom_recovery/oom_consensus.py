"""Meeting after an error that nobody voted on: did all ranks run out, or this one alone?

The ranks that did not are in a collective that this one will not enter, and cannot be told so. If
all ran out, as with equal shares and sizes, none is in one.
"""

from __future__ import annotations

import time
from typing import Any

WAIT_SECONDS = 20.0
_POLL_SECONDS = 0.02
_PREFIX = "zerowatch/out_of_memory"


def all_ranks_oom(
    store: Any, attempt: int, *, rank: int, world_size: int, wait_seconds: float = WAIT_SECONDS
) -> bool:
    """Tell the others by the c10d store, and wait for them to say the same.

    Args:
        store: The store of the default process group.
        attempt: A number of this attempt, the same on all ranks and used once.
        rank: This rank.
        world_size: Ranks that must say so.
        wait_seconds: How long to wait for the slowest.
    """
    store.set(f"{_PREFIX}/{attempt}/{rank}", "")
    keys = [f"{_PREFIX}/{attempt}/{each}" for each in range(world_size)]
    deadline = time.monotonic() + wait_seconds
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True

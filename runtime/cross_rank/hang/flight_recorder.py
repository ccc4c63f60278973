"""What torch's Flight Recorder holds: its own record of collectives, beside a report of a hang."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch._C import _distributed_c10d


def flight_dump() -> bytes | None:
    """Return the record as JSON; None where this torch keeps none, or nothing was recorded.

    It is the recorder of NCCL for NCCL's groups, and that of all other backends else.
    """
    names = ["_dump_fr_trace_json"]
    if dist.is_initialized() and "nccl" in dist.get_backend():
        names.insert(0, "_dump_nccl_trace_json")
    for name in names:
        dump: Callable[[], bytes] | None = getattr(_distributed_c10d, name, None)
        record = dump() if dump is not None else b""
        if b'"entries"' in record:
            return record
    return None

"""Keeps DeepSpeed from compiling, and from chatting between the demo's lines."""

from __future__ import annotations

import logging
import warnings


def make_deepspeed_plain() -> None:
    """Prepare DeepSpeed for the demo; call it before the process group is made."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # What it would say, the console says.
    logging.getLogger("zerowatch.runtime.monitor.run_info").setLevel(logging.WARNING)
    # DeepSpeed calls all_gather_into_tensor, which torch 2.13 would rather see renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # On CPU DeepSpeed compiles an all-reduce over shared memory, used for inference only: half a
    # minute at the first start, and an error where there is no C++ compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

"""What can be changed for a model that calls DeepSpeed's own activation checkpointing itself.

Whether it checkpoints is written in such a model; nothing outside switches that. What is left are
DeepSpeed's globals: the kept inputs may go to the host. Splitting them over model-parallel ranks
is for models that are so parallel, and its contiguous buffers are measured once, at first use.
"""

from __future__ import annotations

import sys
from typing import Any

from deepspeed.accelerator import get_accelerator

from ....errors import ZerowatchError
from ...common.deepspeed_internals_live_settings import CHECKPOINTING, missing
from ...common.undo import Undo, UndoOnce
from .zero_optimizer import wait_for_device


def inputs_on_host_unavailable() -> str | None:
    """Say why the inputs that DeepSpeed's checkpointing keeps cannot go to the host now."""
    module = _checkpointing()
    if module is None or not module.is_configured():
        return "nothing here has configured deepspeed.checkpointing"
    gone = missing(module, CHECKPOINTING, "CPU_CHECKPOINT", "PARTITION_ACTIVATIONS")
    if gone is not None:
        return gone
    if module.CPU_CHECKPOINT:
        return "they are there already"
    if get_accelerator().device_name() == "cpu":
        return "the device is the host"
    return None


def keep_inputs_on_host() -> Undo:
    """Have DeepSpeed's checkpointing keep the inputs of checkpointed functions on the host.

    Raises:
        ZerowatchError: It cannot, for the reason `inputs_on_host_unavailable` gives.
    """
    reason = inputs_on_host_unavailable()
    module = _checkpointing()
    if reason is not None or module is None:
        raise ZerowatchError(f"checkpointed inputs cannot go to the host: {reason}")
    wait_for_device()
    module.CPU_CHECKPOINT = True

    def undo() -> None:
        wait_for_device()
        module.CPU_CHECKPOINT = False

    return UndoOnce(undo)


def _checkpointing() -> Any:
    return sys.modules.get(CHECKPOINTING)

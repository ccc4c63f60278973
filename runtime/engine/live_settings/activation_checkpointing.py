"""Activation checkpointing on a live engine: on between two windows, off between two others.

A Hugging Face model that nobody chose modules of is switched by its own methods. Any other model's
chosen modules get a forward that runs again in backward, with the same random numbers. ZeRO 3 sees
the new order of modules by itself and records it; that takes two windows without prefetch.
"""

from __future__ import annotations

import logging
from typing import Any

from ....errors import ZerowatchError
from ...common.deepspeed_internals import forget_releases
from ...common.undo import Undo, UndoOnce, chain
from .checkpointed_forward import checkpoint_forward
from .choose_modules import ModuleSelector, choose_modules
from .transformers_checkpointing import enable, has_own_switch, is_on
from .zero_optimizer import of_stage_3, wait_for_device

logger = logging.getLogger(__name__)


def unavailable(engine: Any, chosen: ModuleSelector = None) -> str | None:
    """Say why it cannot be switched on for these modules; None where it can."""
    if getattr(engine, "pipeline_parallelism", False):
        return "a pipeline engine checkpoints by activation_checkpoint_interval"
    if chosen is None and has_own_switch(engine.module):
        return "the model's own checkpointing is on already" if is_on(engine.module) else None
    try:
        choose_modules(engine.module, chosen)
    except ZerowatchError as nothing_found:
        return str(nothing_found)
    return None


def apply(engine: Any, chosen: ModuleSelector = None) -> Undo:
    """Switch it on, and return what puts the very forwards and flags back.

    Args:
        engine: A DeepSpeed engine between two windows, on all ranks alike.
        chosen: A class or its name, a pattern of module names such as "blocks.*", or several of
            these; by default a Hugging Face model's own switch, else the block that repeats.

    Raises:
        ZerowatchError: No module is meant, or it is on already.
    """
    reason = unavailable(engine, chosen)
    if reason is not None:
        raise ZerowatchError(f"activation checkpointing cannot be switched on: {reason}")
    wait_for_device()
    undo = _switch_on(engine, chosen)
    if of_stage_3(engine) is None:
        return undo
    forget_releases()
    return UndoOnce(chain([forget_releases, undo]))


def _switch_on(engine: Any, chosen: ModuleSelector) -> Undo:
    if chosen is None and has_own_switch(engine.module):
        logger.info("activation checkpointing on, by the model's own switch")
        return enable(engine.module)
    modules = choose_modules(engine.module, chosen)
    logger.info("activation checkpointing on, of %s", ", ".join(modules))
    return chain([checkpoint_forward(module) for module in modules.values()])

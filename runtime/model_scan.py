"""What in a model makes a batch in pieces differ from the batch in one piece."""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger(__name__)

MAX_NAMED = 3


def warn_of_batch_statistics(model: torch.nn.Module) -> None:
    """Warn of modules that compute with the statistics of the samples they see together."""
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
    ]
    if found:
        more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        logger.warning(
            "%s%s normalise by the samples of a micro-batch: how a batch is cut changes what they "
            "compute, and a replayed window moves their running statistics twice. Use LayerNorm "
            "or GroupNorm, or keep micro-batches as they are",
            ", ".join(found[:MAX_NAMED]),
            more,
        )

"""What in a model makes a batch in pieces differ from the batch in one piece."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import torch

from .policy.numerics import ModelTraits

logger = logging.getLogger(__name__)

MAX_NAMED = 3

# DeepSpeed's, tutel's, megablocks', and those of transformers, such as MixtralSparseMoeBlock.
_EXPERTS = re.compile(r"MoE|MOE|Moe(?![a-z])|Experts|TopKGate|SwitchTransformers")


def model_traits(model: torch.nn.Module, *, loss_decomposable: bool = True) -> ModelTraits:
    """Return what the modules of a model show.

    What a module's code does beside its modules and attributes is not seen. Experts count as such
    with or without a capacity, for most have one, and those without add a loss over all they see.

    Args:
        model: Any.
        loss_decomposable: Whether the loss of a batch is the weighted mean of its parts' losses.
            No model shows it.
    """
    modules = list(model.modules())
    return ModelTraits(
        dropout=any(_draws(module) for module in modules),
        batch_statistics=any(_sees_the_batch(module) for module in modules),
        expert_capacity=any(_EXPERTS.search(type(module).__name__) for module in modules),
        loss_decomposable=loss_decomposable,
    )


def warn_of_batch_statistics(model: torch.nn.Module) -> None:
    """Warn of modules that compute with the statistics of the samples they see together."""
    found = [name for name, module in model.named_modules() if _sees_the_batch(module)]
    if found:
        more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        logger.warning(
            "%s%s normalise by the samples of a micro-batch: how a batch is cut changes what they "
            "compute, and a replayed window moves their running statistics twice. Use LayerNorm "
            "or GroupNorm, or keep micro-batches as they are",
            ", ".join(found[:MAX_NAMED]),
            more,
        )


def _sees_the_batch(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def _draws(module: torch.nn.Module) -> bool:
    """Whether a module drops at random: a layer of that name, or a rate that it holds itself."""
    return any(rate > 0 for rate in _rates(module))


def _rates(module: torch.nn.Module) -> Iterator[float]:
    drops = "drop" in type(module).__name__.lower()
    for name, value in vars(module).items():
        if isinstance(value, float) and ("drop" in name or (drops and name == "p")):
            yield value

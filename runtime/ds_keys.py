"""Warns of a misspelt top-level key in the ds config, which DeepSpeed passes over in silence."""

from __future__ import annotations

import difflib
import logging
import sys

from .ds_config import ZEROWATCH_KEY, config_origin, read_config

logger = logging.getLogger(__name__)

_ALIKE = 0.8  # of difflib's ratio: a letter or two; keys that resemble none are the user's own


# Top-level keys that stand in no constant, but in DeepSpeed's pydantic models or code.
_NOT_CONSTANTS = frozenset(
    [
        "comet",
        "compile",
        "csv_monitor",
        "data_parallel_size",
        "elasticity",
        "hybrid_engine",
        "sequence_parallel_size",
        "sparse_gradients",
        "tensor_parallel",
        "tensorboard",
        "wandb",
    ]
)


def warn_of_misspelt_keys(config: object) -> None:
    """Log one line for each top-level key that is nearly, but not quite, one of DeepSpeed's."""
    known = _known_keys()
    for key in read_config(config):
        close = difflib.get_close_matches(key, known, n=1, cutoff=_ALIKE)
        if key not in known and close:
            logger.warning(
                "%s: DeepSpeed does not know the key %r and ignores it; did you mean %r?",
                config_origin(config),
                key,
                close[0],
            )


def _known_keys() -> set[str]:
    """Collect the texts that DeepSpeed's modules on configuration define as constants."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("deepspeed.") and name.endswith(("config", "constants"))
    ]
    texts = {v for m in modules for v in vars(m).values() if isinstance(v, str)}
    return {ZEROWATCH_KEY, *_NOT_CONSTANTS, *filter(str.isidentifier, texts)}

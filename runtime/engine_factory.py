"""Makes the engines of a TrainingRun: the first one, and those that take its place."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from .initialize import initialize, initialize_unwatched
from .monitor.null_watch import NullWatch


class EngineFactory:
    """Remembers what DeepSpeed is given beside the model and the ds config.

    Args:
        optimizer: The caller's, or a callable that takes parameters; None for the ds config's.
        lr_scheduler: Likewise.
    """

    def __init__(self, optimizer: Any, lr_scheduler: Any) -> None:
        self._options = {"optimizer": optimizer, "lr_scheduler": lr_scheduler}

    def first(
        self,
        module: torch.nn.Module,
        config: Mapping[str, Any],
        settings: Mapping[str, Any] | None,
    ) -> Any:
        """Return an engine that is watched, where no other run's is.

        Raises:
            DsConfigError: DeepSpeed refuses its configuration.
            SettingsError: A setting is wrong.
        """
        engine = initialize(
            model=module,
            model_parameters=_trained(module),
            config=copy.deepcopy(dict(config)),
            settings=settings,
            **self._options,
        )[0]
        if not engine.watch.watches(engine):  # another run's, which is not ours to move or close
            engine.watch = NullWatch()
        return engine

    def create_replacement(self, module: torch.nn.Module, config: Mapping[str, Any]) -> Any:
        """Return an engine that nobody watches yet."""
        return initialize_unwatched(
            model=module,
            model_parameters=_trained(module),
            config=copy.deepcopy(dict(config)),
            **self._options,
        )[0]


def _trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]

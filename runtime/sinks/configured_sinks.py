"""Makes the sinks that the settings and the ds config ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from ...metrics.settings import SinksSettings
from .deepspeed_monitor import deepspeed_sinks
from .mlflow_sink import MlflowSink
from .sink import Sink
from .tensorboard_sink import TensorboardSink
from .wandb_sink import WandbSink

logger = logging.getLogger(__name__)

# By name in the settings, which is also the name of the extra and of the library.
_SINKS: Mapping[str, Callable[[SinksSettings], Sink]] = {
    "mlflow": lambda settings: MlflowSink(),
    "tensorboard": lambda settings: TensorboardSink(settings.tensorboard_folder),
    "wandb": lambda settings: WandbSink(),
}


def configured_sinks(
    settings: SinksSettings, engine: Callable[[], Any]
) -> Iterator[tuple[str, Sink]]:
    """Yield each sink with its name. A sink whose library is missing is named in a warning.

    A sink of the settings is left out if the ds config has one of the same name.
    """
    by_deepspeed = dict(deepspeed_sinks(engine)) if settings.deepspeed_monitor else {}
    yield from by_deepspeed.items()
    for name in settings.names:
        if name in by_deepspeed:
            continue
        if not _is_installed(name):
            logger.warning(
                "sink %s is off: the library %s is not installed; pip install 'zerowatch[%s]'",
                *(name, name, name),
            )
        else:
            yield name, _SINKS[name](settings)


def _is_installed(library: str) -> bool:
    spec = find_spec(library)
    return spec is not None and spec.origin is not None  # W&B's folder ./wandb has no origin

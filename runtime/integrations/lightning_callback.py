"""Monitors Lightning's Trainer with DeepSpeedStrategy by a callback."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..common.interrupts import is_error_exit
from ..monitor.watch import NullWatch, WatchHandle
from ..sinks.sink import Sink
from .attachment import Attachment

if TYPE_CHECKING:
    Callback = object
else:  # Lightning has two names; a script uses one of them
    Callback = import_module(
        "lightning.pytorch" if find_spec("lightning") else "pytorch_lightning"
    ).Callback


class LightningCallback(Callback):
    """Monitors Lightning's Trainer with DeepSpeedStrategy. Stability: beta.

    It is in place of `zerowatch run`, and may be used with it. When `fit` returns, the run log and
    the sinks are complete, and the engine is as without monitoring. The values that the module logs
    are in `logged.jsonl` of the run folder, once per validation and epoch. Needs the extra
    `lightning`.

    Examples:
        >>> trainer = Trainer(
        ...     strategy=DeepSpeedStrategy(stage=2), callbacks=[zerowatch.LightningCallback()]
        ... )
        >>> trainer.fit(module)

    Args:
        settings: Settings nested as in zerowatch.toml.
        sinks: Sinks that get the values of rank 0.
    """

    def __init__(
        self, settings: Mapping[str, Any] | None = None, sinks: Iterable[Sink] = ()
    ) -> None:
        self._settings, self._sinks = settings, tuple(sinks)
        self._attachment: Attachment | None = None

    @property
    def watch(self) -> WatchHandle:
        """The watch of the strategy's engine; it does nothing before and after `fit`."""
        return NullWatch() if self._attachment is None else self._attachment.watch

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Attach; Lightning creates the engine afterwards.

        Raises:
            SettingsError: A setting is wrong.
        """
        if stage == "fit":
            self._attachment = Attachment("LightningCallback", self._settings, self._sinks)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Add the sinks; with DeepSpeed, the engine exists."""
        self._begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Add the sinks after the first step: without DeepSpeed, monitoring begins in it."""
        self._begin()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record what the module has logged."""
        if not trainer.sanity_checking:
            self._log(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Record what the module has logged."""
        self._log(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End monitoring of a run that failed, or that SIGTERM ends."""
        if isinstance(exception, SystemExit):
            failed = is_error_exit(exception)
        else:
            failed = not isinstance(exception, KeyboardInterrupt)
        self._end(failed=failed)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Write what is pending, and end monitoring."""
        if stage == "fit":
            self._end(failed=False)

    def _begin(self) -> None:
        if self._attachment is not None:
            self._attachment.begin()

    def _log(self, trainer: Any) -> None:
        # Tensors are read on another thread: reading one here would wait for the device.
        self.watch.log_values(dict(trainer.callback_metrics), trainer.global_step)

    def _end(self, *, failed: bool) -> None:
        if self._attachment is not None:
            self._attachment.close(failed=failed)
            self._attachment.detach()
            self._attachment = None

"""Monitors a script of Accelerate as one of its trackers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from accelerate.tracking import GeneralTracker

from ..monitor.watch import WatchHandle
from ..sinks.sink import Sink
from .attachment import Attachment


class AccelerateTracker(GeneralTracker):  # type: ignore[misc]
    """Monitors a script of Accelerate with DeepSpeed. Stability: beta.

    Create it before `accelerator.prepare`. It is in place of `zerowatch run`, and may be used with
    it. What the script passes to `init_trackers` and `log` is in `logged.jsonl` of the run folder.
    `end_training` completes the run log and the sinks. Needs the extra `hf`.

    Examples:
        >>> tracker = zerowatch.AccelerateTracker()
        >>> accelerator = Accelerator(log_with=["tensorboard", tracker], project_dir="logs")
        >>> accelerator.init_trackers("llm", config={"lr": 0.01})

    Args:
        settings: Settings nested as in zerowatch.toml.
        sinks: Sinks that get the values of rank 0.

    Raises:
        SettingsError: A setting is wrong.
    """

    name = "zerowatch"
    requires_logging_directory = False
    main_process_only = False  # monitoring ends on each rank

    def __init__(
        self, settings: Mapping[str, Any] | None = None, sinks: Iterable[Sink] = ()
    ) -> None:
        super().__init__()
        self._attachment = Attachment("AccelerateTracker", settings, sinks)
        self._configuration: Mapping[str, Any] = {}

    @property
    def tracker(self) -> WatchHandle:
        """The watch of the engine."""
        return self._attachment.watch

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep the script's configuration, which is written once there is an engine."""
        self._configuration = dict(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Record what the script logs."""
        self._begin()
        self.tracker.log_values(values, step)

    def finish(self) -> None:
        """Write what is pending, and end monitoring."""
        if self.tracker.is_open:
            self._begin()
        self._attachment.close()

    def _begin(self) -> None:
        self._attachment.begin()
        if self._configuration and self.tracker.is_open:
            self.tracker.log_values(self._configuration)
            self._configuration = {}

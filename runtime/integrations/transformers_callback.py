"""Monitors Hugging Face's Trainer by a callback."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import TrainerCallback

from ..monitor.watch import WatchHandle
from ..sinks.sink import Sink
from .attachment import Attachment


class TransformersCallback(TrainerCallback):  # type: ignore[misc]
    """Monitors Hugging Face's Trainer with DeepSpeed. Stability: beta.

    Create it before `trainer.train()`. It is in place of `zerowatch run`, and may be used with it.
    When `train` returns, the run log and the sinks are complete. What the Trainer logs, such as
    `eval_loss`, is in `logged.jsonl` of the run folder. Needs the extra `hf`.

    Examples:
        >>> trainer = Trainer(
        ...     model=model,
        ...     args=TrainingArguments(deepspeed="ds.json"),
        ...     train_dataset=dataset,
        ...     callbacks=[zerowatch.TransformersCallback()],
        ... )
        >>> trainer.train()

    Args:
        settings: Settings nested as in zerowatch.toml.
        sinks: Sinks that get the values of rank 0.

    Raises:
        SettingsError: A setting is wrong.
    """

    def __init__(
        self, settings: Mapping[str, Any] | None = None, sinks: Iterable[Sink] = ()
    ) -> None:
        self._attachment = Attachment("TransformersCallback", settings, sinks)

    @property
    def watch(self) -> WatchHandle:
        """The watch of the Trainer's engine."""
        return self._attachment.watch

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the run of an earlier training that raised, and add the sinks.

        With DeepSpeed, the engine exists.
        """
        self._attachment.begin_training()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the sinks after the first step: without DeepSpeed, monitoring begins in it."""
        self._attachment.begin()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        """Record what the Trainer logs."""
        self.watch.log_values(logs or {}, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what is pending, and end monitoring."""
        self._attachment.close()

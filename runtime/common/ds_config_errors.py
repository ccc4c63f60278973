"""Adds to an error of deepspeed.initialize the line that says what is wrong with the ds config."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from ...errors import DsConfigError
from .ds_config import explain_config_error
from .fail_open import FailOpen


class ConfigErrors(AbstractContextManager[None]):
    """Explains errors that are about the configuration; others go through untouched."""

    def __init__(self, config: object, fail_open: FailOpen, *, raise_ours: bool = False) -> None:
        """Watch over one call.

        Args:
            config: The configuration as given to deepspeed.initialize.
            fail_open: Guards the explaining, which must not hide the error.
            raise_ours: Whether to raise DsConfigError from DeepSpeed's error. Otherwise the error
                stays DeepSpeed's, which a script may catch, and carries `zerowatch_explanation`.
        """
        self._config = config
        self._explain = fail_open.wrap("ds config", explain_config_error)
        self._raise_ours = raise_ours

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Explain the error, if there is one."""
        explanation = None if error is None else self._explain(error, self._config)
        if error is None or explanation is None:
            return
        error.zerowatch_explanation = explanation  # type: ignore[attr-defined]
        if self._raise_ours:
            raise DsConfigError(explanation) from error

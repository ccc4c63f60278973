"""Writes values to a run of Weights & Biases."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from .sink import SinkRun
from .step_values import ROOT, STEP

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger(__name__)


class WandbSink:
    """Writes to the W&B run of the script, or to a run of its own if there is none. Beta.

    Needs the extra `wandb`. W&B's environment variables apply, such as WANDB_PROJECT and
    WANDB_MODE.

    In the script's run, values join the script's own rows, because a row of ours would move the
    step of the run, and W&B drops rows of earlier steps. Of the values between two calls of the
    script's `log`, W&B keeps the last ones. In a run of its own, each write is a row. The x-axis
    is `zerowatch/step` in both.

    Examples:
        >>> engine.watch.add_sink(zerowatch.WandbSink(wandb.init(project="llm")))

    Args:
        run: The run to write to; by default `wandb.run` when the first values arrive.
    """

    def __init__(self, run: wandb.Run | None = None) -> None:
        self._given = self._run = run
        self._is_own = self._is_finished = False

    def open(self, run: SinkRun) -> None:
        """Find the script's run, or begin one that does not become `wandb.run`."""
        import wandb

        self._is_own = self._is_finished = False  # the sink may have served an earlier training
        target = self._given or wandb.run
        if target is None:
            target = wandb.init(
                name=run.run_id,
                config={"zerowatch_run_id": run.run_id},
                reinit="create_new",
                mode=_mode(),
                settings=wandb.Settings(console="off", silent=True),
            )
            self._is_own = True
        self._run = target
        target.define_metric(STEP, hidden=True)
        target.define_metric(f"{ROOT}/*", step_metric=STEP)

    def write(self, values: Mapping[str, float], *, step: int, unix_seconds: float) -> None:
        """Write the values, unless the script has finished its run."""
        import wandb

        assert self._run is not None
        row = {STEP: float(step), **values}
        if self._is_own:
            self._run.log(row, commit=True)
        elif not self._is_finished:
            try:
                self._run.log(row, commit=False)
            except wandb.errors.UsageError as error:
                self._is_finished = True
                logger.info("the script has finished its W&B run; no more values: %s", error)

    def close(self, *, failed: bool) -> None:
        """Finish the run if it is our own."""
        assert self._run is not None
        if self._is_own:
            self._run.finish(exit_code=int(failed))


def _mode() -> Literal["offline"] | None:
    """Return "offline" without a login: W&B would ask for a key on the script's terminal."""
    import wandb

    if os.environ.get("WANDB_MODE") or wandb.login(prompt=False):
        return None
    logger.warning(
        "W&B has no API key: the values are stored below ./wandb, and `wandb sync` uploads them; "
        "run `wandb login` or set WANDB_API_KEY, or WANDB_MODE=offline for no such line"
    )
    return "offline"

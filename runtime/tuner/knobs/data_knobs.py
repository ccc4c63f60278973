"""Knobs of the data: micro-batch size, global batch size, load balance."""

from __future__ import annotations

from collections.abc import Sequence

from ....errors import BatchError, ZerowatchError
from ...common.ds_config import EngineSource
from ...common.undo import Undo
from ...trainer.data.training_data import TrainingData
from ...trainer.window_runner import WindowRunner
from ..policy.ab_comparison import MAX_UNUSABLE
from ..policy.knob_registry import BALANCE, BATCH_SAMPLES, MICRO_BATCH_SAMPLES
from ..policy.policy_types import Value
from .knob import ReadableKnob, SwitchKnob, WritableKnob


def data_knobs(window_runner: WindowRunner, data: TrainingData | None) -> list[WritableKnob]:
    """Return the data knobs of a TrainingRun. Without `data`, only the micro-batch is a knob."""
    micro_batch = MicroBatchKnob(window_runner)
    return [micro_batch, *([] if data is None else [LoadBalanceKnob(data), GlobalBatchKnob(data)])]


class MicroBatchKnob(WritableKnob):
    """Samples of a micro-batch, as in `TrainingRun.set_micro_batch`; the global batch stays."""

    spec = MICRO_BATCH_SAMPLES

    def __init__(self, window_runner: WindowRunner) -> None:
        self._window_runner = window_runner

    def unsupported_reason(self) -> str | None:
        """Return why the size is fixed, which is that ranks were given different sizes."""
        opened = self._window_runner.opened
        if opened is not None and len(set(opened.local_batches.micro_batch_samples)) > 1:
            return "ranks were given different sizes"
        return None

    def get(self) -> int:
        """Return the requested size. The size in use is smaller after out-of-memory errors."""
        return self._window_runner.micro_batch_samples

    def options(self) -> Sequence[Value]:
        """Return the sizes that split the largest local batch into 1, 2, 4... micro-batches."""
        return micro_batch_sizes(largest_local_batch(self._window_runner), self.get())

    def set(self, value: Value) -> Undo:
        """Set it.

        Raises:
            BatchError: The value is not a size.
        """
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BatchError(f"a micro-batch holds 1 sample or more, got {value!r}")
        before, self._window_runner.micro_batch_samples = self.get(), value

        def undo() -> None:
            self._window_runner.micro_batch_samples = before

        return undo


class EngineMicroBatchKnob(ReadableKnob):
    """Samples of a micro-batch of a script's own loader, within DeepSpeed's accumulation window."""

    spec = MICRO_BATCH_SAMPLES

    def __init__(self, source: EngineSource) -> None:
        self._source = source

    def get(self) -> int:
        """Return the engine's value."""
        return int(self._source.engine.train_micro_batch_size_per_gpu())

    def options(self) -> Sequence[Value]:
        """Return the sizes that split a window evenly, as DeepSpeed requires."""
        now = self.get()
        window = now * int(self._source.engine.gradient_accumulation_steps())
        return [size for size in micro_batch_sizes(window, now) if window % size == 0]


class LoadBalanceKnob(SwitchKnob):
    """Switches the distribution of samples by the ranks' measured speeds.

    No sample is lost or repeated. Local batches change after those that have been loaded already:
    with workers, `num_workers` times `prefetch_factor`.
    """

    spec = BALANCE

    def __init__(self, data: TrainingData) -> None:
        self._data = data

    def unsupported_reason(self) -> str | None:
        """Return why this job cannot balance the load."""
        return self._data.unsupported_balance_reason() or _late_change_reason(self._data)

    def get(self) -> bool:
        """Return whether faster ranks get more samples."""
        return self._data.balances

    def _switch(self, *, on: bool) -> Undo:
        before, self._data.balances = self._data.balances, on

        def undo() -> None:
            self._data.balances = before

        return undo


class GlobalBatchKnob(WritableKnob):
    """Samples of the global batch of the run's loader. The learning rate is scaled with the size.

    No sample is lost or repeated. The size changes after the batches that have been loaded already:
    with workers, `num_workers` times `prefetch_factor`.
    """

    spec = BATCH_SAMPLES

    def __init__(self, data: TrainingData) -> None:
        self._data = data

    def unsupported_reason(self) -> str | None:
        """Return why the size is fixed in this job."""
        return self._data.unsupported_resize_reason() or _late_change_reason(self._data)

    def get(self) -> int:
        """Return the requested size."""
        return self._data.batch_samples

    def options(self) -> Sequence[Value]:
        """Return multiples of the initial size."""
        return self._data.batch_sizes()

    def set(self, value: Value) -> Undo:
        """Set it.

        Raises:
            ZerowatchError: The value is not one of the options.
        """
        if not isinstance(value, int) or value not in self.options():
            raise ZerowatchError(f"{self.name} is one of {list(self.options())}, got {value!r}")
        before, self._data.batch_samples = self._data.batch_samples, value

        def undo() -> None:
            self._data.batch_samples = before

        return undo


def _late_change_reason(data: TrainingData) -> str | None:
    """Return why a trial would stall before the first changed batch; None if it would not."""
    # Before it are the batches loaded ahead, and the one after which the ranks agree on the change.
    if data.batches_ahead + 1 < MAX_UNUSABLE:
        return None
    return (
        f"workers load {data.batches_ahead} batches ahead, so each change would come too late for "
        "a trial"
    )


def largest_local_batch(window_runner: WindowRunner) -> int:
    """Return the most samples that a rank had in the last window; 0 before the first window."""
    opened = window_runner.opened
    return 0 if opened is None else max(opened.local_batches.samples)


def micro_batch_sizes(local_batch: int, now: int) -> tuple[int, ...]:
    """Return the sizes that split a local batch into 1, 2, 4 and so on micro-batches, ascending.

    Args:
        local_batch: The most samples that a rank has in a window; 0 if unknown.
        now: The size in use, which may be larger than the local batch.
    """
    sizes = {now}
    count = 1
    while count < 2 * local_batch:
        sizes.add(-(-local_batch // count))
        count *= 2
    return tuple(sorted(size for size in sizes if size <= max(now, local_batch)))

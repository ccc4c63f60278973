"""Writes values where the ds config's own monitors write: `tensorboard`, `wandb`, `csv_monitor`.

Their `write_events` is not called: it needs the process group, which scripts destroy before the
last values are written, and its W&B rows would move the step of the run.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .sink import Sink, SinkRun
from .tensorboard_sink import write_scalars
from .wandb_sink import WandbSink


def deepspeed_sinks(engine: Callable[[], Any]) -> Iterator[tuple[str, Sink]]:
    """Yield a sink, with its name, for each monitor that the ds config enables on this rank.

    Args:
        engine: Returns the engine, which a rebuild replaces, or None if it is gone.
    """
    monitor: Any = getattr(engine(), "monitor", None)
    if monitor is None:  # a model without DeepSpeed
        return
    samples = GlobalSamples(engine)
    if getattr(getattr(monitor, "tb_monitor", None), "summary_writer", None) is not None:
        yield "tensorboard", DeepSpeedTensorboardSink(engine, samples)
    if getattr(monitor, "wandb_monitor", None) is not None:
        yield "wandb", WandbSink()
    if getattr(getattr(monitor, "csv_monitor", None), "log_dir", None) is not None:
        yield "csv", DeepSpeedCsvSink(Path(monitor.csv_monitor.log_dir), samples)


class GlobalSamples:
    """The x-axis of DeepSpeed's monitors: the samples of all ranks up to a step.

    It assumes that the train batch size does not change during a run.
    """

    def __init__(self, engine: Callable[[], Any]) -> None:
        self._engine = engine
        self._batch_size = int(engine().train_batch_size())

    def at(self, step: int) -> int:
        """Return the samples of all ranks up to and including a step."""
        return step * self._batch_size


class DeepSpeedTensorboardSink:
    """Writes into the event file of DeepSpeed's monitor, with its x-axis."""

    def __init__(self, engine: Callable[[], Any], samples: GlobalSamples) -> None:
        self._engine, self._samples = engine, samples
        self._writer = engine().monitor.tb_monitor.summary_writer

    def open(self, run: SinkRun) -> None:
        """Do nothing: DeepSpeed has opened the file."""

    def write(self, values: Mapping[str, float], *, step: int, unix_seconds: float) -> None:
        """Write the values as scalars, into the file of the present engine."""
        monitor = getattr(self._engine(), "monitor", None)
        if monitor is not None and monitor.tb_monitor is not None:
            self._writer = monitor.tb_monitor.summary_writer
        write_scalars(self._writer, values, self._samples.at(step), unix_seconds)

    def close(self, *, failed: bool) -> None:
        """Write what is pending; DeepSpeed's file stays open."""
        self._writer.flush()


class DeepSpeedCsvSink:
    """Writes files beside those of DeepSpeed's CSV monitor, in the same form: one per value."""

    def __init__(self, folder: Path, samples: GlobalSamples) -> None:
        self._folder, self._samples = folder.absolute(), samples
        self._begun: set[str] = set()

    def open(self, run: SinkRun) -> None:
        """Do nothing: DeepSpeed has made the folder."""

    def write(self, values: Mapping[str, float], *, step: int, unix_seconds: float) -> None:
        """Append a row to the file of each value."""
        for name, value in values.items():
            file = name.replace("/", "_").replace(" ", "_") + ".csv"
            with open(self._folder / file, "a", newline="") as stream:
                rows = csv.writer(stream)
                if file not in self._begun:
                    self._begun.add(file)
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([self._samples.at(step), value])

    def close(self, *, failed: bool) -> None:
        """Do nothing: no file is open between two writes."""

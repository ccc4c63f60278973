"""Writes values as event files of TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import SettingsError
from .sink import SinkRun

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# TensorBoard's own default is two minutes.
FLUSH_SECONDS = 10


class TensorboardSink:
    """Writes event files of TensorBoard; the step is the optimizer step. Stability: beta.

    Needs the extra `tensorboard`.

    Examples:
        >>> engine.watch.add_sink(zerowatch.TensorboardSink("logs/zerowatch"))

    Args:
        folder: Folder of the event files; by default `tensorboard` in the run folder. TensorBoard
            reads only one of several files that are written in one folder at the same time, so
            this is not a folder of the script's own SummaryWriter.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = None if folder is None else Path(folder).absolute()
        self._open_folder = ""
        self._writer: SummaryWriter | None = None

    def open(self, run: SinkRun) -> None:
        """Create the event file.

        Raises:
            SettingsError: Neither the sink nor the run has a folder.
        """
        folder = self._folder or (run.folder and run.folder / "tensorboard")
        if folder is None:
            raise SettingsError(
                "the sink tensorboard has no folder, because no run log is written; "
                "set sinks.tensorboard_folder"
            )
        self._open_folder = str(folder)
        self._writer = self._new_writer()

    def write(self, values: Mapping[str, float], *, step: int, unix_seconds: float) -> None:
        """Write the values as scalars; after an error into another event file.

        The thread of a SummaryWriter ends at its first error, such as on a full disk.
        """
        writer = self._writer = self._writer or self._new_writer()
        try:
            write_scalars(writer, values, step, unix_seconds)
        except BaseException:
            self._writer = None
            with suppress(OSError):  # its own, again
                writer.close()
            raise

    def close(self, *, failed: bool) -> None:
        """Write what is pending and close the file, if one is open."""
        if self._writer is not None:
            self._writer.close()

    def _new_writer(self) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self._open_folder, flush_secs=FLUSH_SECONDS)


def write_scalars(
    writer: SummaryWriter, values: Mapping[str, float], step: int, unix_seconds: float
) -> None:
    """Write values with the time at which the step ended."""
    for name, value in values.items():
        writer.add_scalar(name, value, global_step=step, walltime=unix_seconds)

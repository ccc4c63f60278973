"""Writes small files, and writes them later if the disk is full or its folder is missing."""

from __future__ import annotations

import logging
from pathlib import Path

from ...metrics.atomic_file import atomic_write

logger = logging.getLogger(__name__)


class RetriedFiles:
    """Replaces small files atomically; what cannot be written is kept for `retry`.

    Used on one thread. A file that fails is logged once, and again when it is written.

    Examples:
        >>> files = RetriedFiles()
        >>> files.write(folder / "settings.json", text, mode=0o600)
        >>> files.retry()  # every few seconds
    """

    def __init__(self) -> None:
        self._unwritten: dict[Path, tuple[str, int]] = {}

    def write(self, path: Path, text: str, *, mode: int = 0o644) -> None:
        """Replace the content of a file, now or at a later `retry`."""
        was_unwritten = path in self._unwritten
        self._unwritten[path] = text, mode
        try:
            atomic_write(path, text, mode=mode)
        except OSError as error:
            if not was_unwritten:
                logger.warning(
                    "cannot write %s: %s. It is written when that is possible", path, error
                )
            return
        del self._unwritten[path]
        if was_unwritten:
            logger.info("%s is written now", path)

    def discard(self, path: Path) -> None:
        """Forget a file that is not written yet."""
        self._unwritten.pop(path, None)

    def retry(self) -> None:
        """Write the files that could not be written before."""
        for path, (text, mode) in list(self._unwritten.items()):
            self.write(path, text, mode=mode)

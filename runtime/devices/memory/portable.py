"""Host memory of this process where there is no /proc: RSS alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import psutil

logger = logging.getLogger(__name__)


class PortableMemory:
    """Reads RSS through psutil."""

    device = "cpu"
    own_peaks = False

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._failed = False

    def read(self) -> Mapping[str, float]:
        """Return allocated in bytes."""
        try:
            return {"allocated": float(self._process.memory_info().rss)}
        except psutil.Error as error:
            if not self._failed:
                self._failed = True
                logger.info("the memory of this process cannot be read: %s", error)
            return {}

    def close(self) -> None:
        """Do nothing."""

"""Keeps the working directory of the process before its script changes it.

`zerowatch/__init__.py` imports the module, because most others are imported on first use only.
"""

from __future__ import annotations

from pathlib import Path


def _working_directory() -> Path | None:
    try:
        return Path.cwd()
    except OSError:  # deleted
        return None


START_FOLDER = _working_directory()

"""Makes folders unreadable for tests, also if they run as root."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def refuse_below(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let `stat` of all below a folder, and its listing, fail as for a user without permission."""

    def refused(function: Callable[..., Any], is_closed: Callable[[Path], bool]) -> Any:
        def guarded(path: Any, *arguments: Any, **options: Any) -> Any:
            if not isinstance(path, int) and is_closed(Path(os.fsdecode(path))):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return function(path, *arguments, **options)

        return guarded

    monkeypatch.setattr(os, "stat", refused(os.stat, lambda path: folder in path.parents))
    monkeypatch.setattr(os, "listdir", refused(os.listdir, lambda path: path == folder))

"""Makes files look as if they belonged to another user. Only root could give them away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def give_away(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Let descriptors of these files name another user."""
    original, inodes = os.fstat, {path.stat().st_ino for path in paths}

    def fstat(descriptor: int) -> os.stat_result:
        status = original(descriptor)
        if status.st_ino not in inodes:
            return status
        fields = list(status)
        fields[4] += 1  # st_uid
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", fstat)


def forbid_to_write(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Let this user seem to have no permission to write to these folders, even if it is root."""
    original = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: path not in folders and original(path, mode)
    )

"""Skips a test if a program is missing, with the command that installs it."""

from __future__ import annotations

import shutil

import pytest


def program(name: str, *, apt: str) -> str:
    """Return the path of a program, or skip; `apt` is the Debian package that holds it."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name} on PATH (apt-get install {apt})")
    return path

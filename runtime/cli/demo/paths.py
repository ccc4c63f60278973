"""How the demo shows a path: short where it lies below the working folder."""

from __future__ import annotations

from pathlib import Path


def shown(path: Path) -> str:
    """Return the path from the working folder, or the whole path where it lies elsewhere."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)

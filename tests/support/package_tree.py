"""Finds the package's own files on disk: everything under a folder with __init__.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def package_folders(folder: Path = ROOT) -> Iterator[Path]:
    """Yield the package folders below `folder` and itself."""
    yield folder
    for inner in sorted(folder.iterdir()):
        if (inner / "__init__.py").is_file() and not inner.name.startswith("."):
            yield from package_folders(inner)


def package_files() -> list[Path]:
    """List the package's Python files, relative to the repository root."""
    return [file.relative_to(ROOT) for folder in package_folders() for file in folder.glob("*.py")]

"""What the demo learns: the source text of this Python's standard library, as windows of bytes.

Real text that is on every machine, so that the demo downloads nothing.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import Dataset

# Others' code, tests (17 MB, much of it made up of test data), and two folders of generated tables.
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idle_test",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)
MAX_BYTES = 8 * 2**20  # ten times what the demo reads, and still loaded in a moment


class NextByteWindows(Dataset[dict[str, torch.Tensor]]):
    """Windows of a text, side by side; each byte's label is the byte that follows it."""

    def __init__(self, text: torch.Tensor, window: int) -> None:
        self._text = text
        self._window = window

    def __len__(self) -> int:
        """Count the whole windows; the last byte can only be a label."""
        return (len(self._text) - 1) // self._window

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one window as `input_ids` and `labels`, int64 of shape (window,)."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self._window
        piece = self._text[start : start + self._window + 1].long()
        return {"input_ids": piece[:-1], "labels": piece[1:]}


def standard_library_text(folder: Path | None = None) -> torch.Tensor:
    """Return the standard library's source files one after the other, uint8 of shape (bytes,).

    The same Python gives the same text on every rank, which is what lets ranks share it out.

    Args:
        folder: Where to look instead of in this Python's own library.

    Raises:
        FileNotFoundError: The library comes without source, as in an embedded Python.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in _source_files(folder):
        text += path.read_bytes()
        if len(text) >= MAX_BYTES:
            break
    if not text:
        raise FileNotFoundError(f"no Python source text in {folder}; the demo learns from it")
    return torch.frombuffer(text, dtype=torch.uint8)[:MAX_BYTES]


def _source_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(folder).parts):
            yield path

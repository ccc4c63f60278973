"""Loads the demo's training data: the source of this Python's standard library, as bytes.

Every machine has this text, so the demo downloads nothing.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import Dataset

# Third-party code, tests (17 MB, much of it test data), and two folders of generated tables.
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
MAX_BYTES = 8 * 2**20  # ten times what the demo reads, and still loaded quickly


class NextByteSequences(Dataset[dict[str, torch.Tensor]]):
    """Splits a text into consecutive sequences; the label of each byte is the next byte."""

    def __init__(self, text: torch.Tensor, length: int) -> None:
        self._text = text
        self._length = length

    def __len__(self) -> int:
        """Return the number of complete sequences; the last byte can only be a label."""
        return (len(self._text) - 1) // self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one sequence as `input_ids` and `labels`, int64 of shape (length,)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        start = index * self._length
        piece = self._text[start : start + self._length + 1].long()
        return {"input_ids": piece[:-1], "labels": piece[1:]}


def standard_library_text(folder: Path | None = None) -> torch.Tensor:
    """Return the standard library's concatenated source files, uint8 of shape (bytes,).

    The same Python gives the same text on every rank, so that ranks can divide it.

    Args:
        folder: Folder of the source files; by default this Python's library.

    Raises:
        FileNotFoundError: The library has no source files, as in an embedded Python.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in _source_files(folder):
        text += path.read_bytes()
        if len(text) >= MAX_BYTES:
            break
    if not text:
        raise FileNotFoundError(f"no Python source text in {folder}; the demo trains on it")
    return torch.frombuffer(text, dtype=torch.uint8)[:MAX_BYTES]


def _source_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(folder).parts):
            yield path

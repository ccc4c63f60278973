"""One rank's state in a file of its own: plain data, read without running any code."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError

import torch

from ....errors import CheckpointError
from .manifest import recovery_hint
from .state import RunState


def rank_file(save: Path, rank: int) -> Path:
    """Return the file of a rank in the folder of a save."""
    return save / f"zerowatch-rank-{rank:05d}.pt"


def refused(path: object, error: Exception) -> OSError:
    """Say in words what torch says of its writer."""
    return OSError(f"{path} cannot be written; is the disk full? ({error})")


def write_rank(save: Path, rank: int, state: RunState) -> None:
    """Write a rank's file.

    Raises:
        OSError: The disk refuses.
        CheckpointError: Something in the state is no plain data.
    """
    save.mkdir(parents=True, exist_ok=True)
    path = rank_file(save, rank)
    try:
        torch.save(state.to_plain(), path)
    except RuntimeError as error:  # how torch tells of a disk
        raise refused(path, error) from error


def read_rank(save: Path, rank: int) -> RunState:
    """Read a rank's file.

    Raises:
        CheckpointError: It is missing, damaged, or holds anything but plain data.
    """
    path = rank_file(save, rank)
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a rank's state ({type(error).__name__}): it is damaged, or "
            f"of another program. {recovery_hint(save)}"
        ) from error
    try:
        return RunState.from_plain(values)
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error

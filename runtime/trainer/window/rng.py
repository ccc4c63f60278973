"""Saves and restores the random generators that a forward pass may draw from."""

from __future__ import annotations

import hashlib
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch

from ...common import accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class RngState:
    """States of the generators.

    Attributes:
        python: State of `random`.
        numpy: State of numpy's global generator; None if numpy is not imported.
        host: State of torch's CPU generator.
        cuda: State of the generator of the current accelerator device; empty if no accelerator is
            in use. The name is a key in checkpoints, for every kind of accelerator.
    """

    python: tuple[Any, ...]
    numpy: Any
    host: torch.Tensor
    cuda: tuple[torch.Tensor, ...]

    @staticmethod
    def capture() -> RngState:
        """Read the generators of this process."""
        numpy = sys.modules.get("numpy")
        device = accelerator.current
        in_use = device.is_available() and device.is_initialized()
        return RngState(
            python=random.getstate(),
            numpy=numpy.random.get_state() if numpy else None,
            host=torch.get_rng_state(),
            cuda=(device.get_rng_state(),) if in_use else (),
        )

    def restore_for_new_rank(self, rank: int) -> None:
        """Seed the generators from the state of another rank, differently for each new rank.

        Args:
            rank: Number of the new rank, which has no state of its own.
        """
        digest = hashlib.sha256(self.host.numpy().tobytes() + rank.to_bytes(8, "little")).digest()
        seed = int.from_bytes(digest[:4], "little")
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        torch.manual_seed(seed)  # the generators of all devices

    def restore(self) -> None:
        """Set the generators to this state."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        for state in self.cuda:
            accelerator.current.set_rng_state(state)

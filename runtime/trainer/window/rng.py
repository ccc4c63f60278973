"""State of all random generators that a forward pass may draw from."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RngState:
    """States of the generators.

    Attributes:
        python: State of `random`.
        numpy: State of numpy's global generator; None where numpy is not imported.
        host: State of torch's CPU generator.
        cuda: State of the current CUDA device's generator; empty where CUDA is not initialised.
    """

    python: tuple[Any, ...]
    numpy: Any
    host: torch.Tensor
    cuda: tuple[torch.Tensor, ...]

    @staticmethod
    def capture() -> RngState:
        """Read the generators of this process, of CUDA the current device's."""
        numpy = sys.modules.get("numpy")
        on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return RngState(
            python=random.getstate(),
            numpy=numpy.random.get_state() if numpy else None,
            host=torch.get_rng_state(),
            cuda=(torch.cuda.get_rng_state(),) if on_cuda else (),
        )

    def restore(self) -> None:
        """Set the generators to this state."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        for state in self.cuda:
            torch.cuda.set_rng_state(state)

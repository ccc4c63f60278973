"""What was lost of each parameter's gradient and is still to be sent, kept by window.

A window works on a copy: `commit` puts it in the place of what was kept before, `drop` forgets it,
and a window that is run again finds what the first try found. That makes two tensors as large as
the gradients: in fp32 8 bytes a parameter on every rank, whatever ZeRO's stage, in bf16 4.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


class Residuals:
    """Errors by the parameter's name, flat."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._kept: dict[str, torch.Tensor] = {}
        self._window: dict[str, torch.Tensor] = {}
        self._spare: dict[str, torch.Tensor] = {}  # memory of earlier windows, to be used again

    def of(self, name: str, num_values: int, device: torch.device) -> torch.Tensor:
        """Return a parameter's errors in this window, to be read and written in place."""
        if name not in self._window:
            self._window[name] = self._opened(name, num_values, device)
        return self._window[name]

    def _opened(self, name: str, num_values: int, device: torch.device) -> torch.Tensor:
        own = self._spare.pop(name, None)
        if own is None or own.device != device:
            own = torch.empty(num_values, dtype=self._dtype, device=device)
        kept = self._kept.get(name)
        return own.zero_() if kept is None else own.copy_(kept)

    def commit(self) -> None:
        """Keep what the window left."""
        for name in self._window:
            if name in self._kept:
                self._spare[name] = self._kept[name]
        self._kept.update(self._window)
        self._window = {}

    def drop(self) -> None:
        """Forget the window."""
        self._spare.update(self._window)
        self._window = {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of what is kept, on the host."""
        return {name: kept.to("cpu", copy=True) for name, kept in self._kept.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what another run kept; on which device shows as the next window opens."""
        self._kept = {name: kept.to(self._dtype, copy=True) for name, kept in state.items()}
        self._window, self._spare = {}, {}

    def num_bytes(self) -> int:
        """Return the memory of it."""
        held = [*self._kept.values(), *self._window.values(), *self._spare.values()]
        return sum(tensor.nbytes for tensor in held)

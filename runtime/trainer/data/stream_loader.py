"""A data loader over an IterableDataset that can be put back to where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ....errors import CheckpointError


class StreamLoader:
    """Loads batches of this rank's own stream; torchdata keeps its place.

    That is exact where the dataset or its iterator has `state_dict` and `load_state_dict`;
    otherwise torchdata reads the stream again up to there. Which rank and worker reads which
    samples is the dataset's business, and so is that all ranks get equally many batches. An
    incomplete batch at the end of a stream is left out, with workers one of each.

    `for batch in loader` yields the rest of a pass through the stream; `forever()` begins anew at
    its end.

    Attributes:
        position: Batches handed out so far.
        epoch: Passes through the stream that have ended.
    """

    def __init__(
        self,
        make_loader: Callable[..., Any],
        *,
        samples: int,
        seed: int,
        whose: Mapping[str, int],
    ) -> None:
        """Describe the loader of batches with `samples`; `whose` is what its state depends on."""
        self.position = self.epoch = 0
        self._make_loader = make_loader
        # One of its own: the script's, which dropout draws from, stays as it is.
        self._generator = torch.Generator().manual_seed(seed)
        self._whose = {"samples": samples, **whose}
        self._loader: Any = None
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of this pass through the stream."""
        while True:
            batch = next(self._under_way(), _END)
            if batch is _END:
                self.close()
                self.epoch += 1
                return
            self.position += 1
            yield batch

    def forever(self) -> Iterator[Any]:
        """Yield batches without end.

        Raises:
            ValueError: The stream has no batch.
        """
        while True:
            begins, before = self._loader is None, self.position
            yield from self
            if begins and self.position == before:
                raise ValueError(
                    f"the dataset yields fewer than {self._whose['samples']} samples to this rank"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's place in its stream: behind the batch that was handed out last."""
        return {
            "position": self.position,
            "epoch": self.epoch,
            "stream": None if self._loader is None else self._loader.state_dict(),
            **self._whose,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batch that was handed out last when the state was taken.

        Raises:
            CheckpointError: It was taken on another rank, or with other ranks, workers or batches.
        """
        for name, value in self._whose.items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"the stream's place was saved with {name}={state.get(name)}, and here it is "
                    f"{value}. Streams can go on only as they were begun; use a dataset with a "
                    "length where that may change"
                )
        self.close()
        self.position, self.epoch = int(state["position"]), int(state["epoch"])
        if state["stream"] is not None:
            self._loader = self._open()
            self._loader.load_state_dict(state["stream"])

    def close(self) -> None:
        """End the workers, and begin the stream anew if the loader is used again."""
        self._loader = self._batches = None

    def _under_way(self) -> Iterator[Any]:
        if self._loader is None:
            self._loader = self._open()
        if self._batches is None:
            self._batches = iter(self._loader)
        return self._batches

    def _open(self) -> Any:
        return self._make_loader(
            batch_size=self._whose["samples"], drop_last=True, generator=self._generator
        )


_END = object()

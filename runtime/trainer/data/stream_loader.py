"""Resumable data loader over an IterableDataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from ....errors import CheckpointError


class LoaderFactory(Protocol):
    """Factory of torch data loaders over one dataset."""

    def create(self, **options: Any) -> Any:
        """Return a loader with these options of torch's DataLoader besides the common ones."""


class StreamLoader:
    """Loads batches of this rank's own stream; torchdata keeps its position.

    The position is exact if the dataset or its iterator has `state_dict` and `load_state_dict`;
    otherwise torchdata reads the stream again up to it. The dataset decides which rank and worker
    reads which samples, and must yield equally many batches on all ranks. An incomplete batch at
    the end of a stream is dropped; with workers, one per worker.

    `for batch in loader` yields the rest of a pass through the stream; `forever()` starts again at
    its end.

    Attributes:
        position: Batches yielded so far.
        epoch: Completed passes through the stream.
    """

    def __init__(
        self,
        factory: LoaderFactory,
        *,
        samples: int,
        seed: int,
        identity: Mapping[str, int],
    ) -> None:
        """`samples`: of a batch on this rank; `identity`: on which the saved state depends."""
        self.position = self.epoch = 0
        self._factory = factory
        # A separate generator: the script's, which dropout draws from, is not advanced.
        self._generator = torch.Generator().manual_seed(seed)
        self._identity = {"samples": samples, **identity}
        self._loader: Any = None
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of this pass through the stream."""
        while True:
            batch = next(self._open_batches(), _END)
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
            is_first_pass, before = self._loader is None, self.position
            yield from self
            if is_first_pass and self.position == before:
                samples = self._identity["samples"]
                raise ValueError(f"the dataset yields fewer than {samples} samples to this rank")

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position in its stream, after the last batch yielded."""
        return {
            "position": self.position,
            "epoch": self.epoch,
            "stream": None if self._loader is None else self._loader.state_dict(),
            **self._identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last batch that was yielded when the state was saved.

        Raises:
            CheckpointError: It was saved on another rank, or with other ranks, workers or batches.
        """
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"the stream's position was saved with {name}={state.get(name)}, and here it "
                    f"is {value}. A stream can only be resumed unchanged; use a dataset with a "
                    "length if that may change"
                )
        self.close()
        self.position, self.epoch = int(state["position"]), int(state["epoch"])
        if state["stream"] is not None:
            self._loader = self._open()
            self._loader.load_state_dict(state["stream"])

    def close(self) -> None:
        """Stop the workers; if the loader is used again, the stream starts from its beginning."""
        self._loader = self._batches = None

    def _open_batches(self) -> Iterator[Any]:
        if self._loader is None:
            self._loader = self._open()
        if self._batches is None:
            self._batches = iter(self._loader)
        return self._batches

    def _open(self) -> Any:
        return self._factory.create(
            batch_size=self._identity["samples"], drop_last=True, generator=self._generator
        )


_END = object()

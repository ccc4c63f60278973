"""How a share of a batch is cut into micro-batches. Pure."""

from __future__ import annotations


def num_micro_batches(num_samples: int, micro_batch_samples: int) -> int:
    """Return how many micro-batches of at most that size hold the samples."""
    return -(-num_samples // micro_batch_samples)


def sizes(num_samples: int, count: int) -> tuple[int, ...]:
    """Cut samples into `count` micro-batches, as even as can be, larger ones first.

    Where there are fewer samples than micro-batches the last ones are 0.
    """
    size, larger = divmod(num_samples, count)
    return (size + 1,) * larger + (size,) * (count - larger)

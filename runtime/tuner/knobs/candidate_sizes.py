"""Which numbers of elements are worth trying, of knobs that take any. Pure."""

from __future__ import annotations

# Below a 64th of the model there are so many calls that latency rules, wherever it is.
SMALLEST_PART = 64


def powers_of_two(whole: int, now: int, *, with_zero: bool = False) -> tuple[int, ...]:
    """Return powers of two from a part of the whole up to all of it, with the present value.

    Args:
        whole: Elements of which no more are ever taken at once: larger values do the same.
        now: The present value.
        with_zero: Whether none at all makes sense too.
    """
    top = 1 << max(0, whole - 1).bit_length()
    sizes = {now, *(top // part for part in _parts() if top // part >= 1)}
    return tuple(sorted(sizes | {0} if with_zero else sizes))


def micro_batch_sizes(share: int, now: int) -> tuple[int, ...]:
    """Return sizes of micro-batches that cut a share into 1, 2, 4 and so on of them, ascending.

    Args:
        share: Samples of the largest share of any rank; 0 where that is not known yet.
        now: The present size, which stands for all of the share where it is larger.
    """
    sizes = {now}
    count = 1
    while count < 2 * share:
        sizes.add(-(-share // count))
        count *= 2
    return tuple(sorted(size for size in sizes if size <= max(now, share)))


def _parts() -> list[int]:
    return [1 << power for power in range(SMALLEST_PART.bit_length())]

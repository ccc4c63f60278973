"""What the ranks agree on while they save or load: whether all of them managed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import CheckpointError
from .host_collectives import HostCollectives


@contextmanager
def together(host_group: HostCollectives, what: str, then: str) -> Iterator[None]:
    """Wait for all ranks at the end of the block; where it failed on one, raise on all of them.

    Args:
        host_group: Of all ranks.
        what: What the block does, after "cannot".
        then: How things stand where it fails.

    Raises:
        CheckpointError: Some rank failed.
    """
    failure: Exception | None = None
    try:
        yield
    except (OSError, CheckpointError) as error:
        failure = error
    failed = [
        rank for rank, (bad,) in enumerate(host_group.all_gather([failure is not None])) if bad
    ]
    if isinstance(failure, CheckpointError):
        raise failure  # it says all there is to say
    if failure is not None:
        raise CheckpointError(f"cannot {what}: {failure}. {then}") from failure
    if failed:
        who = ", ".join(map(str, failed))
        raise CheckpointError(f"cannot {what}: rank {who} failed, and says why. {then}")


def texts(host_group: HostCollectives, text: str) -> list[str]:
    """Return what each rank says, in rank order; of some thousand characters at most."""
    said = text.encode()
    lengths = host_group.all_gather([len(said)])[:, 0]
    longest = int(lengths.max())
    padded = host_group.all_gather([*said, *[0] * (longest - len(said))])
    return [bytes(map(int, row)).rstrip(b"\0").decode() for row in padded]

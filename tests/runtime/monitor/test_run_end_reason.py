"""Tests of the reason that is published when monitoring of a rank ends."""

from __future__ import annotations

import pytest
import torch

from zerowatch.errors import PeerFailedError, PeerOutOfMemoryError
from zerowatch.metrics.catalog.training import END_REASONS
from zerowatch.runtime.monitor.run_end_reason import end_reason

PEER = PeerFailedError(1, "ValueError", "bad sample", "train_batch", (1,))


@pytest.mark.parametrize(
    ("error", "failed", "interrupted", "reason"),
    [
        (None, False, False, "completed"),
        (ValueError("handled long ago"), False, False, "completed"),
        (KeyboardInterrupt(), False, True, "interrupted"),
        (ValueError("bad sample"), True, False, "exception"),
        (None, True, False, "exception"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
            True,
            False,
            "out_of_memory",
        ),
        (PEER, True, False, "peer_failed"),
        (PeerOutOfMemoryError("rank 1 ran out of memory"), True, False, "peer_failed"),
        (RuntimeError("[gloo/transport/tcp/pair.cc] closed by peer"), True, False, "peer_failed"),
    ],
)
def test_an_end_has_its_reason(error, failed, interrupted, reason) -> None:
    assert end_reason(error, failed=failed, interrupted=interrupted) == reason
    assert reason in END_REASONS


def test_memory_may_have_run_out_in_another_process() -> None:
    error = RuntimeError("DataLoader worker (pid 77) is killed by signal: Killed. ")

    reason = end_reason(error, failed=True, interrupted=False, is_oom=lambda error: True)

    assert reason == "out_of_memory"

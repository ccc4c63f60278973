"""Compressed values on a real GPU: equal bytes as on the host, and no device synchronization."""

from __future__ import annotations

import pytest
import torch

from zerowatch.runtime.engine.compression.encoding import BLOCK, FORMATS, decode, encode
from zerowatch.runtime.engine.compression.error_feedback import CompressionError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def round_trip(name: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the encoded bytes and the decoded values."""
    wire_format = FORMATS[name]
    wire = torch.empty(wire_format.wire_bytes(len(values)), dtype=torch.uint8, device=values.device)
    encode(wire_format, values.clone(), wire)
    decoded = torch.empty_like(values)
    decode(wire_format, wire, decoded)
    return wire.cpu(), decoded.cpu()


@pytest.mark.parametrize("name", FORMATS)
def test_a_gpu_writes_and_reads_the_hosts_bytes(name: str) -> None:
    values = torch.randn(100 * BLOCK + 7, generator=torch.Generator().manual_seed(0))

    wire, decoded = round_trip(name, values)
    gpu_wire, gpu_decoded = round_trip(name, values.cuda())

    assert torch.equal(gpu_wire, wire)
    assert torch.equal(gpu_decoded, decoded)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_inf_and_nan_stay_non_finite(name: str, bad: float) -> None:
    values = torch.ones(2 * BLOCK, device="cuda")
    values[3] = bad

    _, decoded = round_trip(name, values)

    assert not decoded[3].isfinite()
    assert decoded[BLOCK:].isfinite().all()


def test_the_error_ratio_is_not_waited_for() -> None:
    error = CompressionError()
    torch.cuda._sleep(10**9)

    error.add_values(torch.full((4,), 2.0, device="cuda"))
    error.add_errors(torch.full((4,), 0.02, device="cuda"))
    error.close()

    assert error.ratio() is None
    torch.cuda.synchronize()
    assert error.ratio() == pytest.approx(0.01)

"""Compressed values on a real GPU: the same bytes as on the host, and no waiting for the device."""

from __future__ import annotations

import pytest
import torch

from zerowatch.runtime.engine.compression.compression_error import CompressionError
from zerowatch.runtime.engine.compression.formats import BLOCK, FORMATS
from zerowatch.runtime.engine.compression.kernels import decode, encode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def on_the_wire(name: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes, and what they hold."""
    form = FORMATS[name]
    wire = torch.empty(form.wire_bytes(len(values)), dtype=torch.uint8, device=values.device)
    encode(form, values.clone(), wire)
    arrived = torch.empty_like(values)
    decode(form, wire, arrived)
    return wire.cpu(), arrived.cpu()


@pytest.mark.parametrize("name", FORMATS)
def test_a_gpu_writes_and_reads_the_hosts_bytes(name: str) -> None:
    values = torch.randn(100 * BLOCK + 7, generator=torch.Generator().manual_seed(0))

    wire, arrived = on_the_wire(name, values)
    gpu_wire, gpu_arrived = on_the_wire(name, values.cuda())

    assert torch.equal(gpu_wire, wire)
    assert torch.equal(gpu_arrived, arrived)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_inf_and_nan_stay_what_they_are(name: str, bad: float) -> None:
    values = torch.ones(2 * BLOCK, device="cuda")
    values[3] = bad

    _, arrived = on_the_wire(name, values)

    assert not arrived[3].isfinite()
    assert arrived[BLOCK:].isfinite().all()


def test_the_error_ratio_is_not_waited_for() -> None:
    tally = CompressionError()
    torch.cuda._sleep(10**9)

    tally.will_send(torch.full((4,), 2.0, device="cuda"))
    tally.lost(torch.full((4,), 0.02, device="cuda"))
    tally.close()

    assert tally.ratio() is None
    torch.cuda.synchronize()
    assert tally.ratio() == pytest.approx(0.01)

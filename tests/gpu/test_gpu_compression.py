"""Compressed values on a real GPU: equal bytes as on the host, and no device synchronization."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu.rank_jobs import run_job

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
    values, errors = (torch.full((4,), each, device="cuda") for each in (2.0, 0.02))
    first = CompressionError()  # loads kernels and pins memory, which waits for the device
    first.add_values(values)
    first.add_errors(errors)
    first.close()
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    error = CompressionError()
    torch.cuda._sleep(10**9)

    error.add_values(values)
    error.add_errors(errors)
    error.close()

    assert error.ratio() is None
    torch.cuda.synchronize()
    assert error.ratio() == pytest.approx(0.01)


# Of the weights, over how far training has moved them.
LIMITS = {"fp32": 1e-5, "fp16": 3e-3, "bf16": 1e-2, "int8": 3e-2, "fp8": 0.1}
CASES = [
    pytest.param("gloo", id="on one GPU"),
    pytest.param(
        "nccl",
        id="several",
        marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
    ),
]


@pytest.mark.parametrize("backend", CASES)
def test_training_with_compressed_gradients_stays_close(
    backend: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    share = {"LOCAL_RANK": "0"} if backend == "gloo" else {}

    ranks = run_job("compression_job.py", tmp_path, backend, world_size=2, variables=share)

    record_property("differences", ranks[0]["training"])
    record_property("bytes of a bucket", ranks[0]["workspace"])
    for kind, found in ranks[0]["workspace"].items():
        assert found["measured"] <= found["planned"], kind
    for stage, found in ranks[0]["training"].items():
        for kind, limit in LIMITS.items():
            assert found[kind]["difference"] <= limit, (stage, kind)
            assert found[kind]["same on all ranks"], (stage, kind)

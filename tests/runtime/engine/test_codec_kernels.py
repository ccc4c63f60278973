"""Values into bytes and back, against what float64 says they may be."""

from __future__ import annotations

import pytest
import torch

from zerowatch.runtime.engine.compression.formats import BLOCK, FORMATS
from zerowatch.runtime.engine.compression.kernels import _widened, decode, decode_onto, encode

SCALED = [name for name, form in FORMATS.items() if form.scaled]
# Half of what two neighbouring codes are apart, over the largest value of the block.
HALF_STEP = {"int8": 0.5 / 127, "fp8": 16 / 448, "fp16": 2.0**-12}
ROUNDING = 2e-7  # float32's own, in the scale and its product


def there_and_back(name: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what arrives, and the errors that stay behind."""
    form = FORMATS[name]
    errors = values.clone()
    wire = torch.empty(form.wire_bytes(len(values)), dtype=torch.uint8)
    encode(form, errors, wire)
    arrived = torch.empty_like(values)
    decode(form, wire, arrived)
    return arrived, errors


def gradients(num_values: int) -> torch.Tensor:
    """Return values of sizes that differ by eight orders of magnitude from block to block."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-6, 2, -(-num_values // BLOCK)).repeat_interleave(BLOCK)[:num_values]
    return torch.randn(num_values, generator=generator) * sizes


@pytest.mark.parametrize("name", SCALED)
def test_an_error_is_at_most_half_a_step_of_its_block(name: str) -> None:
    values = gradients(40 * BLOCK)

    arrived, _ = there_and_back(name, values)

    blocks = values.double().view(-1, BLOCK)
    errors = (arrived.double().view(-1, BLOCK) - blocks).abs()
    largest = blocks.abs().amax(1, keepdim=True)
    assert (errors <= largest * (HALF_STEP[name] + ROUNDING)).all()


def test_int8_is_the_nearest_of_its_codes() -> None:
    values = gradients(8 * BLOCK)

    arrived, _ = there_and_back("int8", values)

    blocks = values.double().view(-1, BLOCK)
    step = blocks.abs().amax(1, keepdim=True) / 127
    nearest = (blocks / step).round() * step
    assert torch.allclose(arrived.double().view(-1, BLOCK), nearest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_what_arrives_and_what_stays_behind_are_the_value(name: str) -> None:
    values = gradients(3 * BLOCK + 7)

    arrived, errors = there_and_back(name, values)

    whole = arrived.double() + errors.double()
    assert torch.allclose(whole, values.double(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_unscaled_values_are_torchs_own_conversion(name: str) -> None:
    values = gradients(1000)

    arrived, _ = there_and_back(name, values)

    assert torch.equal(arrived, values.to(FORMATS[name].codes).float())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-38, 1e30])
def test_the_smallest_and_largest_values_stay_finite(name: str, size: float) -> None:
    values = torch.linspace(-size, size, BLOCK)

    arrived, errors = there_and_back(name, values)

    assert arrived.isfinite().all()
    assert errors.isfinite().all()
    assert (arrived - values).abs().max() <= max(0.04 * size, 1e-38)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_inf_and_nan_come_out_as_inf_or_nan_and_spoil_no_other_block(name: str, bad: float) -> None:
    values = gradients(3 * BLOCK)
    values[BLOCK + 5] = bad

    arrived, _ = there_and_back(name, values)

    assert not arrived[BLOCK + 5].isfinite()
    assert arrived[:BLOCK].isfinite().all()
    assert arrived[2 * BLOCK :].isfinite().all()


@pytest.mark.parametrize("name", FORMATS)
def test_decoding_onto_a_sum_adds(name: str) -> None:
    form, values = FORMATS[name], gradients(2 * BLOCK + 3)
    wire = torch.empty(form.wire_bytes(len(values)), dtype=torch.uint8)
    encode(form, values.clone(), wire)
    arrived, total = torch.empty_like(values), torch.ones_like(values)

    decode(form, wire, arrived)
    decode_onto(form, wire, total)

    assert torch.equal(total, 1 + arrived)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_with_feedback_the_mean_of_what_arrives_nears_the_value(name: str) -> None:
    values, rounds = gradients(4 * BLOCK), 200
    residual, total = torch.zeros_like(values), torch.zeros(len(values), dtype=torch.float64)

    for _ in range(rounds):
        arrived, residual = there_and_back(name, values + residual)
        total += arrived

    # All that is missing of the sum is the last residual: one error, and not 200.
    largest = values.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)
    missing = (total / rounds - values).abs() / largest
    assert missing.max() <= 1.1 * HALF_STEP[name] / rounds + ROUNDING


def test_eight_bits_and_scales_are_little_more_than_a_quarter_of_fp32() -> None:
    assert FORMATS["int8"].wire_bytes(10_000_000) == pytest.approx(
        10_000_000 * (1 + 4 / 256), rel=1e-4
    )
    assert FORMATS["bf16"].wire_bytes(7) == 14


def test_fp8_is_widened_by_its_bits_as_torch_does() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    number = ~codes.float().isnan()

    assert torch.equal(_widened(codes)[number], codes.float()[number])

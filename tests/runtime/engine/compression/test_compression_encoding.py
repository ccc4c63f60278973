"""Tests of the wire formats of gradient compression, compared with float64."""

from __future__ import annotations

import pytest
import torch

from zerowatch.runtime.engine.compression.encoding import (
    BLOCK,
    FORMATS,
    decode,
    decode_add,
    encode,
    to_float32,
)

SCALED = [name for name, wire_format in FORMATS.items() if wire_format.is_scaled]
# Half the distance of two neighboring codes, over the largest value of the block.
HALF_STEP = {"int8": 0.5 / 127, "fp8": 16 / 448, "fp16": 2.0**-12}
ROUNDING = 2e-7  # float32's own, in the scale and its product


def round_trip(name: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the decoded values and the errors."""
    wire_format = FORMATS[name]
    errors = values.clone()
    wire = torch.empty(wire_format.wire_bytes(len(values)), dtype=torch.uint8)
    encode(wire_format, errors, wire)
    decoded = torch.empty_like(values)
    decode(wire_format, wire, decoded)
    return decoded, errors


def gradients(num_values: int, seed: int) -> torch.Tensor:
    """Return values whose blocks differ in size by up to eight orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-6, 2, -(-num_values // BLOCK)).repeat_interleave(BLOCK)[:num_values]
    return torch.randn(num_values, generator=generator) * sizes


@pytest.mark.parametrize("name", SCALED)
def test_an_error_is_at_most_half_a_step_of_its_block(name: str, seed: int) -> None:
    values = gradients(40 * BLOCK, seed)

    decoded, _ = round_trip(name, values)

    blocks = values.double().view(-1, BLOCK)
    errors = (decoded.double().view(-1, BLOCK) - blocks).abs()
    largest = blocks.abs().amax(1, keepdim=True)
    assert (errors <= largest * (HALF_STEP[name] + ROUNDING)).all()


def test_int8_rounds_to_the_nearest_code(seed: int) -> None:
    values = gradients(8 * BLOCK, seed)

    decoded, _ = round_trip("int8", values)

    blocks = values.double().view(-1, BLOCK)
    step = blocks.abs().amax(1, keepdim=True) / 127
    nearest = (blocks / step).round() * step
    assert torch.allclose(decoded.double().view(-1, BLOCK), nearest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_decoded_value_plus_error_is_the_value(name: str, seed: int) -> None:
    values = gradients(3 * BLOCK + 7, seed)

    decoded, errors = round_trip(name, values)

    whole = decoded.double() + errors.double()
    assert torch.allclose(whole, values.double(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_unscaled_values_equal_torchs_own_conversion(name: str, seed: int) -> None:
    values = gradients(1000, seed)

    decoded, _ = round_trip(name, values)

    assert torch.equal(decoded, values.to(FORMATS[name].dtype).float())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-38, 1e30])
def test_the_smallest_and_largest_values_stay_finite(name: str, size: float) -> None:
    values = torch.linspace(-size, size, BLOCK)

    decoded, errors = round_trip(name, values)

    assert decoded.isfinite().all()
    assert errors.isfinite().all()
    assert (decoded - values).abs().max() <= max(0.04 * size, 1e-38)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_inf_and_nan_stay_non_finite_and_affect_no_other_block(
    name: str, bad: float, seed: int
) -> None:
    values = gradients(3 * BLOCK, seed)
    values[BLOCK + 5] = bad

    decoded, _ = round_trip(name, values)

    assert not decoded[BLOCK + 5].isfinite()
    assert decoded[:BLOCK].isfinite().all()
    assert decoded[2 * BLOCK :].isfinite().all()


@pytest.mark.parametrize("name", FORMATS)
def test_decode_add_adds_to_a_sum(name: str, seed: int) -> None:
    wire_format, values = FORMATS[name], gradients(2 * BLOCK + 3, seed)
    wire = torch.empty(wire_format.wire_bytes(len(values)), dtype=torch.uint8)
    encode(wire_format, values.clone(), wire)
    decoded, total = torch.empty_like(values), torch.ones_like(values)

    decode(wire_format, wire, decoded)
    decode_add(wire_format, wire, total)

    assert torch.equal(total, 1 + decoded)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_with_feedback_the_mean_of_decoded_values_approaches_the_value(
    name: str, seed: int
) -> None:
    values, rounds = gradients(4 * BLOCK, seed), 200
    residual, total = torch.zeros_like(values), torch.zeros(len(values), dtype=torch.float64)

    for _ in range(rounds):
        decoded, residual = round_trip(name, values + residual)
        total += decoded

    # Only the last residual is missing from the sum: one error, not 200.
    largest = values.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)
    missing = (total / rounds - values).abs() / largest
    assert missing.max() <= 1.1 * HALF_STEP[name] / rounds + ROUNDING


def test_wire_bytes_of_8_bit_formats_include_a_scale_per_block() -> None:
    assert FORMATS["int8"].wire_bytes(10_000_000) == pytest.approx(
        10_000_000 * (1 + 4 / 256), rel=1e-4
    )
    assert FORMATS["bf16"].wire_bytes(7) == 14


def test_fp8_is_converted_by_its_bits_as_torch_does() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    number = ~codes.float().isnan()

    assert torch.equal(to_float32(codes)[number], codes.float()[number])


@pytest.mark.parametrize("name", SCALED)
def test_a_scale_is_a_product_because_a_gpu_divides_by_a_number_in_another_way(
    name: str, seed: int
) -> None:
    """CUDA computes `tensor / number` as `tensor * (1 / number)`, and CPUs divide."""
    wire_format, values = FORMATS[name], gradients(400 * BLOCK, seed)
    wire = torch.empty(wire_format.wire_bytes(len(values)), dtype=torch.uint8)

    encode(wire_format, values.clone(), wire)

    inverse = torch.tensor(1.0).div(wire_format.max_code)
    scales = wire[len(values) * wire_format.dtype.itemsize :].view(torch.float32)
    assert torch.equal(scales, values.view(-1, BLOCK).abs().amax(1) * inverse)

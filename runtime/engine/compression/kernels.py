"""Values into bytes and back, on any device. It knows nothing of ranks."""

from __future__ import annotations

import torch

from .formats import BLOCK, SCALE, Format

# The least scale: under it, its inverse would be infinite.
_TINY = torch.finfo(torch.float32).tiny
_FP8_BITS = 0x87F00000 - 2**32  # as a signed integer


def encode(form: Format, values: torch.Tensor, wire: torch.Tensor) -> None:
    """Write values to the wire, and leave in their place what the wire does not carry of them.

    A block with inf or nan comes out as inf and nan throughout, for it has no scale; its errors are
    nan.

    Args:
        form: What becomes of a value.
        values: float32, one dimension; ends as values - decoded values.
        wire: uint8, `form.wire_bytes(len(values))` long.
    """
    if not form.scaled:
        codes = wire.view(form.codes)
        codes.copy_(values)
        values.sub_(codes)
        return
    spare = -len(values) % BLOCK
    padded = torch.nn.functional.pad(values, (0, spare)) if spare else values
    _encode_blocks(form, padded.view(-1, BLOCK), wire)
    if spare:
        values.copy_(padded[: len(values)])


def _encode_blocks(form: Format, blocks: torch.Tensor, wire: torch.Tensor) -> None:
    codes, scales = _parts(form, wire)
    torch.amax(blocks.abs(), dim=1, keepdim=True, out=scales)
    scales.div_(form.largest).clamp_min_(_TINY)
    scaled = blocks / scales
    if form.codes == torch.int8:
        codes.copy_(scaled.round_())
    else:
        codes.copy_(scaled)
        scaled = _widened(codes)
    blocks.addcmul_(scaled, scales, value=-1)


def decode(form: Format, wire: torch.Tensor, out: torch.Tensor) -> None:
    """Write the values of the wire to `out`, float32."""
    if form.scaled:
        out.copy_(_decoded(form, wire)[: len(out)])
    else:
        out.copy_(wire.view(form.codes))


def decode_onto(form: Format, wire: torch.Tensor, total: torch.Tensor) -> None:
    """Add the values of the wire to `total`, float32."""
    if form.scaled:
        total.add_(_decoded(form, wire)[: len(total)])
    else:
        total.add_(wire.view(form.codes))


def _decoded(form: Format, wire: torch.Tensor) -> torch.Tensor:
    codes, scales = _parts(form, wire)
    return _widened(codes).mul_(scales).view(-1)


def _widened(codes: torch.Tensor) -> torch.Tensor:
    """Return codes as float32; on CPUs fp8 by its bits, for torch's conversion takes 3 ns each."""
    if codes.dtype != torch.float8_e4m3fn or codes.device.type != "cpu":
        return codes.to(torch.float32)
    # e4m3's sign, exponent and mantissa at float32's places, and the exponents' biases evened out.
    bits = codes.view(torch.int8).to(torch.int32).bitwise_left_shift_(20)
    return bits.bitwise_and_(_FP8_BITS).view(torch.float32).mul_(2.0**120)


def _parts(form: Format, wire: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes, [blocks, BLOCK], and the scales, [blocks, 1], as views of the wire."""
    num_blocks = len(wire) // (BLOCK * form.codes.itemsize + SCALE.itemsize)
    end = num_blocks * BLOCK * form.codes.itemsize
    return wire[:end].view(form.codes).view(-1, BLOCK), wire[end:].view(SCALE).view(-1, 1)

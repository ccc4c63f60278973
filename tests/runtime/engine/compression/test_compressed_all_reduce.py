"""Tests of compressed sums over several ranks, which run in one process one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import pytest
import torch

from zerowatch.runtime.engine.compression import compressed_all_reduce
from zerowatch.runtime.engine.compression.bucket_compressor import BucketCompressor, GradientSpan
from zerowatch.runtime.engine.compression.compressed_all_reduce import (
    CollectiveSteps,
    CompressedAllReduce,
    InFlightExchange,
    chunk_values,
    chunks,
    direct_is_cheaper,
    even_sizes,
    workspace_bytes,
)
from zerowatch.runtime.engine.compression.encoding import BLOCK, FORMATS
from zerowatch.runtime.engine.compression.error_feedback import CompressionError, Residuals

CPU = torch.device("cpu")


class Ranks:
    """Replaces deepspeed.comm: the ranks issue each collective in turns, then it is run."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks, self.rank = num_ranks, 0
        self.calls: list[dict[str, Any]] = []
        self.sent_bytes = [0] * num_ranks

    def get_rank(self, group: object) -> int:
        return self.rank

    def get_world_size(self, group: object) -> int:
        return self.num_ranks

    def all_to_all_single(self, received: Any, sent: Any, **options: Any) -> None:
        assert options["group"] == "group"
        self.calls.append({"received": received, "sent": sent, **options})
        self.sent_bytes[self.rank] += len(sent)

    def all_gather_into_tensor(self, gathered: Any, own: Any, **options: Any) -> None:
        assert options["group"] == "group"
        self.calls.append({"gathered": gathered, "own": own})

    def run(self) -> None:
        """Run the collective that all ranks have issued."""
        calls, self.calls = self.calls, []
        if calls and "own" in calls[0]:
            for call in calls:
                call["gathered"].copy_(torch.cat([each["own"] for each in calls]))
            return
        parts = [call["sent"].split(call["input_split_sizes"]) for call in calls]
        for rank, call in enumerate(calls):
            incoming = [parts[other][rank] for other in range(len(calls))]
            assert [len(part) for part in incoming] == call["output_split_sizes"]
            call["received"].copy_(torch.cat(incoming))

    def together(self, exchanges: Sequence[Sequence[CollectiveSteps]]) -> None:
        """Run the exchanges of all ranks, each collective on all ranks at once."""
        for of_all_ranks in zip_longest(*exchanges):
            running = True
            while running:
                running = False
                for self.rank, steps in enumerate(of_all_ranks):
                    running |= next(steps, self) is not self
                self.run()


def reduced(
    monkeypatch: pytest.MonkeyPatch, kind: str, values: list[torch.Tensor], sizes: list[int] | None
) -> tuple[list[torch.Tensor], list[float | None], Ranks]:
    """Return each rank's result and error ratio: of its own part, if sizes are given."""
    ranks = Ranks(len(values))
    monkeypatch.setattr(compressed_all_reduce, "dist", ranks)
    exchanges, results, errors = [], [], []
    for ranks.rank, own in enumerate(values):
        error = CompressionError()
        exchange = CompressedAllReduce(FORMATS[kind], "group", error)
        result = own if sizes is not None else torch.full_like(own, -1.0)
        steps = exchange.all_reduce(own, result) if sizes is None else None
        exchanges.append(list(steps or exchange.reduce_scatter(own, sizes or [])))
        results.append(result)
        errors.append(error)
    ranks.together(exchanges)
    for error in errors:
        error.close()
    return results, [error.ratio() for error in errors], ranks


@pytest.mark.parametrize("num_values", [1, 700, 3 * BLOCK, 3000])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_rank_has_the_sum_over_all_ranks(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, num_values: int
) -> None:
    # Whole numbers up to a thousand are exact in fp32.
    values = [torch.arange(float(num_values)) % (300 + rank) for rank in range(num_ranks)]
    expected = torch.stack(values).sum(0)
    monkeypatch.setattr(compressed_all_reduce, "CHUNK_VALUES", 2 * BLOCK)

    results, ratios, _ = reduced(monkeypatch, "fp32", [each.clone() for each in values], None)

    assert all(torch.equal(result, expected) for result in results)
    assert all(ratio in (0.0, None) for ratio in ratios)


def test_every_rank_has_its_own_part_of_the_sum_and_keeps_the_errors_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = [torch.arange(10.0) * (rank + 1) for rank in range(3)]
    expected = torch.stack(values).sum(0)
    sizes = [3, 0, 7]

    results, _, _ = reduced(monkeypatch, "fp32", values, sizes)

    assert torch.equal(results[0][:3], expected[:3])
    assert torch.equal(results[2][3:], expected[3:])
    assert results[0][3:].tolist() == [0.0] * 7  # it was sent without an error
    assert results[1].tolist() == [0.0] * 10


@pytest.mark.parametrize("kind", ["int8", "fp8", "bf16"])
def test_all_ranks_have_equal_sums_whose_error_the_residuals_hold(
    monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(900, generator=generator) for _ in range(2)]
    expected = torch.stack(values).double().sum(0)

    results, ratios, ranks = reduced(monkeypatch, kind, (left := [v.clone() for v in values]), None)

    assert torch.equal(results[0], results[1])
    missing = expected - results[0].double()
    kept = torch.stack(left).double().sum(0)
    assert torch.allclose(missing, kept, atol=1e-5)
    assert all(ratio is not None and 0 < ratio < 0.1 for ratio in ratios)
    sizes = even_sizes(900, 2)
    assert ranks.sent_bytes == [FORMATS[kind].wire_bytes(size) for size in reversed(sizes)]


@pytest.mark.parametrize(
    ("num_values", "num_ranks", "sizes"),
    [
        (3 * BLOCK, 2, [2 * BLOCK, BLOCK]),
        (2 * BLOCK, 2, [BLOCK, BLOCK]),
        (2 * BLOCK + 1, 2, [2 * BLOCK, 1]),
        (BLOCK, 3, [BLOCK, 0, 0]),
        (5, 2, [5, 0]),
    ],
)
def test_values_are_divided_in_whole_blocks(
    num_values: int, num_ranks: int, sizes: list[int]
) -> None:
    assert even_sizes(num_values, num_ranks) == sizes


def test_messages_hold_a_part_of_each_ranks_values() -> None:
    assert list(chunks([5, 0, 3], 2)) == [
        [(0, 2), (5, 0), (5, 2)],
        [(2, 2), (5, 0), (7, 1)],
        [(4, 1), (5, 0), (8, 0)],
    ]


@pytest.mark.parametrize(
    ("sizes", "is_direct"),
    [
        ([6, 6, 6], True),
        ([12, 3, 3], True),  # 24 values at most, of 24
        ([13, 3, 2], False),
    ],
)
def test_a_direct_sum_may_move_as_much_as_two_phases(sizes: list[int], is_direct: bool) -> None:
    assert direct_is_cheaper(sizes) is is_direct


@pytest.mark.parametrize(
    ("device", "num_ranks", "values"),
    [
        ("cpu", 2, 1024 * BLOCK),
        ("cpu", 64, 1024 * BLOCK),
        ("cuda", 2, 2**25),
        ("cuda", 3, 2**26 // 3 // BLOCK * BLOCK),
        ("cuda", 2**20, BLOCK),
    ],
)
def test_a_message_has_this_many_values_of_each_rank(
    device: str, num_ranks: int, values: int
) -> None:
    assert chunk_values(device, num_ranks) == values


def test_the_workspace_is_that_of_values_copies_and_codes() -> None:
    # Two ranks, of which each sums 512 values: gradients, sums, three copies, and two codes.
    codes = (1000 + 2 * BLOCK + 255) // BLOCK * (BLOCK + 4)

    found = workspace_bytes(FORMATS["int8"], 1000, 2, "cpu")

    assert found == 4 * (2 * 1000 + 3 * 512) + 2 * codes


class Work:
    """A collective that counts how often it is waited for."""

    def __init__(self) -> None:
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


def test_an_exchange_starts_each_collective_after_the_one_before() -> None:
    works = [Work(), Work()]
    exchange = InFlightExchange(work for work in works)  # type: ignore[arg-type]

    advanced = [exchange.advance() for _ in range(3)]

    assert advanced == [True, False, False]
    assert [work.num_waits for work in works] == [1, 1]


def compressor(residuals: Residuals | None) -> BucketCompressor:
    return BucketCompressor(FORMATS["int8"], residuals, CompressionError())


SPANS = [[GradientSpan("a", 4, 0, 2), GradientSpan("b", 3, 1, 1)], [GradientSpan("a", 4, 2, 2)]]


def test_gradients_are_averaged_and_get_the_residuals_of_their_places() -> None:
    residuals = Residuals(torch.float32)
    residuals.of("a", 4, CPU).copy_(torch.tensor([10.0, 20.0, 30.0, 40.0]))
    residuals.of("b", 3, CPU).copy_(torch.tensor([50.0, 60.0, 70.0]))
    packer = compressor(residuals)
    packer.gradient_scale = 2.0

    values = packer.pack(
        [torch.tensor([[2.0], [4.0], [6.0]]), torch.tensor([8.0, 10.0])], SPANS, divisor=2.0
    )

    assert values.tolist() == [1 + 20, 2 + 40, 3 + 120, 4 + 60, 5 + 80]


def test_without_feedback_gradients_are_only_averaged() -> None:
    packer = compressor(None)
    packer.keep_errors(errors := torch.tensor([float("nan")]), [])

    assert packer.pack([torch.tensor([3.0, 5.0])], [], divisor=1.0).tolist() == [3.0, 5.0]
    assert errors.isnan().all()


def test_errors_are_kept_without_the_scale_of_their_window() -> None:
    residuals = Residuals(torch.float32)
    packer = compressor(residuals)
    packer.gradient_scale = 4.0

    infinite = float("inf")
    packer.keep_errors(torch.tensor([8.0, float("nan"), 12.0, infinite, -infinite]), SPANS)

    assert residuals.of("a", 4, CPU).tolist() == [2.0, 0.0, 0.0, 0.0]
    assert residuals.of("b", 3, CPU).tolist() == [0.0, 3.0, 0.0]


def test_the_error_ratio_of_a_window_is_known_once_it_is_closed() -> None:
    error = CompressionError()
    error.add_values(torch.tensor([3.0, 4.0]))
    error.add_errors(torch.tensor([0.0, 0.5]))
    before = error.ratio()
    error.close()
    first = error.ratio()
    error.add_values(torch.tensor([1.0]))
    error.discard()
    error.close()

    assert (before, first, error.ratio()) == (None, pytest.approx(0.1), first)


@pytest.mark.parametrize(
    ("kind", "num_values", "num_bytes"),
    [
        ("fp32", 300, 1200),
        ("bf16", 300, 600),
        ("fp16", 300, 2 * (512 + 4)),
        ("int8", 256, 256 + 4),
        ("int8", 257, 2 * (256 + 4)),
        ("fp8", 0, 0),
    ],
)
def test_encoded_values_take_this_many_bytes(kind: str, num_values: int, num_bytes: int) -> None:
    assert FORMATS[kind].wire_bytes(num_values) == num_bytes


def test_formats_of_8_bits_have_feedback_by_default() -> None:
    with_feedback = {name for name, wire_format in FORMATS.items() if wire_format.feedback}

    assert with_feedback == {"int8", "fp8"}

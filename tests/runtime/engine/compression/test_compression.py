"""Tests of gradient compression in one process: sizes, index, residuals, overlap."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerowatch.runtime.common.deepspeed_internals import INTERNALS
from zerowatch.runtime.engine.compression import compressed_all_reduce
from zerowatch.runtime.engine.compression.bucket_compressor import (
    BucketCompressor,
    GradientSpan,
    ParameterIndex,
)
from zerowatch.runtime.engine.compression.compressed_all_reduce import (
    InFlightReduction,
    chunk_values,
    chunks,
    direct_is_cheaper,
    even_sizes,
    run_collective_steps,
    workspace_bytes,
)
from zerowatch.runtime.engine.compression.encoding import BLOCK, FORMATS
from zerowatch.runtime.engine.compression.error_feedback import CompressionError, Residuals
from zerowatch.runtime.engine.compression.gradient_compressor import GradientCompressor

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_values", [1, 255, 256, 1000, 99_999])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_even_sizes_are_whole_blocks_and_add_up(num_values: int, num_ranks: int) -> None:
    sizes = even_sizes(num_values, num_ranks)

    assert sum(sizes) == num_values
    assert sum(size % BLOCK > 0 for size in sizes) <= 1  # the last that has any
    assert max(sizes) - num_values / num_ranks <= BLOCK


@pytest.mark.parametrize("step", [100, 999, 1000])
def test_chunks_cover_each_ranks_values_once_and_in_order(step: int) -> None:
    sizes = [250, 0, 999, 1]

    messages = list(chunks(sizes, step))

    for rank, size in enumerate(sizes):
        start = sum(sizes[:rank])
        covered = [at for spans in messages for at in range(spans[rank][0], sum(spans[rank]))]
        assert covered == list(range(start, start + size))
    assert all(size <= step for spans in messages for _, size in spans)


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 2**20])
def test_messages_between_devices_are_whole_blocks_and_limited(num_ranks: int) -> None:
    values = chunk_values("cuda", num_ranks)

    assert values % BLOCK == 0
    assert 0 < values <= max(BLOCK, 2**26 // num_ranks)


class LiveBytes(TorchDispatchMode):
    """Records the most bytes of new tensors that existed at one time."""

    def __init__(self, old: torch.Tensor) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = {old.untyped_storage()._cdata}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._on_freed, key, size)

    def _on_freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


class DoneWork:
    def wait(self) -> None:
        """Do nothing: the collectives below return at once."""


class Collectives:
    """Replaces deepspeed.comm on rank 1 of some ranks, all of which send the same."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def get_rank(self, group: object) -> int:
        return 1

    def get_world_size(self, group: object) -> int:
        return self.num_ranks

    def all_to_all_single(
        self, received: torch.Tensor, sent: torch.Tensor, **options: object
    ) -> DoneWork:
        received.zero_()
        return DoneWork()

    def all_gather_into_tensor(
        self, gathered: torch.Tensor, own: torch.Tensor, **options: object
    ) -> DoneWork:
        gathered.zero_()
        return DoneWork()


@pytest.mark.parametrize("message_values", [None, 2**14])
@pytest.mark.parametrize("num_values", [2**18, 99_999])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_bucket_takes_no_more_memory_than_its_workspace(
    monkeypatch: pytest.MonkeyPatch, kind: str, num_values: int, message_values: int | None
) -> None:
    if message_values is not None:
        monkeypatch.setattr(compressed_all_reduce, "CHUNK_VALUES", message_values)
    monkeypatch.setattr(compressed_all_reduce, "dist", Collectives(num_ranks=2))
    wire_format = FORMATS[kind]
    compressor = BucketCompressor(wire_format, None, CompressionError())
    gradient = torch.randn(num_values)

    with LiveBytes(gradient) as memory:
        exchange = compressor.exchange(None)
        values = compressor.pack([gradient], [], divisor=2.0)
        result = torch.empty_like(values)
        run_collective_steps(exchange.all_reduce(values, result))

    limit = workspace_bytes(wire_format, num_values, 2, "cpu")
    assert 0.4 * limit <= memory.peak <= limit


def test_sums_go_directly_to_their_owners_unless_one_rank_owns_most_of_them() -> None:
    assert direct_is_cheaper([10, 10, 10, 10])
    assert not direct_is_cheaper([40, 0, 0, 0])
    assert direct_is_cheaper([20, 0])  # with two ranks both move the same bytes


def test_a_part_of_a_bucket_is_found_across_the_borders_of_parameters() -> None:
    bucket = torch.zeros(100)
    index = ParameterIndex([("b", bucket[30:70]), ("a", bucket[:30]), ("empty", bucket[:0])])

    spans = index.spans_of(bucket[20:50])

    assert spans == [GradientSpan("a", 30, 20, 10), GradientSpan("b", 40, 0, 20)]


def test_memory_outside_all_gradients_is_an_error() -> None:
    bucket = torch.zeros(100)
    index = ParameterIndex([("a", bucket[:30])])

    with pytest.raises(LookupError):
        index.spans_of(bucket[20:40])


def test_an_aborted_window_leaves_residuals_as_they_were() -> None:
    residuals = Residuals(torch.float32)
    residuals.of("a", 3, CPU).fill_(1.0)
    residuals.commit()

    residuals.of("a", 3, CPU).fill_(7.0)
    residuals.discard()

    assert residuals.of("a", 3, CPU).tolist() == [1.0, 1.0, 1.0]


def test_residuals_take_two_copies_and_no_more_over_many_windows() -> None:
    residuals = Residuals(torch.bfloat16)

    for _ in range(5):
        residuals.of("a", 100, CPU).add_(1.0)
        residuals.commit()

    copies = [*residuals._committed.values(), *residuals._window.values()]
    copies += residuals._spare.values()
    assert sum(copy.nbytes for copy in copies) == 2 * 100 * 2
    assert residuals.state_dict()["a"].tolist() == [5.0] * 100


def test_loaded_residuals_equal_the_saved_ones() -> None:
    residuals, restarted = Residuals(torch.float32), Residuals(torch.float32)
    residuals.of("a", 2, CPU).copy_(torch.tensor([0.1, 0.2]))
    residuals.commit()

    restarted.load_state_dict(residuals.state_dict())

    assert torch.equal(restarted.of("a", 2, CPU), residuals.of("a", 2, CPU))


def test_the_error_ratio_is_that_of_the_norms() -> None:
    error = CompressionError()

    for value, its_error in ((3.0, 0.03), (4.0, 0.04)):
        error.add_values(torch.tensor([value]))
        error.add_errors(torch.tensor([its_error]))
    error.close()

    assert error.ratio() == pytest.approx(0.01)


def test_gradients_that_are_not_finite_have_no_error_ratio() -> None:
    error = CompressionError()

    error.add_values(torch.tensor([float("inf")]))
    error.add_errors(torch.tensor([float("nan")]))
    error.close()

    assert error.ratio() is None


class Work:
    """A collective that logs when it is waited for."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def wait(self) -> None:
        self._log.append(f"wait {self._name}")


def two_phases(log: list[str], name: str):
    for phase in "12":
        log.append(f"start {name}{phase}")
        yield Work(log, f"{name}{phase}")
    log.append(f"end {name}")


def test_the_next_exchange_starts_before_the_last_is_waited_for() -> None:
    log: list[str] = []

    run_collective_steps(two_phases(log, name) for name in "abc")

    assert log.index("start b1") < log.index("wait a1")
    assert log.index("start c1") < log.index("wait b1")
    assert Counter(line.split()[0] for line in log) == {"start": 6, "wait": 6, "end": 3}


def test_discarded_exchanges_are_waited_for_and_not_finished() -> None:
    log: list[str] = []

    class Reduction:
        def exchanges(self):
            return [two_phases(log, "a")]

        def finish(self) -> None:
            log.append("finish")

    InFlightReduction(Reduction()).discard()

    assert log == ["start a1", "wait a1"]


def test_an_unknown_kind_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"plain, fp32, bf16, fp16, int8, fp8, got 'int4'"):
        GradientCompressor("int4")


def test_private_names_are_listed_once_and_in_order() -> None:
    for names in INTERNALS["engine/compression"].values():
        assert list(names) == sorted(set(names))

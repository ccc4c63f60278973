"""Measurements of the GPU tests on fakes and made-up traces: they find what they are to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from fakes.device_rank import DeviceRank
from fakes.sleeping_collectives import FakeWork
from gpu import probes


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceRank]:
    made = DeviceRank(monkeypatch)
    yield made
    made.instrumentation.close()


def waiting(rank: DeviceRank, begin: Callable[[], FakeWork]) -> int:
    return probes.streams_that_wait(rank.cuda.pool, begin, lambda: rank.compute.run(1000))


def test_streams_that_a_callback_makes_wait_are_counted(rank: DeviceRank) -> None:
    rank.instrumentation.close()

    def with_callback() -> FakeWork:
        work = rank.begin(1)
        work.get_future().add_done_callback(lambda _: None)
        return work

    plain = waiting(rank, lambda: rank.begin(1))
    rank.host.elapse(10_000)

    assert plain == 1  # NCCL's own
    assert waiting(rank, with_callback) == len(rank.cuda.pool)


@pytest.mark.parametrize("is_sampled", [True, False])
def test_monitoring_makes_no_stream_wait(rank: DeviceRank, is_sampled: bool) -> None:
    rank.recorder.is_sampled = is_sampled
    assert dist.all_reduce is not rank.cuda.all_reduce

    assert waiting(rank, lambda: rank.begin(1)) == 1


def test_a_union_counts_each_moment_once() -> None:
    assert probes.covered([(0, 10), (5, 12), (20, 30), (21, 22)]) == 22


def test_exposed_is_what_runs_alone_before_the_last_computation() -> None:
    compute = [(0.0, 20.0), (50.0, 60.0)]

    assert probes.exposed([(10.0, 50.0), (55.0, 90.0)], compute) == 30
    assert probes.exposed([(5.0, 15.0)], compute) == 0
    assert probes.exposed([(0.0, 9.0)], []) == 0


def test_an_added_ratio_is_of_pairs_so_that_a_drift_of_the_machine_cancels_out() -> None:
    assert probes.added_ratio([1.0, 2.0, 4.0], [1.01, 2.02, 4.04]) == pytest.approx(0.01)


def test_ratios_to_neighbours_are_free_of_a_steady_drift() -> None:
    plain = [1.0, 3.0, 5.0]

    assert probes.ratios_to_neighbours(plain, [2.02, 4.04], plain[1:]) == pytest.approx([1.01] * 2)
    assert probes.ratios_to_neighbours(plain, plain[1:], plain[2:]) == [1.0]


def test_only_places_in_the_package_are_its_own() -> None:
    own = ["runtime/a.py:3", "metrics/b.py:1", "__init__.py:7"]
    others = ["tests/b.py:1", ".venv/torch/c.py:2", "site/deepspeed/runtime/engine.py:4"]
    places = [f"/repo/{place}" for place in own + others]

    assert probes.own_synchronizations([*places, "/x/d.py:1"], "/repo") == own

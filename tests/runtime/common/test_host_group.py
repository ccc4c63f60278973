"""Tests of the group of all ranks on the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zerowatch.errors import ZerowatchError
from zerowatch.runtime.common.host_group import HostGroup, new_host_group


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    """Create the default process group, with this process as its only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class MeetingHostGroup(HostGroup):
    """Host group whose threads meet where they read the process group, if they can."""

    both_read = threading.Barrier(2, timeout=0.2)  # a lock lets only one of them read

    @property
    def _group(self) -> Any:
        group = self.__dict__["group"]
        with suppress(threading.BrokenBarrierError):
            self.both_read.wait()
        return group

    @_group.setter
    def _group(self, group: Any) -> None:
        self.__dict__["group"] = group


def test_a_group_that_two_threads_close_is_destroyed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    destroyed: list[object] = []
    monkeypatch.setattr(dist, "destroy_process_group", destroyed.append)
    host_group, group = MeetingHostGroup(), object()
    host_group._group = group

    with ThreadPoolExecutor(2) as threads:
        closing = [threads.submit(host_group.close) for _ in range(2)]
    for each in closing:
        each.result()
    monkeypatch.undo()

    assert destroyed == [group]


def test_one_rank_has_its_own_values_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "new_group")
    host_group = HostGroup()

    assert (host_group.rank, host_group.world_size) == (0, 1)
    assert host_group.all_gather([3, 5.5]).tolist() == [[3.0, 5.5]]
    assert host_group.all_gather_text("é\n") == ["é\n"]
    assert host_group.all_max(-7) == -7
    assert host_group.broadcast_text("") == ""
    host_group.close()


class Job:
    """Rank 1 of three, whose collectives are answered with what the other two would send."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[list[list[float]]] = []  # of ranks 0 and 2, for each all_gather
        self.maxima: list[int] = []
        self.sent: list[list[float]] = []
        self.text = b""
        for name, answer in {
            "get_rank": lambda: 1,
            "get_world_size": lambda: 3,
            "new_group": self.new_group,
            "all_gather": self.all_gather,
            "all_reduce": self.all_reduce,
            "broadcast": self.broadcast,
        }.items():
            monkeypatch.setattr(dist, name, answer)

    def new_group(self, **options: object) -> str:
        assert options == {"backend": "gloo", "group_desc": "zerowatch"}
        return "group"

    def all_gather(self, rows: list[torch.Tensor], own: torch.Tensor, group: object) -> None:
        assert group == "group"
        self.sent.append(own.tolist())
        first, last = self.rows.pop(0)
        for row, values in zip(rows, (first, own.tolist(), last), strict=True):
            row.copy_(torch.tensor(values, device="cpu"))

    def all_reduce(self, value: torch.Tensor, op: object, group: object) -> None:
        assert (op, group) == (dist.ReduceOp.MAX, "group")
        value.clamp_(min=self.maxima.pop(0))

    def broadcast(self, buffer: torch.Tensor, source: int, group: object) -> None:
        assert (source, group) == (0, "group")
        buffer.copy_(torch.frombuffer(bytearray(self.text), dtype=torch.uint8))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def test_values_and_maxima_are_those_of_all_ranks(job: Job) -> None:
    host_group = HostGroup()
    job.rows = [[[1.0, 2.0], [7.0, 8.0]]]
    job.maxima = [11, 3]

    assert host_group.all_gather([3, 5.5]).tolist() == [[1.0, 2.0], [3.0, 5.5], [7.0, 8.0]]
    assert [host_group.all_max(5), host_group.all_max(5)] == [11, 5]


def test_texts_are_padded_to_the_longest(job: Job) -> None:
    host_group = HostGroup()
    job.rows = [[[4.0], [0.0]], [[*b"long"], [0, 0, 0, 0]]]

    texts = host_group.all_gather_text("é")

    assert texts == ["long", "é", ""]
    assert job.sent == [[2.0], [*"é".encode(), 0, 0]]


def test_texts_of_a_given_length_take_one_collective(job: Job) -> None:
    job.rows = [[[*b"ab\0"], [*b"abc"]]]

    assert HostGroup().all_gather_text("x", 3) == ["ab", "x", "abc"]
    assert job.sent == [[*b"x\0\0"]]


def test_the_text_of_rank_zero_is_used_on_all_ranks(job: Job) -> None:
    job.text = "modèle".encode()
    job.maxima = [len(job.text)]

    assert HostGroup().broadcast_text("another") == "modèle"


def test_a_closed_group_says_what_to_do(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed: list[object] = []
    monkeypatch.setattr(dist, "destroy_process_group", destroyed.append)
    host_group = HostGroup()

    host_group.close()
    host_group.close()
    with pytest.raises(ZerowatchError, match="this TrainingRun was closed; make another to go on"):
        host_group.all_max(1)
    monkeypatch.undo()

    assert destroyed == ["group"]


def test_without_the_job_s_group_there_is_nothing_to_destroy(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    destroyed: list[object] = []
    host_group = HostGroup()
    with monkeypatch.context() as patched:
        patched.setattr(dist, "is_initialized", lambda: False)
        patched.setattr(dist, "destroy_process_group", destroyed.append)
        host_group.close()
    monkeypatch.undo()

    assert destroyed == []


def test_our_group_is_marked_as_ours(job: Job) -> None:
    assert new_host_group() == "group"


def test_values_are_on_the_host_if_the_script_has_another_default_device(job: Job) -> None:
    host_group = HostGroup()
    job.rows = [[[1.0], [7.0]], [[*b"ab"], [*b"ef"]]]
    job.maxima, job.text = [11, 2], b"cd"

    with torch.device("meta"):
        values, texts = host_group.all_gather([3]), host_group.all_gather_text("cd", 2)
        largest, text = host_group.all_max(5), host_group.broadcast_text("")

    assert values.tolist() == [[1.0], [3.0], [7.0]]
    assert (texts, largest, text) == (["ab", "cd", "ef"], 11, "cd")

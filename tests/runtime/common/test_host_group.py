"""Tests of the group of all ranks on the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch.distributed as dist

from zerowatch.runtime.common.host_group import HostGroup


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

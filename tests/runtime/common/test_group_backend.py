"""Tests that the backend of a group is found, also in a job whose script named none."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # the backend "fake"
from fakes.cuda_streams import FakeCuda
from fakes.sleeping_collectives import ManualClock
from torch import nn

from zerowatch.runtime.collectives.groups import Groups
from zerowatch.runtime.common import accelerator
from zerowatch.runtime.common.group_backend import backend_name, host_backend
from zerowatch.runtime.estimator import engine_estimate
from zerowatch.runtime.monitor.run_info import engine_info
from zerowatch.runtime.tuner.job_facts import job_facts


@pytest.fixture
def unnamed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    """The world group of one rank on the CPU, of a script that named no backend."""
    monkeypatch.setattr(accelerator.current, "is_available", lambda: False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_backend_of_a_script_that_named_none_is_that_of_its_device(
    unnamed: dist.ProcessGroup,
) -> None:
    engine = SimpleNamespace(
        module=nn.Linear(2, 2),
        communication_data_type=torch.float32,
        seq_data_parallel_group=unnamed,
        zero_optimization_stage=lambda: 1,
    )

    assert engine_info(engine, 1)[3] == "gloo"
    assert job_facts(engine).backend == "gloo"
    assert engine_estimate._topology(engine).backend == "gloo"
    assert [backend_name(), backend_name(unnamed)] == ["gloo", "gloo"]


@pytest.mark.parametrize(
    ("backends", "of_world"), [("cuda:fake,cpu:gloo", "fake"), ("cpu:gloo", "gloo")]
)
def test_the_backend_for_the_device_comes_before_that_for_host_memory(
    monkeypatch: pytest.MonkeyPatch, backends: str, of_world: str
) -> None:
    cuda: Any = FakeCuda(ManualClock())
    cuda.patch(monkeypatch)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        known = Groups().find(world)
        assert known is not None

        assert [backend_name(), known.backend] == [of_world, of_world]
        assert host_backend(world).name() == "gloo"
    finally:
        dist.destroy_process_group()

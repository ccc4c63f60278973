"""Tests of the records of calls, process groups and rank sets."""

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
from torch.distributed import distributed_c10d

from zerowatch.metrics.catalog.labels import OPS, PHASES
from zerowatch.runtime.collectives.groups import (
    BEFORE_ALL,
    NEVER,
    RECENT_CALLS,
    CollectiveCall,
    Groups,
    RankSet,
    lowest_coverage,
)


def group_until(busy: int = BEFORE_ALL, maybe_busy: int = BEFORE_ALL) -> Any:
    return SimpleNamespace(busy_until_ns=busy, maybe_busy_until_ns=maybe_busy)


def call(
    group: Any, *, start: int = 10, issued: int = 10, wait: int = 0, end: int = 50, **fields: bool
) -> CollectiveCall:
    made = CollectiveCall(OPS.index("all_reduce"), group, 8, None, PHASES.index("backward"))
    made.start_ns, made.issued_ns, made.wait_ns, made.end_ns = start, issued, wait, end
    for name, value in fields.items():
        setattr(made, name, value)
    made.settle(3)
    return made


@pytest.mark.parametrize(
    ("issued", "wait", "exposed", "of_the_wait"),
    [
        (10, 0, 0, 0),  # nobody waits
        (50, 0, 40, 0),  # it blocks until its end
        (60, 0, 40, 0),  # and returns later
        (13, 0, 3, 0),  # it blocks while it is issued
        (13, 30, 3 + 20, 20),
        (13, 60, 3, 0),  # it has ended before
        (40, 30, 30 + 10, 10),  # each instant counts once
    ],
)
def test_a_call_blocks_training_while_it_is_issued_and_waited_for(
    issued: int, wait: int, exposed: int, of_the_wait: int
) -> None:
    made = call(group_until(), issued=issued, wait=wait)

    assert (made.exposed_ns, made.wait_exposed_ns) == (exposed, of_the_wait)
    assert (made.batch, made.settled) == (3, True)


@pytest.mark.parametrize(
    ("busy", "duration"), [(BEFORE_ALL, 40), (10, 40), (17, 33), (50, 0), (60, 0)]
)
def test_a_call_begins_when_the_one_before_it_has_ended(busy: int, duration: int) -> None:
    group = group_until(busy)

    assert call(group).duration_ns == duration
    assert group.busy_until_ns == max(busy, 50)


@pytest.mark.parametrize(
    ("maybe_busy", "is_bound"), [(BEFORE_ALL, False), (10, False), (11, True), (NEVER, True)]
)
def test_a_call_is_only_bounded_if_one_before_it_may_still_run(
    maybe_busy: int, is_bound: bool
) -> None:
    group = group_until(maybe_busy=maybe_busy)

    assert call(group).is_bound is is_bound
    assert group.maybe_busy_until_ns == BEFORE_ALL


def test_a_bounded_call_may_keep_its_group_busy_until_its_end() -> None:
    group = group_until(busy=7)

    call(group, is_bound=True)

    assert (group.busy_until_ns, group.maybe_busy_until_ns) == (7, 50)


@pytest.mark.parametrize(("is_bound", "maybe_busy"), [(True, NEVER), (False, BEFORE_ALL)])
def test_a_call_that_nobody_waits_for_may_run_forever(is_bound: bool, maybe_busy: int) -> None:
    group = group_until()

    made = call(group, timed=False, is_bound=is_bound)

    assert (made.duration_ns, made.exposed_ns, group.maybe_busy_until_ns) == (0, 0, maybe_busy)


@pytest.mark.parametrize(
    ("counts", "coverage"),
    [
        ([], None),
        ([(8, 6)], 0.75),
        ([(8, 8), (4, 1), (10, 9)], 0.25),
        ([(8, 11)], 1.0),  # more were recorded than counted
    ],
)
def test_the_lowest_coverage_of_any_group_counts(
    counts: list[tuple[int, int]], coverage: float | None
) -> None:
    group: Any = None

    assert lowest_coverage((group, *pair) for pair in counts) == coverage


def test_a_rank_set_is_known_by_its_members() -> None:
    one, same, other = RankSet((0, 2)), RankSet((0, 2)), RankSet((2, 0))

    assert one.key == same.key == "2-86770405"
    assert one.key != other.key
    assert (one.size, one.recent.maxlen) == (2, RECENT_CALLS)


@pytest.mark.parametrize(
    ("roles", "role"), [([], "other"), (["world", "dp", "other"], "dp"), (["sp", "tp"], "tp")]
)
def test_a_rank_set_has_the_most_specific_role_of_its_groups(roles: list[str], role: str) -> None:
    rank_set = RankSet((0, 1))
    rank_set.roles = roles

    assert rank_set.role == role


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_is_found_by_identity_and_other_arguments_are_none(world: Any) -> None:
    groups = Groups()

    found = groups.find(world)

    assert found is not None
    assert (found.role, found.backend, found.size) == ("world", "gloo", 1)
    assert (found.on_device, found.device_index) == (False, None)
    assert groups.find(world) is found
    assert groups.known() == [found]
    assert groups.find("default_pg") is None


def test_a_group_that_was_destroyed_before_its_first_call_has_no_record(world: Any) -> None:
    groups = Groups()
    destroyed = dist.new_group([0])
    dist.destroy_process_group(destroyed)

    assert groups.find(destroyed) is None
    assert groups.find(destroyed, point_to_point=True) is None
    assert groups.known() == []


def test_messages_have_a_record_of_their_own(world: Any) -> None:
    groups = Groups()

    messages = groups.find(world, point_to_point=True)
    collectives = groups.find(world)

    assert messages is not collectives
    assert groups.find(world, point_to_point=True) is messages
    assert groups.known() == [collectives]


@pytest.fixture
def two_backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A world group with a backend for a fake device, and gloo for tensors in host memory.

    The backend for the device does not count its calls.
    """
    cuda = FakeCuda(ManualClock())
    cuda.collective_backend = "fake"
    cuda.patch(monkeypatch)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("cuda:fake,cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_calls_on_tensors_in_host_memory_have_a_record_of_their_own(two_backends: Any) -> None:
    groups = Groups()
    known = groups.find(two_backends)
    assert known is not None

    on_host = groups.host_record(known)

    assert (known.backend, known.on_device) == ("fake", True)
    assert (on_host.backend, on_host.on_device) == ("gloo", False)
    assert (on_host.role, on_host.rank_set) == ("world", known.rank_set)
    assert groups.host_record(known) is on_host
    assert groups.known() == [known]
    assert groups.rank_sets() == [known.rank_set]


def test_a_group_that_does_not_count_its_calls_has_no_coverage_and_the_others_have(
    two_backends: Any,
) -> None:
    groups = Groups()
    known, other = groups.find(two_backends), groups.find(dist.new_group([0], backend="gloo"))
    assert known is not None
    assert other is not None
    known.recorded += 1
    other.reference().allreduce([torch.ones(1)]).wait()

    counts = groups.drain_counts()

    assert (known.counts_calls, other.counts_calls) == (False, True)
    assert counts == [(other, 1, 0)]
    assert (known.seen_from, known.num_issued()) == (0, None)
    assert groups.known() == [known, other]


def test_a_backend_for_host_memory_that_does_not_count_has_a_record_of_its_own(
    two_backends: Any,
) -> None:
    groups = Groups()
    known = groups.find(dist.new_group([0], backend="cuda:gloo,cpu:fake"))
    assert known is not None

    on_host = groups.host_record(known)

    assert on_host is known.host_record
    assert (on_host.counts_calls, on_host.num_issued()) == (False, None)


def test_messages_from_host_memory_have_a_record_of_their_own(two_backends: Any) -> None:
    groups = Groups()
    known, messages = groups.find(two_backends), groups.find(two_backends, point_to_point=True)
    assert known is not None
    assert messages is not None
    records = [groups.host_record(known), groups.host_record(messages)]

    groups.set_roles(lambda group: "dp", lambda group: "pp")

    assert [each.role for each in records] == ["dp", "pp"]
    assert known.records() == [known, records[0], messages, records[1]]


def test_calls_on_tensors_in_host_memory_are_counted_by_their_backend(two_backends: Any) -> None:
    groups = Groups()
    known = groups.find(two_backends)
    assert known is not None
    known.counts_calls = True  # as NCCL does
    on_host = groups.host_record(known)
    known.replayed = 4
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    on_host.recorded = 2
    issued = on_host.num_issued()

    counts = groups.drain_counts()

    assert issued == 3
    assert counts == [(known, 4, 2)]
    assert (on_host.recorded, on_host.num_issued()) == (0, 0)


def test_a_group_without_a_backend_for_host_memory_has_no_further_record(
    two_backends: Any,
) -> None:
    groups = Groups()
    known = groups.find(dist.new_group([0], backend="cuda:fake"))
    assert known is not None

    assert groups.host_record(known) is known


def test_roles_of_known_groups_are_found_again(world: Any) -> None:
    groups = Groups()
    messages, collectives = groups.find(world, point_to_point=True), groups.find(world)
    assert messages is not None
    assert collectives is not None
    before = (collectives.role, messages.role, collectives.rank_set.role)

    groups.set_roles(lambda group: "dp", lambda group: "pp")

    assert before == ("world", "world", "world")
    assert (collectives.role, messages.role, collectives.rank_set.role) == ("dp", "pp", "dp")


def test_calls_that_the_group_counts_and_nobody_records_lower_the_coverage(world: Any) -> None:
    groups = Groups()
    known = groups.find(world)
    assert known is not None
    for _ in range(4):
        dist.barrier()
    known.recorded = 3

    counts = groups.drain_counts()

    assert counts == [(known, 4, 3)]
    assert (known.recorded, known.num_issued()) == (0, 0)
    assert groups.drain_counts() == []


def test_a_group_that_is_gone_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    known = groups.find(dist.group.WORLD)
    assert known is not None
    dist.destroy_process_group()

    counts = groups.drain_counts()

    assert (counts, groups.known(), known.num_issued()) == ([], [], None)
    assert len(groups.rank_sets()) == 1


def test_with_another_default_group_calls_are_numbered_from_one_and_old_groups_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = Groups()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def start(world_size: int) -> list[Any]:
        start_world(world_size)
        issue_on_world(groups)
        return [groups.find(group) for group in (dist.group.WORLD, dist.new_group([0, 1]))]

    start(3)
    kept = dist.group.WORLD  # a script may refer to it for longer
    groups.forget_destroyed()
    groups.forget_destroyed()  # another watch on the same groups
    before = [(each.members, each.issued, len(each.recent)) for each in groups.rank_sets()]
    dist.destroy_process_group()
    groups.forget_destroyed()
    found = start(2)
    groups.forget_destroyed()
    [rank_set] = groups.rank_sets()
    dist.destroy_process_group()

    assert kept is not None
    assert before == [((0, 1, 2), 1, 1), ((0, 1), 0, 0)]
    assert (rank_set.members, rank_set.issued, len(rank_set.recent)) == ((0, 1), 1, 1)
    assert rank_set.roles == ["world", "other"]
    assert groups.known() == found


def start_world(world_size: int) -> None:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)


def issue_on_world(*ranks: Groups) -> None:
    """Issue a call of the world group on each of these ranks."""
    for groups in ranks:
        known = groups.find(dist.group.WORLD)
        assert known is not None
        made = call(known)
        known.rank_set.issued += 1
        made.sequence = known.rank_set.issued
        known.rank_set.recent.append(made)


def test_call_numbers_do_not_depend_on_when_a_watch_is_opened_on_each_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    early, late, new = Groups(), Groups(), Groups()  # the last one is a new process
    start_world(2)
    issue_on_world(early, late)
    early.forget_destroyed()
    issue_on_world(early, late)
    late.forget_destroyed()
    dist.destroy_process_group()

    start_world(2)
    early.forget_destroyed()
    issue_on_world(early, late, new)
    issue_on_world(early, late, new)
    late.forget_destroyed()
    new.forget_destroyed()
    issue_on_world(early, late, new)
    dist.destroy_process_group()

    for groups in (early, late, new):
        [rank_set] = groups.rank_sets()
        assert rank_set.issued == 3
        assert [each.sequence for each in rank_set.recent] == [1, 2, 3]


def test_calls_before_the_first_watch_on_a_group_that_was_destroyed_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    groups = Groups()
    start_world(3)
    issue_on_world(groups)
    dist.destroy_process_group()
    start_world(2)
    issue_on_world(groups)
    groups.forget_destroyed()
    dist.destroy_process_group()

    assert [(each.members, each.issued) for each in groups.rank_sets()] == [((0, 1), 1)]


def test_an_exchange_of_the_default_group_forgets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    groups = Groups()
    start_world(2)
    world, other = dist.group.WORLD, dist.new_group([0, 1])
    issue_on_world(groups)
    groups.forget_destroyed()
    distributed_c10d._update_default_pg(other)
    groups.forget_destroyed()
    distributed_c10d._update_default_pg(world)
    dist.destroy_process_group()

    assert [(each.members, each.issued) for each in groups.rank_sets()] == [((0, 1), 1)]
    assert len(groups.known()) == 1

"""Tests of the guard: no rank enters a collective that a failed rank will not enter."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from fakes.rank_threads import FakeHostGroup, on_ranks

from zerowatch.runtime.collectives.instrument import CollectiveInstrumentation
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.trainer.oom_recovery.collective_guard import (
    CollectiveGuard,
    PeerOutOfMemoryError,
    Vote,
    probe_workspace,
)
from zerowatch.runtime.trainer.oom_recovery.replay import (
    OomCapture,
    OomOrigin,
)

META = torch.zeros(3, device="meta")  # a device, but not the host
OUT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes."


class Backend:
    """Fake backend that records issued collectives; a coalesced gather issues single gathers."""

    def __init__(self) -> None:
        self.issued: list[str] = []

    def all_reduce(self, tensor=None) -> str:
        self.issued.append("all_reduce")
        return "reduced"

    def issue(self, name: str) -> None:
        self.issued.append(name)

    def all_gather_into_tensor(self, output_tensor=None, input_tensor=None) -> None:
        self.issue("all_gather_into_tensor")

    def all_gather_coalesced(self, output_tensors=(), input_tensors=()) -> None:
        for _ in range(2):
            self.all_gather_into_tensor()


class Votes:
    """Fake host group whose other ranks vote `others`, and that counts the votes held."""

    world_size = 2

    def __init__(self, others: int = 0) -> None:
        self.others, self.held = others, 0

    def all_max(self, value: int) -> int:
        self.held += 1
        return max(value, self.others)


@pytest.fixture
def votes() -> Votes:
    return Votes()


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def guard(votes: Votes, backend: Backend) -> Iterator[CollectiveGuard]:
    guard = CollectiveGuard(votes)
    guard.open(backend)
    guard.armed = True
    yield guard
    guard.close()


def test_an_armed_window_holds_a_vote_before_each_collective_and_at_its_end(
    guard: CollectiveGuard, votes: Votes, backend: Backend
) -> None:
    with guard.window():
        assert backend.all_reduce() == "reduced"
        backend.all_gather_into_tensor()

    assert votes.held == 3


def test_a_nested_collective_has_no_vote_of_its_own(
    guard: CollectiveGuard, votes: Votes, backend: Backend
) -> None:
    with guard.window():
        backend.all_gather_coalesced()

    assert len(backend.issued) == 2
    assert votes.held == 2


@pytest.fixture
def process_group() -> Iterator[None]:
    """Create the default process group, with this process as its only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_the_collectives_of_a_window_are_counted_by_group(guard: CollectiveGuard) -> None:
    dist.barrier()  # before the window
    other = dist.new_group([0])
    with guard.window():
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1), group=other)

    assert guard.issued_collectives() == {dist.group.WORLD.group_name: 2, other.group_name: 1}


def test_a_rank_that_failed_inside_a_collective_cannot_report_because_others_may_be_in_it(
    guard: CollectiveGuard, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(name: str) -> None:
        raise RuntimeError(OUT)

    monkeypatch.setattr(backend, "issue", run_out)
    with pytest.raises(RuntimeError), guard.window():
        backend.all_gather_into_tensor()
    inside = guard.can_report
    with pytest.raises(KeyError), guard.window():
        raise KeyError("labels")

    assert not inside
    assert guard.can_report


class Engine:
    """Fake engine, each of whose passes issues collectives."""

    optimizer = None

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def forward(self) -> None:
        self.backend.all_gather_into_tensor()
        self.backend.all_gather_into_tensor()

    def backward(self) -> None:
        self.backend.all_reduce()
        self.backend.all_reduce()


def test_an_unarmed_window_holds_a_vote_before_each_pass_with_collectives_and_at_its_end(
    guard: CollectiveGuard, votes: Votes, backend: Backend
) -> None:
    guard.armed = False
    engine = Engine(backend)

    with guard.window(engine):
        for _ in range(2):
            engine.forward()
            engine.backward()
            assert guard.can_report
    with guard.window(engine):
        pass

    assert votes.held == 5 + 1
    assert len(backend.issued) == 8
    assert set(vars(engine)) == {"backend"}


def test_an_unarmed_rank_cannot_report_within_a_pass_with_collectives(
    guard: CollectiveGuard, backend: Backend
) -> None:
    guard.armed = False

    with guard.window(Engine(backend)):
        assert guard.can_report
        backend.all_reduce()
        assert not guard.can_report


def test_no_vote_is_held_outside_windows_or_on_other_threads(
    guard: CollectiveGuard, votes: Votes, backend: Backend
) -> None:
    backend.all_reduce()
    with guard.window():
        foreign = threading.Thread(target=backend.all_reduce)
        foreign.start()
        foreign.join()

    assert len(backend.issued) == 2
    assert votes.held == 1


def test_no_vote_is_held_while_torch_compiles(
    votes: Votes, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    guard = CollectiveGuard(votes)
    guard.open(backend)
    guard.armed = True

    with guard.window():
        backend.all_reduce()

    assert votes.held == 1
    guard.close()


def test_a_single_rank_holds_no_votes() -> None:
    votes, backend = Votes(), Backend()
    votes.world_size = 1
    guard = CollectiveGuard(votes)
    guard.open(backend)
    guard.armed = True

    with guard.window():
        backend.all_reduce()

    assert "all_reduce" not in vars(backend)
    assert votes.held == 0


def test_a_rank_raises_instead_of_issuing_a_collective_if_its_peer_ran_out(
    guard: CollectiveGuard, votes: Votes, backend: Backend
) -> None:
    votes.others = 1

    with pytest.raises(PeerOutOfMemoryError), guard.window():
        backend.all_reduce()

    assert backend.issued == []
    assert votes.held == 1


def test_a_window_is_aborted_even_if_the_script_caught_the_error(
    guard: CollectiveGuard, votes: Votes, backend: Backend
) -> None:
    votes.others = 1

    with pytest.raises(PeerOutOfMemoryError), guard.window():
        with pytest.raises(PeerOutOfMemoryError):
            backend.all_reduce()
        with pytest.raises(PeerOutOfMemoryError):
            backend.all_reduce()

    assert backend.issued == []
    assert votes.held == 1


def test_autograd_propagates_the_error_unchanged(
    guard: CollectiveGuard, votes: Votes, backend: Backend
) -> None:
    votes.others = 1
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda _: backend.all_reduce() and None)

    with pytest.raises(PeerOutOfMemoryError) as raised, guard.window():
        weight.sum().backward()

    assert type(raised.value) is PeerOutOfMemoryError


def test_no_collective_is_issued_while_an_out_of_memory_error_propagates(
    guard: CollectiveGuard, votes: Votes, backend: Backend
) -> None:
    capture = OomCapture()

    with capture, guard.window(), ExitStack() as cleanup:
        cleanup.callback(backend.all_reduce)  # as a context manager of DeepSpeed's might
        raise RuntimeError(OUT)

    assert backend.issued == []
    assert votes.held == 0
    assert capture.origin is OomOrigin.OWN
    assert str(capture.error) == OUT


def test_collectives_are_issued_while_another_error_propagates(
    guard: CollectiveGuard, votes: Votes, backend: Backend
) -> None:
    with pytest.raises(ValueError, match="bad"), guard.window(), ExitStack() as cleanup:
        cleanup.callback(backend.all_reduce)
        raise ValueError("bad")

    assert backend.issued == ["all_reduce"]


@pytest.mark.parametrize("fatal", range(4))
def test_if_one_rank_runs_out_between_any_two_collectives_all_abort_before_the_next(
    fatal: int,
) -> None:
    def train(host_group: FakeHostGroup) -> tuple[OomOrigin | None, int]:
        backend, guard = Backend(), CollectiveGuard(host_group)
        guard.open(backend)
        guard.armed = True
        with OomCapture() as capture, guard.window():
            for number in range(3):
                if host_group.rank == 1 and number == fatal:
                    raise RuntimeError(OUT)
                backend.all_reduce()
            if host_group.rank == 1 and fatal == 3:
                raise RuntimeError(OUT)
        if capture.origin is OomOrigin.OWN:
            guard.report(Vote.OUT_OF_MEMORY)
        return capture.origin, len(backend.issued)

    ended = on_ranks(2, train)

    assert ended == [(OomOrigin.PEER, fatal), (OomOrigin.OWN, fatal)]


def test_ranks_that_all_run_out_hold_one_vote() -> None:
    def train(host_group: FakeHostGroup) -> int:
        votes: list[int] = []
        all_max = host_group.all_max
        host_group.all_max = lambda vote: votes.append(vote) or all_max(vote)
        guard = CollectiveGuard(host_group)
        with OomCapture() as capture, guard.window():
            raise RuntimeError(OUT)
        assert capture.origin is OomOrigin.OWN
        guard.report(Vote.OUT_OF_MEMORY)
        return len(votes)

    assert on_ranks(3, train) == [1, 1, 1]


def instrumented(backend: Backend) -> CollectiveInstrumentation:
    instrumentation = CollectiveInstrumentation(FailOpen())
    instrumentation.open()
    instrumentation.open_backend(backend)
    return instrumentation


@pytest.mark.parametrize("guard_first", [True, False])
def test_guard_and_instrumentation_close_in_any_order(guard_first: bool, votes: Votes) -> None:
    backend, guard = Backend(), CollectiveGuard(votes)
    instrumentation = instrumented(backend)
    guard.open(backend)
    guard.armed = True
    with guard.window():
        backend.all_gather_into_tensor(torch.zeros(2), torch.zeros(1))
    assert votes.held == 2

    for each in (guard, instrumentation) if guard_first else (instrumentation, guard):
        each.close()

    with guard.window():
        backend.all_gather_into_tensor(torch.zeros(2), torch.zeros(1))
    assert backend.issued == ["all_gather_into_tensor"] * 2
    assert votes.held == 3  # the end of the window
    if guard_first:
        assert set(vars(backend)) == {"issued"}


def test_probing_the_workspace_raises_where_memory_does_not_suffice() -> None:
    huge = torch.empty(1).expand(
        2**45
    )  # one element, with a nominal size beyond any machine's memory

    with pytest.raises(RuntimeError, match="allocate memory"):
        probe_workspace((huge,), {})

    probe_workspace((torch.zeros(3), [torch.zeros(2)], None, 5), {"group": object()})


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (([META, META], META), [24]),  # all_gather
        ((META, [META, META, META], 0), [36]),  # reduce_scatter
        ((META, META), []),  # into one tensor
        (([META, META],), []),  # all_reduce_coalesced
    ],
)
def test_the_flat_buffer_of_a_list_on_a_device_is_probed(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], sizes: list[int]
) -> None:
    allocated: list[int] = []
    monkeypatch.setattr(torch, "empty", lambda size, **options: allocated.append(size))

    probe_workspace(arguments, {})

    assert allocated == sizes


def test_a_rank_that_runs_out_while_it_aborts_a_window_holds_no_vote():
    votes = Votes(others=1)
    guard = CollectiveGuard(votes)
    with pytest.raises(PeerOutOfMemoryError), guard.window():
        pass

    guard.report(Vote.OUT_OF_MEMORY)

    assert votes.held == 1

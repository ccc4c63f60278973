"""Tests of recorded passes: a rank that failed issues exactly what the other ranks will issue."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes.rank_threads import FakeHostGroup, Meeting, on_ranks

from zerowatch.runtime.collectives.collective_table import Guard, guarded_methods
from zerowatch.runtime.common.deepspeed_internals import ZERO_1_AND_2
from zerowatch.runtime.trainer.oom_recovery.collective_guard import (
    CollectiveGuard,
    PeerOutOfMemoryError,
    Vote,
)
from zerowatch.runtime.trainer.oom_recovery.recorded_passes import (
    VOTES_NEEDED,
    Call,
    EngineGeneration,
    PassRecorder,
    issue,
)

OUT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes."
SMALL, LARGE = torch.ones(2), torch.ones(6)
ZERO_2, OTHER = EngineGeneration("settings"), EngineGeneration("others")
ZERO_3, OTHER_TRACE = EngineGeneration("settings", "trace"), EngineGeneration("settings", "other")


@pytest.fixture(autouse=True)
def process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Create the default process group, with this process as its only rank.

    torch reports its backend as that of a script that named none.
    """
    monkeypatch.setattr(dist, "get_backend", lambda *_: "undefined")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Backend:
    """Fake backend that keeps the name and a copy of the tensors of each call."""

    def __init__(self) -> None:
        self.issued: list[tuple[str, list[list[float]]]] = []

    def _keep(self, name: str, *tensors: torch.Tensor) -> None:
        self.issued.append((name, [tensor.tolist() for tensor in tensors]))

    def all_reduce(self, tensor, op=None, group=None, async_op=False) -> None:
        self._keep("all_reduce", tensor)

    def reduce(self, tensor, dst, op=None, group=None, async_op=False) -> None:
        self._keep(f"reduce to {dst}", tensor)

    def reduce_scatter_tensor(self, output_tensor, input_tensor, group=None) -> None:
        self._keep("reduce_scatter_tensor", output_tensor, input_tensor)

    def all_gather_into_tensor(self, output_tensor, input_tensor, group=None) -> None:
        self._keep("all_gather_into_tensor", input_tensor)

    def broadcast(self, tensor, src) -> None:
        self._keep("broadcast", tensor)


def run_pass(recorder: PassRecorder, *calls: tuple[Any, ...], name: str = "backward") -> None:
    recorder.begin_pass(name)
    for method, *args in calls:
        recorder.record(method, tuple(args), {})
    recorder.end_pass()


def recorded(
    *calls: tuple[Any, ...], windows: int = 2, generation: EngineGeneration = ZERO_2
) -> PassRecorder:
    """Return a recorder of windows of one backward each; the next window has begun."""
    recorder = PassRecorder()
    for _ in range(windows):
        recorder.prepare(generation)
        recorder.begin_window()
        run_pass(recorder, *calls)
    recorder.prepare(generation)
    recorder.begin_window()
    return recorder


def rest_after(recorder: PassRecorder, *calls: tuple[Any, ...]) -> tuple[list[str], str]:
    """Return the calls that are left after these calls of an unfinished backward."""
    recorder.begin_pass("backward")
    for method, *args in calls:
        recorder.record(method, tuple(args), {})
    rest, reason = recorder.rest()
    return [call.name for call in rest], reason


CALLS = (("all_reduce", SMALL), ("reduce", LARGE, 0), ("all_reduce", LARGE))


def test_the_rest_of_a_pass_is_what_the_last_two_passes_issued() -> None:
    assert rest_after(recorded(*CALLS)) == (["all_reduce", "reduce", "all_reduce"], "")
    assert rest_after(recorded(*CALLS), CALLS[0]) == (["reduce", "all_reduce"], "")
    assert rest_after(recorded(*CALLS), *CALLS) == ([], "")


def test_one_pass_is_no_record() -> None:
    rest, reason = rest_after(recorded(*CALLS, windows=1))

    assert rest == []
    assert reason


@pytest.mark.parametrize(
    "other",
    [("all_reduce", LARGE), ("reduce", SMALL, 0), ("all_reduce", SMALL.double())],
    ids=["size", "operation", "dtype"],
)
def test_a_pass_that_issued_another_collective_than_before_has_no_rest(other: Any) -> None:
    recorder = recorded(*CALLS)

    assert rest_after(recorder, other)[1]
    recorder.end_pass()
    for _ in range(5):  # a model that varies once varies again
        recorder.prepare(ZERO_2)
        recorder.begin_window()
        run_pass(recorder, *CALLS)
    recorder.begin_window()
    assert rest_after(recorder, CALLS[0])[1]


def test_a_pass_that_differs_after_it_had_a_record_has_none_any_more() -> None:
    recorder = PassRecorder()
    for calls in (CALLS, CALLS, CALLS[:2], CALLS[:2], CALLS[:2]):  # two shapes of windows
        recorder.begin_window()  # without `prepare`, as in a window with votes
        run_pass(recorder, *calls)
    recorder.prepare(ZERO_2)
    recorder.begin_window()

    assert rest_after(recorder, CALLS[0])[1]


def test_a_shorter_pass_than_before_is_a_difference() -> None:
    recorder = recorded(*CALLS)
    run_pass(recorder, *CALLS[:2])

    assert recorder.prepare(ZERO_2) == 0


TENSORS = {"tensor": SMALL}


@pytest.mark.parametrize("name", guarded_methods(Guard.OOM))
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), (([SMALL, SMALL], SMALL), {}), ((), {"group": None}), ((3,), {})],
    ids=["none", "list", "group first", "number"],
)
def test_no_call_makes_the_recorder_raise(name: str, args: Any, kwargs: Any) -> None:
    recorder = PassRecorder()
    for _ in range(4):
        recorder.prepare(ZERO_2)
        recorder.begin_window()
        recorder.begin_pass("forward")
        recorder.record(name, args, kwargs)
        recorder.record("all_reduce", (), {"group": None, **TENSORS})
        recorder.end_pass()

    recorder.prepare(ZERO_2)
    recorder.begin_window()
    recorder.begin_pass("forward")
    assert recorder.rest()[1]  # the call cannot be issued with other values
    recorder.record(name, args, kwargs)
    rest, reason = recorder.rest()
    assert ([call.name for call in rest], reason) == (["all_reduce"], "")


def test_a_call_that_cannot_even_be_described_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> int:
        raise RuntimeError("this group was destroyed")

    monkeypatch.setattr(dist, "get_world_size", fail)
    recorder = recorded(*CALLS, windows=3)

    assert rest_after(recorder)[1]


def test_a_reduction_to_another_rank_is_a_difference() -> None:
    recorder = recorded(*CALLS)

    assert rest_after(recorder, CALLS[0], ("reduce", LARGE, 1))[1]


@pytest.mark.parametrize("is_keyword", [False, True])
def test_a_collective_of_another_group_is_a_difference(is_keyword: bool) -> None:
    def has_varied(group: Any) -> bool:
        recorder = recorded(*CALLS)
        recorder.begin_pass("backward")
        recorder.record("all_reduce", (SMALL,), {})
        given = {"group": group} if is_keyword else {}
        recorder.record("reduce", (LARGE, 0) if is_keyword else (LARGE, 0, None, group), given)
        return recorder.has_varied

    assert not has_varied(dist.group.WORLD)  # the record is of calls without a group
    assert has_varied(dist.new_group([0]))


@pytest.mark.parametrize("reason", ["varies", "differs between ranks", "paused", "not recorded"])
def test_a_pass_without_a_record_is_not_recorded_for_ever(reason: str) -> None:
    recorder, recorded_in = PassRecorder(), []
    for number in range(20):
        if reason == "paused":
            recorder.pause()
        else:
            recorder.prepare(ZERO_2)
        if reason == "differs between ranks":
            recorder.forbid()
        recorder.begin_window()
        recorder.begin_pass("forward")
        if recorder.is_adding:
            recorded_in.append(number)
        for _ in range(1 + number % 2 if reason == "varies" else 1):
            recorder.record("all_reduce", (), TENSORS)
        recorder.end_pass()
        recorder.end_window(2 if reason == "not recorded" else recorder.num_calls)

    assert len(recorded_in) <= 6
    assert bool(recorded_in) == (reason != "paused")


def test_a_pass_that_varies_does_not_renew_the_digest_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder, texts = PassRecorder(), []
    monkeypatch.setattr(Call, "text", lambda call: texts.append(call) or call.name)
    for number in range(20):
        assert (recorder.prepare(ZERO_2) > 0) == (number >= 4)
        recorder.begin_window()
        run_pass(recorder, *CALLS, name="forward")
        run_pass(recorder, *CALLS[: 1 + number % 2])

    assert len(texts) == len(CALLS)


def test_passes_at_different_positions_of_a_window_have_different_records() -> None:
    recorder = PassRecorder()
    for _ in range(3):
        recorder.prepare(ZERO_2)
        recorder.begin_window()
        run_pass(recorder, ("all_reduce", LARGE))
        run_pass(recorder, ("all_reduce", SMALL))
        run_pass(recorder, ("reduce", SMALL, 0), name="forward")
    recorder.prepare(ZERO_2)
    recorder.begin_window()

    assert rest_after(recorder) == (["all_reduce"], "")
    assert recorder.rest()[0][0].num_values == 6
    recorder.record("all_reduce", (LARGE,), {})
    recorder.end_pass()
    recorder.begin_pass("backward")
    assert recorder.rest()[0][0].num_values == 2


@pytest.mark.parametrize("generation", [OTHER, ZERO_3])
def test_another_generation_of_the_engine_has_no_records(generation: EngineGeneration) -> None:
    recorder = recorded(*CALLS)

    assert recorder.prepare(ZERO_2) > 0
    assert recorder.prepare(generation) == VOTES_NEEDED
    recorder.begin_window()
    assert rest_after(recorder, CALLS[0])[1]


def test_votes_are_requested_until_the_passes_have_records() -> None:
    recorder = PassRecorder()
    numbers = []
    for _ in range(3):
        numbers.append(recorder.prepare(ZERO_2))
        recorder.begin_window()
        run_pass(recorder, *CALLS)

    assert numbers[:2] == [VOTES_NEEDED] * 2
    assert numbers[2] > 0


def test_votes_are_requested_in_four_windows_at_most_if_the_passes_vary() -> None:
    recorder = PassRecorder()

    def prepared(count: int) -> list[int]:
        numbers = []
        for number in range(count):
            numbers.append(recorder.prepare((ZERO_3, OTHER_TRACE)[number % 2]))
            recorder.begin_window()
            run_pass(recorder, ("all_reduce", torch.ones(number)))
        return numbers

    assert prepared(6) == [VOTES_NEEDED] * 4 + [0] * 2
    recorder.clear()  # an aborted window
    assert prepared(6) == [VOTES_NEEDED] * 4 + [0] * 2


def test_at_zero_3_a_window_after_a_collective_outside_of_windows_uses_no_record() -> None:
    recorder = recorded(*CALLS, generation=ZERO_3)
    recorder.num_outside += 1  # an evaluation or a save may gather parameters

    assert recorder.prepare(ZERO_3) == VOTES_NEEDED
    recorder.begin_window()
    assert rest_after(recorder, ("reduce", SMALL, 0))[1]
    assert recorder.prepare(ZERO_3) == 0  # it is the same before each window
    recorder.num_outside = 0  # the update

    assert recorder.prepare(ZERO_3) > 0


def test_at_zero_2_a_collective_outside_of_windows_changes_nothing() -> None:
    recorder = recorded(*CALLS)
    recorder.num_outside += 1

    assert recorder.prepare(ZERO_2) > 0
    recorder.begin_window()
    assert rest_after(recorder, CALLS[0]) == (["reduce", "all_reduce"], "")


def test_equal_records_have_equal_digests_that_a_float_holds() -> None:
    one, other = recorded(*CALLS), recorded(*CALLS)
    shorter = recorded(*CALLS[:2])

    assert one.prepare(ZERO_2) == other.prepare(ZERO_2) == int(float(one.prepare(ZERO_2)))
    assert one.prepare(ZERO_2) != shorter.prepare(ZERO_2)


def test_records_that_differ_between_ranks_are_not_used() -> None:
    recorder = recorded(*CALLS)
    recorder.forbid()

    assert rest_after(recorder, CALLS[0])[1]


def test_nothing_is_issued_if_a_window_had_collectives_that_are_not_recorded() -> None:
    recorder = recorded(*CALLS)
    run_pass(recorder, *CALLS)
    recorder.end_window(len(CALLS))
    assert recorder.prepare(ZERO_2) != 0

    recorder.begin_window()
    run_pass(recorder, *CALLS)
    recorder.end_window(len(CALLS) + 1)

    assert recorder.prepare(ZERO_2) == 0


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (("broadcast", SMALL, 0), "broadcast"),
        (("all_gather_into_tensor", LARGE, SMALL), "partitions"),
    ],
)
def test_a_rest_with_a_call_of_unknown_values_is_refused(call: Any, named: str) -> None:
    assert named in rest_after(recorded(("all_reduce", SMALL), call))[1]


def parameter(number: int, *values: float) -> Any:
    partition = torch.tensor(values)
    partition.ds_numel = partition.numel()
    return SimpleNamespace(ds_id=number, ds_tensor=partition)


def gathered(parameters: list[Any], *sizes: int) -> tuple[list[Call], str]:
    """Return the rest of a pass whose gathers assemble these parameters."""
    recorder = PassRecorder()
    for _ in range(2):
        recorder.prepare(ZERO_2)
        recorder.begin_window()
        recorder.begin_pass("backward")
        with recorder.gathering(parameters):
            for size in sizes:
                tensors = (torch.empty(size), torch.empty(size))
                recorder.record("all_gather_into_tensor", tensors, {})
        recorder.end_pass()
    recorder.prepare(ZERO_2)
    recorder.begin_window()
    recorder.begin_pass("backward")
    return recorder.rest()


@pytest.mark.parametrize("sizes", [(1, 2), (3,)], ids=["one by one", "in one call"])
def test_gathers_send_this_ranks_partitions_and_reductions_send_zeros(sizes: Any) -> None:
    parameters = [parameter(9, 5.0, 6.0), parameter(4, 7.0)]
    rest, reason = gathered(parameters, *sizes)
    assert not reason
    reductions, _ = (
        recorded(("reduce_scatter_tensor", LARGE.clone(), LARGE.clone()), ("reduce", SMALL, 0)),
        None,
    )
    reductions.begin_pass("backward")
    backend = Backend()

    partitions = {each.ds_id: each.ds_tensor for each in parameters}
    assert issue([*rest, *reductions.rest()[0]], backend, partitions, lambda tensor: None)

    names, tensors = zip(*backend.issued, strict=True)
    assert names[-2:] == ("reduce_scatter_tensor", "reduce to 0")
    sent = [value for each in tensors[:-2] for value in each[0]]
    assert sent == [7.0, 5.0, 6.0]  # in order of ids
    assert tensors[-2:] == ([[0.0] * 6, [0.0] * 6], [[0.0] * 2])


def test_a_gather_of_other_sizes_than_its_parameters_is_refused() -> None:
    assert gathered([parameter(1, 5.0), parameter(2, 6.0)], 1, 2)[1]


def test_nothing_is_issued_without_memory_for_the_scratch_tensors() -> None:
    recorder, backend = recorded(*CALLS), Backend()
    recorder.begin_pass("backward")

    def run_out(tensor: torch.Tensor) -> None:
        assert tensor.nbytes == LARGE.nbytes
        raise RuntimeError(OUT)

    assert not issue(recorder.rest()[0], backend, {}, run_out)
    assert backend.issued == []


def test_nothing_is_issued_without_the_partition_of_a_parameter() -> None:
    (rest, _), backend = gathered([parameter(4, 7.0)], 1), Backend()

    assert not issue(rest, backend, {}, lambda tensor: None)
    assert backend.issued == []


class Zero2:
    """Fake optimizer, of the class by which ZeRO 1 and 2 are recognized."""

    partition_gradients = True


Zero2.__module__, Zero2.__qualname__ = ZERO_1_AND_2.split(":")


class Engine:
    """Fake engine whose passes issue collectives, and which fails before one of them."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.fails_before, self.optimizer = backend, -1, Zero2()
        self.calls, self.then = CALLS, lambda: None

    def backward(self) -> None:
        for number, (method, *args) in enumerate(self.calls):
            if number == self.fails_before:
                raise RuntimeError(OUT)
            getattr(self.backend, method)(*args)
        self.then()


@pytest.mark.parametrize("fails_before", [1, 2])
def test_all_ranks_leave_an_unarmed_window_after_the_pass_in_which_one_ran_out(
    fails_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CollectiveGuard, "issued_collectives", issued_by_backend)

    def train(host_group: FakeHostGroup) -> tuple[Vote, list[str]]:
        backend, guard = Backend(), CollectiveGuard(host_group)
        engine = Engine(backend)
        guard.open(backend)
        for _ in range(2):
            guard.prepare_records(engine)
            with guard.window(engine):
                engine.backward()
        backend.issued.clear()
        guard.prepare_records(engine)
        engine.fails_before = fails_before if host_group.rank == 1 else -1
        try:
            with guard.window(engine):
                engine.backward()
                engine.backward()
        except PeerOutOfMemoryError:
            pass
        except RuntimeError:
            assert not guard.can_report
            assert guard.unfinished_reason() == ""
            assert guard.issue_rest({})
            assert guard.can_report
            guard.report(Vote.OUT_OF_MEMORY)
        return guard.aborted_by, [name for name, _ in backend.issued]

    names = ["all_reduce", "reduce to 0", "all_reduce"]
    assert on_ranks(2, train) == [(Vote.OUT_OF_MEMORY, names)] * 2


@pytest.mark.parametrize("is_issued", [False, True])
def test_a_collective_that_failed_before_it_was_issued_belongs_to_the_rest(
    is_issued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(host_group: FakeHostGroup) -> tuple[str, list[str]]:
        backend, guard, num_lost = Backend(), CollectiveGuard(host_group), [0]
        engine = Engine(backend)
        monkeypatch.setattr(
            guard, "issued_in_training", lambda: {"all": len(backend.issued) + num_lost[0]}
        )

        def reduce(tensor: torch.Tensor, dst: int, group: Any = None) -> None:
            if is_failing[0]:
                is_failing[0] = False
                num_lost[0] += is_issued
                raise RuntimeError(OUT)
            backend._keep(f"reduce to {dst}", tensor)

        is_failing, backend.reduce = [False], reduce
        guard.open(backend)
        for _ in range(2):
            guard.prepare_records(engine)
            with guard.window(engine):
                engine.backward()
            backend.issued.clear()
        guard.prepare_records(engine)
        is_failing[0] = True
        with pytest.raises(RuntimeError, match="allocate"), guard.window(engine):
            engine.backward()
        host_group.all_max(0)
        if not (reason := guard.unfinished_reason()):
            assert guard.issue_rest({})
            assert guard.can_report
        return reason, [name for name, _ in backend.issued]

    expected = (
        ("the error was raised within a collective", ["all_reduce"])
        if is_issued
        else ("", ["all_reduce", "reduce to 0", "all_reduce"])
    )
    assert on_ranks(2, train) == [expected] * 2


@pytest.mark.parametrize(
    ("calls", "issued", "in_vain"),
    [
        (CALLS[:2], None, False),
        (CALLS[:2], {"all": 2}, False),
        (CALLS[:2], {"all": 1}, True),
        ((CALLS[1],), None, True),
        ((*CALLS, CALLS[0]), None, True),
    ],
    ids=["as recorded", "same point", "behind", "another", "longer"],
)
def test_a_failed_rank_waits_in_vain_for_a_rank_that_goes_on_otherwise(
    calls: Any, issued: Any, in_vain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CollectiveGuard, "issued_collectives", issued_by_backend)

    def train(host_group: FakeHostGroup) -> list[bool]:
        backend, guard = Backend(), CollectiveGuard(host_group)
        guard.open(backend)
        engine = Engine(backend)
        for _ in range(2):
            guard.prepare_records(engine)
            with guard.window(engine):
                engine.backward()
        guard.prepare_records(engine)
        found = [guard.waits_in_vain(issued)]
        engine.calls, engine.then = calls, lambda: found.append(guard.waits_in_vain(issued))
        with guard.window(engine):
            engine.backward()
        return [*found, guard.waits_in_vain(issued)]

    assert on_ranks(2, train) == [[False, in_vain, False]] * 2


def test_a_failed_rank_waits_in_vain_for_a_rank_with_collectives_that_are_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CollectiveGuard, "issued_collectives", issued_by_backend)
    guard, found = CollectiveGuard(FakeHostGroup(0, Meeting(1))), []
    with guard.window():
        found.append(guard.waits_in_vain(None))
        monkeypatch.setattr(guard, "issued_collectives", lambda: {"all": 1})
        found.append(guard.waits_in_vain(None))

    assert found == [False, True]


def test_a_pass_that_ends_early_leaves_a_failed_rank_waiting() -> None:
    recorder = recorded(*CALLS)
    run_pass(recorder, *CALLS[:2])

    assert recorder.has_varied


def issued_by_backend(guard: CollectiveGuard) -> dict[str, int]:
    return {"all": guard.recorder.num_calls}


def test_a_rank_with_collectives_that_were_not_recorded_cannot_issue_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CollectiveGuard, "issued_collectives", issued_by_backend)

    def train(host_group: FakeHostGroup) -> str:
        backend, guard = Backend(), CollectiveGuard(host_group)
        engine = Engine(backend)
        guard.open(backend)
        for _ in range(3):
            guard.prepare_records(engine)
            with guard.window(engine):
                engine.backward()
        engine.fails_before = 1
        monkeypatch.setattr(guard, "issued_collectives", lambda: {"all": 2})
        with pytest.raises(RuntimeError, match="allocate"), guard.window(engine):
            engine.backward()
        host_group.all_max(0)
        return guard.unfinished_reason()

    for reason in on_ranks(2, train):
        assert "1 of the 2 collectives" in reason

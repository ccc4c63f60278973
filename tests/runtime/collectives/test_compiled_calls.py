"""Tests of collectives in functions that torch.compile compiles, while they are wrapped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes.sleeping_collectives import add_up
from torch.distributed import _functional_collectives as funcol

from zerowatch.metrics.catalog.labels import OPS
from zerowatch.runtime.collectives.instrument import CollectiveInstrumentation
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.phase_timer import PhaseTimer

FORMS = "traceable_collective_remaps"


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> Iterator[CollectiveInstrumentation]:
    """Open instrumentation of a world of one rank."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = CollectiveInstrumentation(FailOpen())
    made.open()
    made.call_recorder.connect(PhaseTimer(), None)
    yield made
    made.close()
    torch.compiler.reset()
    dist.destroy_process_group()


def recorded(collectives: CollectiveInstrumentation) -> list[str]:
    return [OPS[call.op] for call in collectives.call_recorder.drain().calls]


def reduce_maximum(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x + 1


def reduce_to_parts(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    part = torch.empty_like(x)
    dist.reduce_scatter_tensor(part, x, op=dist.ReduceOp.SUM)
    return part + 1


def gather(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    whole = torch.empty_like(x)
    dist.all_gather_into_tensor(whole, x)
    return whole + 1


@pytest.mark.parametrize("function", [reduce_maximum, reduce_to_parts, gather])
@pytest.mark.parametrize("opens_functional", [False, True])
def test_a_collective_with_its_operation_compiles_without_a_graph_break(
    collectives: CollectiveInstrumentation,
    function: Callable[[torch.Tensor], torch.Tensor],
    opens_functional: bool,
) -> None:
    if opens_functional:
        collectives.open_functional()
    compiled = torch.compile(function, backend="eager", fullgraph=True)

    result = compiled(torch.ones(3))

    assert result.tolist() == [3.0, 3.0, 3.0]


def test_a_collective_with_its_operation_compiles_after_close(
    collectives: CollectiveInstrumentation,
) -> None:
    collectives.close()
    compiled = torch.compile(reduce_maximum, backend="eager", fullgraph=True)

    assert compiled(torch.ones(3)).tolist() == [3.0, 3.0, 3.0]


def test_torch_s_table_is_the_same_after_close(collectives: CollectiveInstrumentation) -> None:
    collectives.close()
    before = dict(getattr(funcol, FORMS))

    collectives.open()
    during = dict(getattr(funcol, FORMS))
    collectives.close()

    assert during.keys() > before.keys()
    assert getattr(funcol, FORMS) == before


def test_a_table_that_torch_made_of_the_wrappers_has_the_originals_after_close(
    collectives: CollectiveInstrumentation, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper: Any = dist.all_reduce
    form = getattr(funcol, FORMS)[wrapper]
    monkeypatch.setattr(funcol, FORMS, {wrapper: form})

    collectives.close()

    assert getattr(funcol, FORMS) == {wrapper.__wrapped__: form}
    assert dist.all_reduce is wrapper.__wrapped__


def test_torch_s_module_of_functional_collectives_is_not_imported(
    collectives: CollectiveInstrumentation, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = funcol.__name__
    monkeypatch.delitem(sys.modules, name)

    collectives.close()
    collectives.open()

    assert name not in sys.modules


def broadcast(x: torch.Tensor) -> torch.Tensor:
    dist.broadcast(x, 0)
    return x + 1


def wait_for_reduction(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x, async_op=True).wait()
    return x + 1


@pytest.mark.parametrize(
    ("function", "op"), [(broadcast, "broadcast"), (wait_for_reduction, "all_reduce")]
)
@pytest.mark.parametrize("knows_the_group", [False, True])
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_a_collective_that_breaks_the_graph_is_recorded(
    collectives: CollectiveInstrumentation,
    function: Callable[[torch.Tensor], torch.Tensor],
    op: str,
    knows_the_group: bool,
) -> None:
    if knows_the_group:
        dist.all_reduce(torch.ones(1))
        recorded(collectives)
    failures = collectives._fail_open.failures
    compiled = torch.compile(function, backend="eager")

    for _ in range(2):
        compiled(torch.ones(3))
    in_compiled = recorded(collectives)
    dist.all_reduce(torch.ones(1))

    assert in_compiled == [op, op]
    assert recorded(collectives) == ["all_reduce"]
    assert not failures


def test_a_call_that_could_not_be_recorded_does_not_end_the_recording(
    collectives: CollectiveInstrumentation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("unknown group")

    with monkeypatch.context() as patch:
        patch.setattr(collectives.call_recorder.groups, "find", refuse)
        dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))

    assert recorded(collectives) == ["all_reduce"]


def test_a_functional_collective_that_raises_leaves_no_open_call(
    collectives: CollectiveInstrumentation,
) -> None:
    collectives.open_functional()
    funcol.wait_tensor(funcol.all_reduce(torch.ones(8), "sum", dist.group.WORLD))
    known = collectives.call_recorder.groups.find(dist.group.WORLD)
    assert known is not None
    issued, counted = known.rank_set.issued, known.recorded

    with pytest.raises(RuntimeError, match="nonsense"):
        funcol.all_reduce(torch.ones(8), "nonsense", dist.group.WORLD)

    assert (known.rank_set.issued, known.recorded) == (issued, counted)
    batch = collectives.call_recorder.drain()
    add_up([batch], collectives)
    assert len(batch.calls) == 2
    assert all(call.settled for call in known.rank_set.recent)

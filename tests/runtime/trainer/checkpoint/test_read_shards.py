"""Tests of `read_shards.py` and `shard_layout.py`: shards that another number of ranks reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerowatch.errors import CheckpointError
from zerowatch.runtime.engine.rebuild.state_snapshot import HostSlice, TrainingStateSnapshot
from zerowatch.runtime.trainer.checkpoint.read_shards import (
    Shard,
    shard_range,
    snapshot_of_shards,
)
from zerowatch.runtime.trainer.checkpoint.shard_layout import read_shard_layout, shard_tensors

SHAPES = {"body.weight": (3, 5), "body.bias": (3,), "head.weight": (1, 3)}
NUMEL = 21


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(5, 3)
        self.head = torch.nn.Linear(3, 1, bias=False)


def flat(offset: float = 0.0) -> torch.Tensor:
    return torch.arange(NUMEL, dtype=torch.float32) + offset


def saved_shards(num: int) -> list[Shard]:
    """Return the shards that `num` ranks save of one flattened parameter group, with padding."""
    size = -(-NUMEL // num)
    return [_saved_shard(number, size) for number in range(num)]


def _saved_shard(number: int, size: int) -> Shard:
    begin, end = number * size, min((number + 1) * size, NUMEL)
    pieces, offset = [], 0
    for name, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        first, last = max(offset, begin), min(offset + numel, end)
        if first < last:
            pieces.append((name, first - offset, last - first, first - begin))
        offset += numel
    layout = read_shard_layout(
        [
            {
                "group": 0,
                "numel": size,
                "members": tuple(SHAPES),
                "pieces": tuple(pieces),
                "states": ("exp_avg",),
                "scalars": ("step",),
            }
        ]
    )
    moments = torch.nn.functional.pad(flat(100.0)[begin:end], (0, size - max(0, end - begin)))
    optimizer = {
        "single_partition_of_fp32_groups": [flat()[begin:end]],
        "base_optimizer_state": {
            "state": {0: {"exp_avg": moments, "step": 7}},
            "param_groups": [{"lr": 0.5, "params": [0]}],
        },
    }
    model = {"global_steps": 7, "global_samples": 56, "skipped_steps": 1, "lr_scheduler": None}
    return Shard(
        tensors=shard_tensors(layout, optimizer), frozen={}, optimizer=optimizer, model=model
    )


def engine() -> Any:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    return SimpleNamespace(module=Net(), optimizer=optimizer)


def assembled(snapshots: list[TrainingStateSnapshot], key: str | None) -> dict[str, torch.Tensor]:
    """Return whole parameters, or a state, from the parts of all ranks; each element once."""
    found = {}
    for name, shape in SHAPES.items():
        whole = torch.full((torch.Size(shape).numel(),), torch.nan)
        for snapshot in snapshots:
            kept = snapshot.parameters[name]
            part = kept.master if key is None else kept.parts.get(key)
            if part is not None:
                own = slice(part.start, part.start + part.values.numel())
                assert whole[own].isnan().all(), "an element is on two ranks"
                whole[own] = part.values
        found[name] = whole
    return found


@pytest.mark.parametrize("before", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("after", [1, 2, 3, 4, 9])
def test_each_element_is_read_by_exactly_one_rank(before: int, after: int) -> None:
    shards = saved_shards(before)
    snapshots = []
    for rank in range(after):
        numbers = shard_range(before, rank, after)
        own = [shards[number] for number in numbers or range(1)]
        snapshots.append(
            snapshot_of_shards(engine(), own, micro_steps=9, with_values=bool(numbers))
        )

    for key, offset in ((None, 0.0), ("exp_avg", 100.0)):
        whole = torch.cat(list(assembled(snapshots, key).values()))
        assert whole.tolist() == flat(offset).tolist()
    for snapshot in snapshots:  # also on ranks without a shard
        assert snapshot.options == ({"lr": 0.5},)
        assert snapshot.members == (tuple(SHAPES),)
        assert {kept.scalars["step"] for kept in snapshot.parameters.values()} == {7}
        assert {tuple(kept.states) for kept in snapshot.parameters.values()} == {("exp_avg",)}
        assert snapshot.counters.counts == {
            "global_steps": 7,
            "global_samples": 56,
            "skipped_steps": 1,
            "micro_steps": 9,
        }


@pytest.mark.parametrize(("num", "world_size"), [(1, 4), (4, 1), (3, 2), (7, 3), (8, 8)])
def test_ranks_read_all_shards_in_order(num: int, world_size: int) -> None:
    ranges = [shard_range(num, rank, world_size) for rank in range(world_size)]

    assert [number for each in ranges for number in each] == list(range(num))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_shards_with_a_gap_are_refused() -> None:
    first, _, last = saved_shards(3)

    with pytest.raises(CheckpointError, match=r"body\.weight|body\.bias"):
        snapshot_of_shards(engine(), [first, last], micro_steps=0)


def test_parameters_without_an_optimizer_keep_their_weights() -> None:
    (shard,) = saved_shards(1)
    only_head = [
        {
            "group": 0,
            "numel": 3,
            "members": ("head.weight",),
            "pieces": (("head.weight", 0, 3, 0),),
            "states": (),
            "scalars": (),
        }
    ]
    optimizer = {
        "fp32_flat_groups": [torch.ones(3)],
        "optimizer_state_dict": {"state": {}, "param_groups": [{"params": [0]}]},
    }
    frozen = Shard(
        tensors=shard_tensors(read_shard_layout(only_head), optimizer),
        frozen={"body.weight": HostSlice(0, flat()[:15]), "head.weight": HostSlice(0, flat()[:3])},
        optimizer=optimizer,
        model=shard.model,
    )

    parameters = snapshot_of_shards(engine(), [frozen], micro_steps=0).parameters

    assert not parameters["body.weight"].updated
    assert parameters["body.weight"].master.values.tolist() == flat()[:15].tolist()
    assert parameters["head.weight"].updated
    assert parameters["head.weight"].master.values.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"states": ("exp_avg", "exp_avg_sq")}, "exp_avg_sq"),
        ({"pieces": (("body.weight", 0, 15, 9),)}, "shorter"),
    ],
)
def test_a_file_that_differs_from_its_description_is_refused(
    change: dict[str, Any], message: str
) -> None:
    (shard,) = saved_shards(1)
    described = {
        "group": 0,
        "numel": NUMEL,
        "members": tuple(SHAPES),
        "pieces": (),
        "states": ("exp_avg",),
        "scalars": ("step",),
    }

    with pytest.raises(CheckpointError, match=message):
        shard_tensors(read_shard_layout([described | change]), shard.optimizer)


@pytest.mark.parametrize("layout", [None, [{"group": 0}], "text"])
def test_a_checkpoint_without_a_usable_description_is_refused(layout: Any) -> None:
    with pytest.raises(CheckpointError, match="version"):
        read_shard_layout(layout)

"""Tests of a rank's file in a checkpoint: plain data is read back, other objects raise."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from zerowatch.errors import CheckpointError
from zerowatch.runtime.trainer.checkpoint.run_state import (
    RunState,
    rank_file,
    read_rank,
    write_rank,
)

PLAIN = RunState(steps=3, samples=24, config={"train_batch_size": 8})


def after_disk(folder: Path, state: RunState) -> RunState:
    write_rank(folder, 0, state)
    return read_rank(folder, 0)


def test_plain_data_is_read_back_with_its_types(tmp_path: Path) -> None:
    plan = {"micro_batch_samples": 4, "failed": {128: 8, 256: 4}, "sizes": (3, 3, 2)}
    state = replace(
        PLAIN, micro_batch_plan=plan, weight_exponent=-3, client_state=[None, b"x", 1.5]
    )

    loaded = after_disk(tmp_path, state)

    assert loaded == state
    assert type(loaded.micro_batch_plan["sizes"]) is tuple


def test_random_generators_are_restored(tmp_path: Path, seed: int) -> None:
    numpy = np.random.RandomState(seed)
    taken = {
        "python": random.getstate(),
        "numpy": numpy.get_state(),
        "torch": torch.get_rng_state(),
    }
    loaded = after_disk(tmp_path, replace(PLAIN, rng=taken)).rng
    drawn = random.random(), numpy.rand(), torch.rand(1)

    random.setstate(loaded["python"])
    numpy.set_state(loaded["numpy"])
    torch.set_rng_state(loaded["torch"])

    assert (random.random(), numpy.rand(), torch.rand(1)) == drawn


def test_tensors_and_arrays_are_read_back_bit_for_bit(tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    residual = torch.randn(7, dtype=torch.bfloat16)
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)[:, ::2]
    given = {"residual": residual, "array": array, "scalar": np.float32(0.1), "none": np.zeros(())}

    loaded = after_disk(tmp_path, replace(PLAIN, compression=given)).compression

    assert loaded is not None
    assert torch.equal(loaded["residual"], residual)
    assert loaded["array"].dtype == np.uint32
    assert np.array_equal(loaded["array"], array)
    assert loaded["scalar"] == np.float32(0.1)
    assert loaded["none"].shape == ()


def test_what_was_read_does_not_need_the_file_any_more(tmp_path: Path) -> None:
    given = {"weights": torch.arange(5000), "array": np.arange(5000)}

    loaded = after_disk(tmp_path, replace(PLAIN, client_state=given)).client_state

    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert torch.equal(loaded["weights"], given["weights"])
    assert np.array_equal(loaded["array"], given["array"])


def test_only_the_elements_of_a_view_are_written(tmp_path: Path) -> None:
    view = torch.zeros(1_000_000)[:3]

    write_rank(tmp_path, 0, replace(PLAIN, client_state={"view": view}))

    assert rank_file(tmp_path, 0).stat().st_size < 10_000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"sampler": {"queue": deque([1])}}, r"data\.sampler\.queue is of type collections\.deque"),
        ({"path": [Path("x")]}, r"data\.path\[0\] is of type pathlib"),
        ({(1, 2): 3}, r"a key of data is of type builtins\.tuple"),
        ({"names": np.array([object()])}, r"data\.names is of type numpy\.ndarray"),
    ],
    ids=["deque", "path", "key", "objects"],
)
def test_an_object_is_rejected_with_its_path_and_type(
    tmp_path: Path, data: dict, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        write_rank(tmp_path, 0, replace(PLAIN, data=data))


def test_a_file_that_holds_code_is_not_executed(tmp_path: Path) -> None:
    torch.save({"steps": Path("x")}, rank_file(tmp_path, 0))

    with pytest.raises(CheckpointError, match=r"zerowatch-rank-00000\.pt holds pathlib"):
        read_rank(tmp_path, 0)


@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_file_of_the_version_before_is_read(tmp_path: Path, rebuilt: bool) -> None:
    written = {**PLAIN.to_plain(), "rebuilt": rebuilt}
    del written["config_changes"], written["autocast_scale"]
    torch.save(written, rank_file(tmp_path, 0))

    changes = PLAIN.config if rebuilt else {}
    assert read_rank(tmp_path, 0) == replace(PLAIN, config_changes=changes)


def test_a_file_of_another_version_is_rejected_with_what_differs(tmp_path: Path) -> None:
    torch.save({**PLAIN.to_plain(), "extra": 1}, rank_file(tmp_path, 0))

    with pytest.raises(CheckpointError, match=r"another version of zerowatch, .* in extra"):
        read_rank(tmp_path, 0)

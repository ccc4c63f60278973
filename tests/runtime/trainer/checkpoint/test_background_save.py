"""Tests of saves in the background: a thread writes what `save` would.

Covers `background_save.py`, `host_copy.py`, `snapshot.py` and `rank_exchange.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts.trainer.resume_engine import PlainEngine, SingleRankHostGroup

from zerowatch.errors import CheckpointError
from zerowatch.runtime.trainer.checkpoint.background_save import (
    BackgroundSaver,
    PendingSave,
    copy_checkpoint,
)
from zerowatch.runtime.trainer.checkpoint.folder import LATEST
from zerowatch.runtime.trainer.checkpoint.host_copy import host_copy, host_copy_bytes
from zerowatch.runtime.trainer.checkpoint.load import find_checkpoint, load_checkpoint
from zerowatch.runtime.trainer.checkpoint.rank_exchange import StoreExchange
from zerowatch.runtime.trainer.checkpoint.run_state import RunState
from zerowatch.runtime.trainer.checkpoint.save import save_checkpoint

ALONE = SingleRankHostGroup()
LIMIT_SECONDS = 60.0


def state(steps: int) -> RunState:
    return RunState(
        steps=steps,
        samples=8 * steps,
        config={},
        micro_batch_plan={"micro_batch_samples": 4},
        client_state={"noise": torch.arange(6.0)},
    )


def copy_of(
    folder: Path,
    engine: PlainEngine,
    available_bytes: Callable[[], float] = lambda: 2.0**30,
    **options: Any,
) -> PendingSave:
    return copy_checkpoint(
        folder, engine, ALONE, state(engine.global_steps), available_bytes, **options
    )


def trained(steps: int = 1) -> PlainEngine:
    engine = PlainEngine()
    engine.module.weight.data.zero_()
    for _ in range(steps):
        engine.step()
    return engine


def loaded(folder: Path) -> tuple[int, float]:
    engine = PlainEngine()
    found = find_checkpoint(folder, engine, ALONE)
    assert found is not None
    load_checkpoint(found, engine, ALONE)
    return found.state.steps, engine.module.weight.data.mean().item()


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_files_equal_those_of_a_save_that_training_waits_for(tmp_path: Path) -> None:
    engine = trained()
    save_checkpoint(tmp_path / "waited", engine, ALONE, state(1))

    pending = copy_of(tmp_path / "beside", engine)
    engine.step()  # training goes on before anything is written
    pending.write(StoreExchange(ALONE))

    assert content(tmp_path / "beside") == content(tmp_path / "waited")


def test_a_checkpoint_is_absent_until_its_thread_has_written_it(tmp_path: Path) -> None:
    engine = trained()
    go_on, ended = threading.Event(), []
    original = engine.checkpoint_engine.save

    def slow(state_dict: Any, path: Path) -> None:
        assert go_on.wait(LIMIT_SECONDS)
        original(state_dict, path)

    engine.checkpoint_engine.save = slow  # type: ignore[method-assign]
    saver = BackgroundSaver(StoreExchange(ALONE))
    pending = copy_of(tmp_path, engine)
    saver.start(pending, lambda saved, seconds: ended.append(saved))
    engine.step()

    assert find_checkpoint(tmp_path, engine, ALONE) is None
    assert not ended
    go_on.set()
    saver.wait()

    assert ended == [True]
    assert saver.take_failure() is None
    assert loaded(tmp_path) == (1, 1.0)
    assert (tmp_path / LATEST).read_text() == pending.path.name


def test_a_failed_thread_leaves_the_earlier_checkpoint_and_close_raises(tmp_path: Path) -> None:
    engine = trained()
    save_checkpoint(tmp_path, engine, ALONE, state(1))
    engine.step()

    def full(state_dict: Any, path: Path) -> None:
        raise RuntimeError("no space")

    engine.checkpoint_engine.save = full  # type: ignore[method-assign]
    saver, ended = BackgroundSaver(StoreExchange(ALONE)), []
    saver.start(copy_of(tmp_path, engine), lambda saved, seconds: ended.append(saved))

    with pytest.raises(CheckpointError, match=r"cannot save step 2 .*rank 0 .*disk full"):
        saver.close()

    saver.close()
    assert ended == [False]
    assert loaded(tmp_path) == (1, 1.0)
    assert not list(tmp_path.glob(".partial*"))


def test_a_state_that_does_not_fit_in_memory_is_written_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = trained()

    pending = copy_of(tmp_path, engine, lambda: 0.0)

    assert pending.snapshot.num_bytes == 0
    partial = tmp_path / ".partial-step-00000001"
    assert (partial / "model.pt").is_file()
    assert "model.pt is written while training waits" in caplog.text
    engine.step()
    pending.write(StoreExchange(ALONE))
    assert loaded(tmp_path) == (1, 1.0)


def test_a_state_that_cannot_be_copied_is_written_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(node: Any) -> Any:
        raise MemoryError("cannot allocate")

    monkeypatch.setattr("zerowatch.runtime.trainer.checkpoint.snapshot.host_copy", fail)

    pending = copy_of(tmp_path, trained())
    pending.write(StoreExchange(ALONE))

    assert "it cannot be copied (cannot allocate)" in caplog.text
    assert loaded(tmp_path) == (1, 1.0)


def test_a_copy_shares_storages_as_the_original_does() -> None:
    base = torch.arange(12.0)
    tree = {"a": base[2:6], "b": [base.view(3, 4).t(), base[2:6]], "c": torch.nn.Parameter(base)}

    copied = host_copy(tree)
    base.zero_()

    assert host_copy_bytes(tree) == 12 * 4
    assert copied["a"].tolist() == [2.0, 3.0, 4.0, 5.0]
    assert copied["b"][0].stride() == (1, 4)
    storages = {each.untyped_storage().data_ptr() for each in (copied["a"], *copied["b"])}
    assert storages == {copied["c"].untyped_storage().data_ptr()}
    assert isinstance(copied["c"], torch.nn.Parameter)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.bool])
def test_a_copy_has_the_same_bits(dtype: torch.dtype) -> None:
    values = torch.arange(7).to(dtype)

    assert torch.equal(host_copy([values])[0], values)
    assert host_copy([values])[0].dtype is dtype


def test_ranks_exchange_texts_over_a_store_and_a_stop_ends_the_wait(tmp_path: Path) -> None:
    store = torch.distributed.HashStore()
    exchanges = [StoreExchange(_Rank(rank), store) for rank in range(2)]
    found: list[list[str]] = []
    other = threading.Thread(
        target=lambda: found.extend(exchanges[1].gather(text) for text in ("b", "d"))
    )
    other.start()
    texts = [exchanges[0].gather(text) for text in ("a", "c")]
    other.join(LIMIT_SECONDS)
    assert texts == found == [["a", "b"], ["c", "d"]]

    exchanges[0].stop()
    with pytest.raises(RuntimeError, match="other ranks"):
        exchanges[0].gather("e")


def saver_without_peer(folder: Path, **limits: float) -> BackgroundSaver:
    """Return a saver that has written its files, and the other rank of which was killed."""
    exchange = StoreExchange(_Rank(0), torch.distributed.HashStore())
    saver = BackgroundSaver(exchange, **limits)
    saver.start(copy_of(folder, trained()), lambda saved, seconds: None)
    saver.wait_for_own_files()
    assert (folder / ".partial-step-00000001" / "model.pt").is_file()
    return saver


def test_a_rank_that_was_killed_is_waited_for_only_for_a_time(tmp_path: Path) -> None:
    saver = saver_without_peer(tmp_path, peer_seconds=0.0)

    with pytest.raises(CheckpointError, match="other ranks have not written their files"):
        saver.close()

    assert not list(tmp_path.glob("step-*"))


def test_the_time_is_another_if_an_error_ends_the_process(tmp_path: Path) -> None:
    saver = saver_without_peer(tmp_path, peer_seconds=1e9, peer_seconds_after_error=0.0)

    with pytest.raises(CheckpointError, match="other ranks have not written their files"):
        try:
            raise ValueError("of the script")
        finally:
            saver.close()


class _Rank(SingleRankHostGroup):
    world_size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def broadcast_text(self, text: str) -> str:
        return "token"

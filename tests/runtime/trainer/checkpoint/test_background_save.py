"""Tests of saves in the background: a thread writes what `save` would.

Covers `background_save.py`, `host_copy.py`, `snapshot.py` and `rank_exchange.py`.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import weakref
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.rank_threads import FakeHostGroup, on_ranks
from fakes.stores_without_clone import remove_clone
from scripts.trainer.resume_engine import PlainEngine, SingleRankHostGroup
from servers.cut_link import CutLink
from torch.distributed import PrefixStore, TCPStore

from zerowatch.errors import CheckpointError
from zerowatch.runtime.trainer.checkpoint import background_save
from zerowatch.runtime.trainer.checkpoint.background_save import (
    BackgroundSaver,
    PendingSave,
    copy_checkpoint,
)
from zerowatch.runtime.trainer.checkpoint.folder import LATEST, MANIFEST, file_info, read_manifest
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
    saver = BackgroundSaver()
    pending = copy_of(tmp_path, engine)
    saver.start(pending, StoreExchange(ALONE), lambda saved, seconds: ended.append(saved))
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
    saver, ended, pending = BackgroundSaver(), [], copy_of(tmp_path, engine)
    saver.start(pending, StoreExchange(ALONE), lambda saved, seconds: ended.append(saved))

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


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_a_tensor_with_attributes_is_copied_as_any_other_and_without_its_gradient(
    kind: type[torch.Tensor],
) -> None:
    base = torch.arange(12.0)
    flat = base[2:6].requires_grad_() if kind is torch.Tensor else torch.nn.Parameter(base[2:6])
    flat.grad = torch.ones(4)  # as with `offload_optimizer`
    flat.ds_id = "0_7"  # type: ignore[attr-defined]  # as DeepSpeed's ZeRO 3
    flat.beside = [base]  # type: ignore[attr-defined]
    tree = {"a": flat, "b": base, "c": [flat]}
    waited, beside = BytesIO(), BytesIO()
    torch.save(tree, waited)

    copied = host_copy(tree)
    torch.save(copied, beside)
    base.zero_()

    assert host_copy_bytes(tree) == host_copy_bytes([flat]) == 12 * 4
    a, b = copied["a"], copied["b"]
    assert (a.ds_id, a.tolist(), a.requires_grad, a.grad) == ("0_7", [2, 3, 4, 5], True, None)
    assert type(a) is kind and copied["c"][0] is a and a.beside[0] is b
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert beside.getvalue() == waited.getvalue()


def test_a_copy_is_on_the_host_if_the_script_has_another_default_device() -> None:
    values = torch.arange(3.0)

    with torch.device("meta"):
        copied = host_copy([values])

    assert copied[0].tolist() == [0.0, 1.0, 2.0]


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
    with pytest.raises(RuntimeError, match="no response from rank 1"):
        exchanges[0].gather("e")


def saver_without_peer(folder: Path, **limits: float) -> BackgroundSaver:
    """Return a saver that writes its files, and the other rank of which was killed."""
    saver = BackgroundSaver(**limits)
    exchange = StoreExchange(_Rank(0), torch.distributed.HashStore())
    saver.start(copy_of(folder, trained()), exchange, lambda saved, seconds: None)
    return saver


def test_a_rank_that_was_killed_is_waited_for_only_for_a_time(tmp_path: Path) -> None:
    saver = saver_without_peer(tmp_path, peer_seconds=0.0)

    with pytest.raises(CheckpointError, match="no response from rank 1"):
        saver.close()

    assert (tmp_path / ".partial-step-00000001" / "model.pt").is_file()
    assert not list(tmp_path.glob("step-*"))


def test_the_time_is_another_if_an_error_ends_the_process(tmp_path: Path) -> None:
    saver = saver_without_peer(tmp_path, peer_seconds=1e9, peer_seconds_after_error=0.0)

    with pytest.raises(CheckpointError, match="no response from rank 1"):
        try:
            raise ValueError("of the script")
        finally:
            saver.close()


def test_an_error_that_ends_the_script_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = saver_without_peer(tmp_path, peer_seconds=1e9, peer_seconds_after_error=0.0)
    monkeypatch.setattr(sys, "last_value", ValueError("of the script"), raising=False)

    with pytest.raises(CheckpointError, match="no response from rank 1"):
        saver.close()


def test_a_cell_that_raised_before_the_save_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IPython sets last_value after each cell that raised."""
    monkeypatch.setattr(sys, "last_value", NameError("prnt"), raising=False)
    saver = saver_without_peer(tmp_path, peer_seconds=0.0, peer_seconds_after_error=1e9)

    with pytest.raises(CheckpointError, match="no response from rank 1"):
        saver.close()


def test_an_error_in_whose_handler_the_save_began_is_no_error(tmp_path: Path) -> None:
    try:
        raise FileNotFoundError("no earlier checkpoint")
    except FileNotFoundError:
        saver = saver_without_peer(tmp_path, peer_seconds=0.0, peer_seconds_after_error=1e9)

        with pytest.raises(CheckpointError, match="no response from rank 1"):
            saver.close()


def test_the_variables_of_a_cell_that_raised_are_freed_after_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, freed = BackgroundSaver(), []

    def cell() -> None:
        batch = torch.ones(2)
        freed.append(weakref.ref(batch))
        raise NameError("prnt")

    try:
        cell()
    except NameError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    saver.start(copy_of(tmp_path, trained()), StoreExchange(ALONE), lambda saved, seconds: None)
    saver.wait()
    monkeypatch.undo()  # another cell raises
    gc.collect()

    assert freed[0]() is None


def test_a_store_that_no_longer_responds_is_waited_for_only_for_a_time(tmp_path: Path) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ended: list[bool] = []
    with CutLink(server.port) as link:
        store = TCPStore("127.0.0.1", link.port, is_master=False, wait_for_workers=False)
        saver = BackgroundSaver(peer_seconds=0.0, leave_seconds=0.0)
        exchange = StoreExchange(_Rank(0), store)
        pending = copy_of(tmp_path, trained())
        saver.start(pending, exchange, lambda saved, seconds: ended.append(saved))
        wait_until(lambda: server.check(["zerowatch/saves/token/0/0"]))
        link.cut()

        with pytest.raises(CheckpointError, match=r"the store .* does not respond"):
            saver.close()
        left = [each for each in threading.enumerate() if each.name == "zerowatch-save"]
        server.set("zerowatch/saves/token/0/1", json.dumps([False, {}, ""]))
    for thread in left:  # its connection was closed
        thread.join(LIMIT_SECONDS)

    assert len(left) == 1
    assert not left[0].is_alive()
    assert ended == [False]
    assert not list(tmp_path.glob("step-*"))


def test_a_thread_that_was_left_completes_nothing_when_the_store_responds_again(
    tmp_path: Path,
) -> None:
    exchange = _Blocked()
    saver = BackgroundSaver(peer_seconds=0.0, leave_seconds=0.0)
    saver.start(copy_of(tmp_path, trained()), exchange, lambda saved, seconds: None)
    with pytest.raises(CheckpointError, match="does not respond"):
        saver.close()
    (left,) = [each for each in threading.enumerate() if each.name == "zerowatch-save"]
    in_background(tmp_path, trained(2))

    exchange.go_on.set()
    left.join(LIMIT_SECONDS)

    assert not left.is_alive()
    assert loaded(tmp_path) == (2, 2.0)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000002"]


def test_ranks_exchange_texts_through_a_store_without_clone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    remove_clone(monkeypatch)
    store = PrefixStore("job", server)

    gathered = on_ranks(2, lambda group: StoreExchange(group, store).gather(f"rank {group.rank}"))

    assert gathered == [["rank 0", "rank 1"]] * 2


def test_after_an_error_of_the_store_on_one_rank_the_next_save_has_its_own_files(
    tmp_path: Path,
) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [_FailingStore(server), server]

    def save_twice(host_group: FakeHostGroup) -> list[str]:
        engine, failures, exchange = RankEngine(host_group), [], None
        for seconds in (0.0, LIMIT_SECONDS):
            saver = BackgroundSaver(store_seconds=seconds)
            engine.step()
            exchange = StoreExchange(host_group, stores[host_group.rank], exchange)
            saver.start(copied(tmp_path, engine, host_group), exchange, lambda *_: None)
            saver.wait_together(host_group)
            failures.append(str(saver.take_failure() or ""))
        return failures

    first, second = on_ranks(2, save_twice)

    assert "connection reset" in first[0]
    assert "no response from rank 0" in second[0]
    assert "Earlier checkpoints are unchanged" not in first[0] + second[0]
    assert [first[1], second[1]] == ["", ""]
    (saved,) = tmp_path.glob("step-*")
    files = read_manifest(saved / MANIFEST).files
    assert {"shard-0.pt", "shard-1.pt"} <= files.keys()
    assert {name: file_info(saved / name) for name in files} == dict(files)
    assert num_keys(server) == 4  # of the last save


@pytest.mark.parametrize("part", ["commit", "prune"])
def test_ranks_wait_for_a_slow_disk_of_the_writer_and_the_checkpoint_is_no_failure(
    tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, polls, is_slow = torch.distributed.HashStore(), threading.Semaphore(0), threading.Event()
    original = getattr(background_save, part)

    def slow(*arguments: Any) -> None:
        for num_polls in (4, 6):  # then each rank has seen that this rank uses its disk
            while polls.acquire(blocking=False):
                pass
            for _ in range(num_polls):
                assert polls.acquire(timeout=LIMIT_SECONDS)
            is_slow.set()
        is_slow.clear()
        original(*arguments)

    class Exchange(StoreExchange):
        def stop(self) -> None:
            if is_slow.is_set():
                super().stop()

    monkeypatch.setattr(background_save, part, slow)
    monkeypatch.setattr(background_save, "_POLL_SECONDS", 0.1)

    def save_twice(host_group: FakeHostGroup) -> list[Any]:
        engine, polled = RankEngine(host_group), _Polled(host_group, polls)
        failures = []
        for _ in range(2):
            engine.step()
            saver = BackgroundSaver(store_seconds=0.0, leave_seconds=1e9)
            pending = copied(tmp_path, engine, host_group, keep=1)
            saver.start(pending, Exchange(host_group, store), lambda *_: None)
            saver.wait_together(polled)
            failures.append(saver.take_failure())
        return failures

    assert on_ranks(2, save_twice) == [[None, None]] * 2
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000002"]


def test_without_a_thread_for_the_save_the_caller_can_save_otherwise(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = BackgroundSaver()
    monkeypatch.setattr(threading.Thread, "start", _no_thread)

    assert not saver.reserve_thread()
    assert "can't start new thread" in caplog.text
    saver.close()


def test_a_reserved_thread_ends_with_its_saver() -> None:
    before = set(threading.enumerate())
    saver = BackgroundSaver()
    assert saver.reserve_thread()
    assert saver.reserve_thread()
    (thread,) = set(threading.enumerate()) - before

    saver.close()
    thread.join(LIMIT_SECONDS)

    assert not thread.is_alive()


def in_background(folder: Path, engine: PlainEngine) -> None:
    saver = BackgroundSaver()
    saver.start(copy_of(folder, engine), StoreExchange(ALONE), lambda saved, seconds: None)
    saver.close()


def copied(
    folder: Path, engine: PlainEngine, host_group: FakeHostGroup, keep: int = 2
) -> PendingSave:
    return copy_checkpoint(
        folder, engine, host_group, state(engine.global_steps), lambda: 2.0**30, keep
    )


def num_keys(store: TCPStore) -> int:
    return sum(key.startswith("zerowatch/saves/") for key in store.list_keys())


def wait_until(condition: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(int(LIMIT_SECONDS * 20)):
        if condition():
            return
        waiting.wait(0.05)
    raise AssertionError("waited in vain")


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


class RankEngine(PlainEngine):
    """Engine of one rank of several: each rank writes a shard that differs in size by step."""

    def __init__(self, host_group: FakeHostGroup) -> None:
        super().__init__()
        self.global_rank, self.world_size = host_group.rank, host_group.world_size

    def save_checkpoint(self, folder: Any, tag: str, save_latest: bool) -> None:
        shard = torch.full((100 * self.global_steps,), float(self.global_steps))
        path = Path(folder) / tag / f"shard-{self.global_rank}.pt"
        self.checkpoint_engine.save({"shard": shard}, path)


class _Polled:
    """Host group of a rank that notes each of its collectives."""

    def __init__(self, host_group: FakeHostGroup, polls: threading.Semaphore) -> None:
        self._host_group, self._polls = host_group, polls

    def all_gather(self, values: Any) -> Any:
        self._polls.release()
        return self._host_group.all_gather(values)


class _Blocked:
    """Exchange of two ranks with a store that blocks."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def gather(self, text: str) -> list[str]:
        assert self.go_on.wait(LIMIT_SECONDS)
        return [text, json.dumps([False, {}, ""])]

    def stop(self) -> None:
        pass


class _FailingStore:
    """A store with one connection that is reset once its rank has written its first text."""

    def __init__(self, server: TCPStore) -> None:
        self._server, self._has_failed = server, False

    def clone(self) -> Any:
        client = self._server.clone()
        if self._has_failed:
            return client
        self._has_failed = True
        return _ResetClient(client)


class _ResetClient:
    def __init__(self, client: Any) -> None:
        self.set, self.set_timeout = client.set, client.set_timeout

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("connection reset by peer")


class _Rank(SingleRankHostGroup):
    world_size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def broadcast_text(self, text: str) -> str:
        return "token"

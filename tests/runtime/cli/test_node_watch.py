"""Tests of `node_watch.py`: heartbeats in a real store, with an injected clock."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.stores_without_clone import remove_clone
from torch.distributed import DistStoreError, HashStore, PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import Worker, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, start_processes
from torch.distributed.elastic.multiprocessing.api import RunProcsResult
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    create_handler,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from zerowatch.errors import CommandLineError
from zerowatch.runtime.cli import node_watch
from zerowatch.runtime.cli.node_watch import (
    NODE_LOST_SECONDS,
    RANKS_KILLED_SECONDS,
    STORE_LOST_SECONDS,
    LostNode,
    NodeHeartbeats,
    NodeWatch,
    rendezvous_failure,
)
from zerowatch.runtime.common.launcher_link import RunFolderReceiver

LIMIT_SECONDS = 60.0


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def receiver_of(runs: Path) -> RunFolderReceiver:
    return RunFolderReceiver(runs / "unnamed", runs)


def nodes(store: Any, clock: Clock, num: int) -> list[NodeHeartbeats]:
    return [NodeHeartbeats(store, node, num, f"host{node}", clock) for node in range(num)]


def pass_time(clock: Clock, seconds: float, *alive: NodeHeartbeats) -> None:
    """Let nodes beat each second."""
    for _ in range(int(seconds)):
        clock.seconds += 1.0
        for node in alive:
            node.beat()


def test_a_node_without_heartbeats_is_lost_and_named(clock: Clock) -> None:
    first, second = nodes(HashStore(), clock, 2)
    pass_time(clock, 5, second, first)

    pass_time(clock, NODE_LOST_SECONDS + 2, first)

    (lost,) = first.lost_nodes()
    assert lost.name == "host1"
    assert lost.seconds == pytest.approx(NODE_LOST_SECONDS + 2)


def test_nodes_that_send_heartbeats_are_not_lost(clock: Clock) -> None:
    first, second = nodes(HashStore(), clock, 2)

    pass_time(clock, 10 * NODE_LOST_SECONDS, first, second)

    assert first.lost_nodes() == second.lost_nodes() == []


def test_a_node_that_never_sent_a_heartbeat_is_unheard_and_not_lost(clock: Clock) -> None:
    """It may run without `zerowatch run`: torch's rendezvous is asked about it."""
    first, second = nodes(HashStore(), clock, 2)

    pass_time(clock, 10 * NODE_LOST_SECONDS, first)

    assert first.lost_nodes() == []
    assert first.unheard_seconds() == 10 * NODE_LOST_SECONDS
    second.beat()
    first.beat()
    assert first.unheard_seconds() == 0.0


def test_a_node_whose_ranks_have_succeeded_is_not_lost(clock: Clock) -> None:
    first, second = nodes(HashStore(), clock, 2)
    pass_time(clock, 5, second, first)
    second.end()
    pass_time(clock, 1, second, first)

    pass_time(clock, 10 * NODE_LOST_SECONDS, first)

    assert first.lost_nodes() == []


def test_a_node_that_could_not_read_does_not_count_others_as_lost(clock: Clock) -> None:
    first, second = nodes(HashStore(), clock, 2)
    pass_time(clock, 5, first, second)

    clock.seconds += 10 * NODE_LOST_SECONDS  # this node was stopped

    assert first.lost_nodes() == []
    second.beat()
    first.beat()
    assert first.lost_nodes() == second.lost_nodes() == []


def test_a_pause_of_the_store_is_no_loss(clock: Clock) -> None:
    """No node could write its heartbeat. The first one that can write again reads old ones."""
    everybody = nodes(HashStore(), clock, 3)
    pass_time(clock, 5, *everybody)

    clock.seconds += STORE_LOST_SECONDS - 1.0
    for node in everybody:
        node.beat()

    assert all(node.lost_nodes() == [] for node in everybody)


@pytest.mark.parametrize("num", [3, 40])
def test_each_node_that_is_left_notices_a_loss_also_beyond_those_that_it_watches(
    clock: Clock, num: int
) -> None:
    everybody = nodes(HashStore(), clock, num)
    pass_time(clock, 3, *everybody)

    pass_time(clock, NODE_LOST_SECONDS + 2, *everybody[1:])

    for node in everybody[1:]:
        (lost,) = node.lost_nodes()
        assert lost.name == "host0"
        assert lost.seconds == pytest.approx(NODE_LOST_SECONDS + 2, abs=1.5)


def test_a_loss_that_another_node_reports_grows_older(clock: Clock) -> None:
    """The node that has reported it leaves the attempt, and reports no more."""
    everybody = nodes(HashStore(), clock, 40)
    pass_time(clock, 3, *everybody)
    pass_time(clock, NODE_LOST_SECONDS + 2, *everybody[1:])

    pass_time(clock, 10, everybody[1])

    (lost,) = everybody[1].lost_nodes()
    assert lost.seconds == pytest.approx(NODE_LOST_SECONDS + 12, abs=1.5)


class FailingStore:
    """A store whose process was killed after the first heartbeat."""

    def __init__(self) -> None:
        self.is_killed = False

    def set(self, key: str, value: str) -> None:
        if self.is_killed:
            raise RuntimeError("connection reset")

    def check(self, keys: list[str]) -> bool:
        return False


def test_the_silence_of_a_store_is_measured_from_its_last_answer(clock: Clock) -> None:
    store = FailingStore()
    node = NodeHeartbeats(store, 0, 1, "host0", clock)
    node.beat()
    store.is_killed = True

    clock.seconds += 12.0

    with pytest.raises(RuntimeError):
        node.beat()
    assert node.store_silence_seconds() == 12.0


class BlockingStore:
    """A store on a lost host: no call returns."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.release.wait(LIMIT_SECONDS)
        raise RuntimeError("the store is gone")


def test_a_store_that_blocks_its_callers_is_noticed(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_watch, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(node_watch, "GUARD_SECONDS", 0.01)
    store, noticed = BlockingStore(), threading.Event()
    watch = NodeWatch(NodeHeartbeats(store, 0, 2, "host0", clock), noticed.set)

    clock.seconds += STORE_LOST_SECONDS + 1.0

    assert noticed.wait(LIMIT_SECONDS)
    watch.close()
    store.release.set()


STUBBORN = """
import pathlib, signal, sys, time

if sys.argv[1] == "ignores":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path(sys.argv[2]).touch()
    time.sleep(10_000)
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.02)
sys.exit(1)
"""


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[PContext]:
    """Two ranks of this node: one fails, and the other one ignores SIGTERM."""
    ready = tmp_path / "ready"
    roles = ("fails", "ignores")
    context = start_processes(
        name="test",
        entrypoint=sys.executable,
        args={rank: ("-c", STUBBORN, role, str(ready)) for rank, role in enumerate(roles)},
        envs={0: {}, 1: {}},
        logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path)),
    )
    try:
        wait_until(ready.exists)
        yield context
    finally:
        context.close(signal.SIGKILL)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ranks_are_killed_although_the_agent_waits_for_them(
    ranks: PContext, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's agent does after the failure of another rank of its node, for 30 s."""
    monkeypatch.setattr(node_watch, "GUARD_SECONDS", 0.01)
    first, second = nodes(HashStore(), clock, 2)
    pass_time(clock, 5, second, first)
    pass_time(clock, RANKS_KILLED_SECONDS + 1, first)
    watch = NodeWatch(first, lambda: None, lambda: node_watch._kill_ranks(ranks))

    ranks.close(signal.SIGTERM, timeout=int(LIMIT_SECONDS))  # waits until they have exited

    codes = [handler.proc.returncode for handler in ranks.subprocess_handlers.values()]
    assert watch.killed_for == "host1"
    assert codes[1] == -signal.SIGKILL
    watch.close()


def test_ranks_have_time_to_end_after_a_loss_was_noticed(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_watch, "GUARD_SECONDS", 0.01)
    first, second = nodes(HashStore(), clock, 2)
    pass_time(clock, 5, second, first)
    pass_time(clock, NODE_LOST_SECONDS + 1, first)
    killed, checks, lost_nodes = threading.Event(), [], first.lost_nodes

    def checked() -> list[LostNode]:
        checks.append(lost := lost_nodes())
        return lost

    monkeypatch.setattr(first, "lost_nodes", checked)
    watch = NodeWatch(first, lambda: None, lambda: bool(killed.set()))

    wait_until(lambda: len(checks) > 2)  # the first two are complete
    assert all(checks)
    assert not killed.is_set()
    watch.close()


def test_processes_that_were_reaped_are_not_killed(ranks: PContext) -> None:
    """Their ids may belong to other processes."""
    ranks.close(signal.SIGKILL)

    assert not node_watch._kill_ranks(ranks)


def rendezvous(
    store: Any, address: str = "host1", last_call: int = 30, keep_alive: int = 1
) -> DynamicRendezvousHandler:
    """Return torch's rendezvous of a node, which others drop after three missed heartbeats."""
    times = {"keep_alive_interval": keep_alive, "last_call_timeout": last_call}
    parameters = RendezvousParameters("c10d", "host0:29400", "job", 1, 2, address, **times)
    return create_handler(store, C10dRendezvousBackend(store, "job"), parameters)


def agent_of(handler: DynamicRendezvousHandler, ranks: PContext, restarts: int) -> SimpleNamespace:
    spec = SimpleNamespace(rdzv_handler=handler)
    group = SimpleNamespace(spec=spec, workers=[], state=WorkerState.STOPPED, group_world_size=1)
    return SimpleNamespace(_remaining_restarts=restarts, _worker_group=group, _pcontext=ranks)


def test_a_node_without_restarts_left_ends_and_leaves_the_job_open_for_the_others(
    ranks: PContext, tmp_path: Path
) -> None:
    store = HashStore()
    handler = rendezvous(store)
    agent = agent_of(handler, ranks, restarts=0)

    with pytest.raises(CommandLineError, match="--max-restarts"):
        node_watch._leave(agent, [LostNode("host0", 21.0)], [tmp_path])

    handler.shutdown()  # as torch's launcher does at the end
    assert all(each.proc.returncode is not None for each in ranks.subprocess_handlers.values())
    assert not rendezvous(store).is_closed()


def test_ranks_end_and_may_start_again_while_restarts_are_left(
    ranks: PContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = rendezvous(HashStore())

    node_watch._leave(agent_of(handler, ranks, restarts=1), [LostNode("host0", 21.0)], [tmp_path])

    assert all(each.proc.returncode is not None for each in ranks.subprocess_handlers.values())
    assert "node lost: host0 (no heartbeat for 21 s)" in capsys.readouterr().err
    assert handler.shutdown()
    assert handler.is_closed()


@pytest.mark.slow
def test_the_nodes_meet_again_if_one_is_lost_before_they_know_their_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as `zerowatch run` does
    store = HashStore()
    store.set_timeout(timedelta(seconds=2))
    lost = rendezvous(store, "host0", last_call=600)  # it is the first node, and divides the ranks
    left = rendezvous(store, "host1", last_call=1)
    spec = WorkerSpec("default", 1, left, entrypoint="python", max_restarts=1)
    agent = LocalElasticAgent(spec, DefaultLogsSpecs())

    def meet_and_vanish() -> None:
        lost.next_rendezvous()
        lost._stop_heartbeats()

    thread = threading.Thread(target=meet_and_vanish)
    thread.start()
    wait_until(lambda: lost._state_holder.state.participants)

    with node_watch.watch_nodes("host0:29400", receiver_of(tmp_path)):
        agent._rendezvous(agent._worker_group)

    thread.join()
    left._stop_heartbeats()
    assert agent._worker_group.group_world_size == 1
    assert "a node was lost while the nodes met" in capsys.readouterr().err


def test_meetings_that_lose_a_node_each_time_end_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_meetings = 0

    def meet(agent: Any, group: Any) -> None:
        nonlocal num_meetings
        num_meetings += 1
        assert num_meetings <= node_watch.MOST_MEETINGS
        raise DistStoreError("wait timeout after 60000ms")

    monkeypatch.setattr(LocalElasticAgent, "_rendezvous", meet)
    store = HashStore()
    handler = rendezvous(store)
    spec = WorkerSpec("default", 1, handler, entrypoint="python", max_restarts=0)
    agent = LocalElasticAgent(spec, DefaultLogsSpecs())

    with (
        node_watch.watch_nodes("host0:29400", receiver_of(tmp_path)),
        pytest.raises(CommandLineError, match=r"in 5 meetings at host0:29400 .*wait timeout"),
    ):
        agent._rendezvous(agent._worker_group)

    handler.shutdown()  # as torch's launcher does at the end
    assert not rendezvous(store).is_closed()


def static_agent(address: str, num_nodes: int) -> LocalElasticAgent:
    """Return the agent of the first node of a static rendezvous."""
    host, port = address.rsplit(":", 1)
    handler = StaticTCPRendezvous(host, int(port), 0, num_nodes, "job", timeout=1)
    spec = WorkerSpec(
        "default",
        1,
        handler,
        entrypoint="python",
        max_restarts=0,
        master_addr=host,
        master_port=int(port),
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs())


@pytest.mark.parametrize(
    ("endpoint", "option"), [("", "--master-port"), ("a:1", "--rdzv-endpoint")]
)
def test_a_port_that_another_process_uses_is_named(
    tmp_path: Path, endpoint: str, option: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        agent = static_agent(address, 1)

        with (
            node_watch.watch_nodes(endpoint, receiver_of(tmp_path)),
            pytest.raises(CommandLineError) as raised,
        ):
            agent._rendezvous(agent._worker_group)

    text = str(raised.value)
    assert f"at {address} ({option})" in text and "EADDRINUSE" in text
    assert f"another {option}, or --standalone" in text
    assert "rendezvous store" not in text


def test_a_missing_node_of_a_static_rendezvous_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meet(agent: Any, group: Any) -> None:
        raise DistStoreError("Timed out after 901 seconds. 1/2 clients joined.")

    monkeypatch.setattr(LocalElasticAgent, "_rendezvous", meet)
    agent = static_agent("host0:29500", 2)

    with (
        node_watch.watch_nodes("", receiver_of(tmp_path)),
        pytest.raises(CommandLineError, match=r"at host0:29500 .*: Timed out .* joined\. If"),
    ):
        agent._rendezvous(agent._worker_group)


def sleeping_agent(handler: DynamicRendezvousHandler, folder: Path, num_nodes: int) -> Any:
    """Return a real agent of one node that has met others and starts ranks that sleep."""
    spec = WorkerSpec(
        "default",
        1,
        handler,
        entrypoint=sys.executable,
        args=("-c", "import time; time.sleep(10_000)"),
        max_restarts=1,
    )
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(folder)))
    group = agent._worker_group
    group.workers = [Worker(local_rank=0, global_rank=0, world_size=num_nodes)]
    group.store, group.group_rank, group.group_world_size = HashStore(), 0, num_nodes
    group.master_addr, group.master_port = "127.0.0.1", 0
    return agent


def start(agent: Any) -> None:
    group = agent._worker_group
    group.workers[0].id = agent._start_workers(group)[0]
    group.state = WorkerState.HEALTHY


def test_nodes_share_heartbeats_in_a_store_without_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    remove_clone(monkeypatch)
    found = []
    for node in (0, 1):
        group: Any = SimpleNamespace(
            spec=SimpleNamespace(
                local_addr=f"host{node}", rdzv_handler=SimpleNamespace(_store=server)
            ),
            group_rank=node,
            group_world_size=2,
        )
        agent: Any = SimpleNamespace(_store=PrefixStore("attempt 0", server))
        found.append(node_watch._heartbeats(agent, group))
        node_watch._waiting(group).beat()
    for node in (*found, *found):
        node.beat()

    assert [len(node._seen) for node in found] == [1, 1]  # each has read the other's


def test_restarted_ranks_are_not_killed_for_a_node_that_the_earlier_attempt_has_lost(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier watch goes on while the new one is opened, as a lost store blocks that."""
    monkeypatch.setattr(node_watch, "GUARD_SECONDS", 0.01)
    first, second = nodes(HashStore(), clock, 2)
    pass_time(clock, 5, second, first)
    opening, release, killed = threading.Event(), threading.Event(), []
    heartbeats, kill_ranks = iter([first]), node_watch._kill_ranks

    def open_heartbeats(agent: Any, group: Any) -> NodeHeartbeats | None:
        if (earlier := next(heartbeats, None)) is None:
            opening.set()
            release.wait(LIMIT_SECONDS)
        return earlier

    def kill(context: PContext) -> bool:
        killed.append(context)
        return kill_ranks(context)

    monkeypatch.setattr(node_watch, "_heartbeats", open_heartbeats)
    monkeypatch.setattr(node_watch, "_kill_ranks", kill)
    agent = sleeping_agent(rendezvous(HashStore()), tmp_path, 2)
    try:
        with node_watch.watch_nodes("host0:29400", receiver_of(tmp_path)):
            start(agent)
            earlier = agent._pcontext
            agent._stop_workers(agent._worker_group)
            restart = threading.Thread(target=start, args=[agent])
            restart.start()
            assert opening.wait(LIMIT_SECONDS)

            pass_time(clock, RANKS_KILLED_SECONDS + 1, first)
            wait_until(lambda: killed)

            assert killed == [earlier]
            assert agent._pcontext is not earlier
            (rank,) = agent._pcontext.subprocess_handlers.values()
            assert rank.proc.poll() is None
            release.set()
            restart.join()
    finally:
        release.set()
        agent._shutdown(signal.SIGKILL)


@pytest.mark.parametrize("fails", [False, True])
def test_a_node_that_trains_alone_trains_on_without_the_store_until_a_rank_fails(
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fails: bool,
) -> None:
    monkeypatch.setattr(node_watch, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(node_watch, "GUARD_SECONDS", 0.01)
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    handler = rendezvous(HashStore())
    asked, release = threading.Event(), threading.Event()

    def blocked() -> int:
        asked.set()
        release.wait(LIMIT_SECONDS)
        raise RendezvousConnectionError("the store is gone")

    monkeypatch.setattr(handler, "num_nodes_waiting", blocked)
    (node,) = nodes(HashStore(), clock, 1)
    monkeypatch.setattr(node_watch, "_heartbeats", lambda agent, group: node)
    agent = sleeping_agent(handler, tmp_path, 1)
    group = agent._worker_group
    try:
        with node_watch.watch_nodes("host0:29400", receiver_of(tmp_path)):
            start(agent)
            assert asked.wait(LIMIT_SECONDS)
            clock.seconds += STORE_LOST_SECONDS + 1
            errors = ""

            def printed(text: str) -> bool:
                nonlocal errors
                errors += capsys.readouterr().err
                return text in errors

            wait_until(lambda: printed("The ranks train on, because this node trains alone"))
            assert handler.num_nodes_waiting() == 0  # does not wait
            assert agent._monitor_workers(group).state == WorkerState.HEALTHY
            assert codes == []

            (rank,) = agent._pcontext.subprocess_handlers.values()
            if fails:
                os.killpg(rank.proc.pid, signal.SIGKILL)
            else:
                monkeypatch.setattr(agent._pcontext, "wait", lambda seconds: RunProcsResult())
            watching = threading.Thread(target=monitor_until_ended, args=[agent])
            watching.start()
            wait_until(lambda: codes)
            release.set()
            watching.join()

        assert codes[0] == int(fails)
        text = "start `zerowatch run` on the nodes" if fails else "have succeeded. The rendezvous"
        assert printed(text)
        assert "host0:29400 (--rdzv-endpoint) has not answered for 30 s" in errors
        assert errors.count("train on") == 1
    finally:
        release.set()
        agent._shutdown(signal.SIGKILL)
        for thread in threading.enumerate():  # else the guard may call the real `os._exit`
            if thread.name == "zerowatch-node-watch":
                thread.join()


def monitor_until_ended(agent: Any) -> None:
    while agent._monitor_workers(agent._worker_group).state == WorkerState.HEALTHY:
        time.sleep(0.02)


@pytest.mark.slow
def test_nodes_that_meet_without_a_node_that_the_store_did_not_hear_are_counted_as_joining(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as `zerowatch run` does
    store = HashStore()
    # torch's own interval: with a shorter one, a pause of the machine drops the other node as well.
    alone = rendezvous(store, "127.0.0.1", last_call=1, keep_alive=5)
    joining = rendezvous(store, "localhost", last_call=1, keep_alive=5)
    alone.next_rendezvous()

    def count() -> int:
        return node_watch._joining(alone, alone.num_nodes_waiting)

    assert count() == 0
    alone._stop_heartbeats()  # as if the store were out of reach

    def is_dropped() -> bool:
        assert count() == 0
        return not alone._state_holder.state.participants

    wait_until(is_dropped)
    joining.next_rendezvous()

    wait_until(lambda: count() == 1)
    joining._stop_heartbeats()


def test_nodes_that_wait_to_join_a_node_are_counted_until_the_nodes_meet(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node,) = nodes(HashStore(), clock, 1)
    asked = iter(range(1_000_000))
    monkeypatch.setattr(node_watch, "BEAT_SECONDS", 0.01)
    watch = NodeWatch(node, lambda: None, count_joining=lambda: min(next(asked), 1))
    wait_until(lambda: watch.num_joining() == 1)

    watch.stop_counting()

    before, beats = next(asked), node._count
    wait_until(lambda: node._count > beats + 1)
    assert next(asked) == before + 1
    watch.close()


@pytest.mark.parametrize(("has_succeeded", "code"), [(True, 0), (False, 1)])
def test_a_launcher_ends_without_the_store_with_the_result_of_its_ranks(
    ranks: PContext,
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_succeeded: bool,
    code: int,
) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)
    (node,) = nodes(HashStore(), clock, 1)
    if has_succeeded:
        ranks.close(signal.SIGKILL)
        node.end()
    agent = agent_of(rendezvous(HashStore()), ranks, restarts=1)

    with pytest.raises(SystemExit) as raised:
        node_watch._ending(agent, node, "host0:29400", receiver_of(tmp_path))()

    assert raised.value.code == code
    assert "host0:29400 (--rdzv-endpoint) has not answered for 30 s" in capsys.readouterr().err
    ranks.close(signal.SIGTERM, timeout=int(LIMIT_SECONDS))  # they are killed already


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RendezvousConnectionError("reset"), "cannot be reached"),
        (RendezvousTimeoutError(), "--nnodes LEAST:MOST"),
        (RendezvousClosedError(), "'job' (--rdzv-id) has ended"),
    ],
)
def test_messages_name_the_address_of_the_store(error: Any, expected: str) -> None:
    text = rendezvous_failure(error, "host0:29400", "job")

    assert "host0:29400" in text
    assert expected in text


def agent(
    num_nodes: int, backend: str, max_restarts: int, most: int | None = None
) -> SimpleNamespace:
    handler = SimpleNamespace(get_backend=lambda: backend)
    if most is not None:
        handler.settings = SimpleNamespace(max_nodes=most)
    spec = SimpleNamespace(rdzv_handler=handler, max_restarts=max_restarts)
    return SimpleNamespace(spec=spec, group_world_size=num_nodes)


@pytest.mark.parametrize(
    ("group", "is_watched"),
    [
        (agent(2, "c10d", 1), True),
        (agent(2, "c10d", 1, most=2), True),
        (agent(1, "c10d", 1, most=2), True),  # it trains alone, and may lose the store
        (agent(1, "c10d", 1, most=1), False),
        (agent(1, "etcd", 1), False),
        (agent(2, "static", 1), False),
        (agent(2, "c10d", 0), False),
    ],
)
def test_only_restartable_jobs_on_several_nodes_are_watched(
    group: SimpleNamespace, is_watched: bool
) -> None:
    assert node_watch._is_watched(group) is is_watched


@pytest.mark.parametrize(("seconds", "names"), [(20, []), (21, ["host1"])])
def test_a_node_is_lost_after_more_than_20_seconds_without_a_heartbeat(
    clock: Clock, seconds: int, names: list[str]
) -> None:
    first, second = nodes(HashStore(), clock, 2)
    pass_time(clock, 5, second, first)

    pass_time(clock, seconds, first)

    assert [node.name for node in first.lost_nodes()] == names


@pytest.mark.parametrize(("pause", "counted"), [(6.0, 6.0), (7.0, 6.0), (50.0, 6.0)])
def test_of_a_pause_between_two_readings_six_seconds_count(
    clock: Clock, pause: float, counted: float
) -> None:
    first, _ = nodes(HashStore(), clock, 2)

    clock.seconds += pause
    first.beat()

    assert first.unheard_seconds() == counted


def test_each_node_watches_the_next_eight(clock: Clock) -> None:
    store = HashStore()
    first, *others = nodes(store, clock, 10)
    for node in others[:8]:
        node.beat()

    first.beat()

    assert first.unheard_seconds() == 0.0  # the ninth is not watched


def test_a_node_that_was_not_heard_at_first_is_lost_if_the_rendezvous_has_dropped_it(
    clock: Clock,
) -> None:
    first, _ = nodes(HashStore(), clock, 2)
    members = [{"a": "host0", "b": "host1"}, {"a": "host0"}]
    watch = NodeWatch(first, lambda: None, members=lambda: members[0])
    watch.close()
    pass_time(clock, 20, first)
    at_20 = watch.lost_nodes()
    pass_time(clock, 1, first)
    is_member = watch.lost_nodes()

    del members[0]

    assert (at_20, is_member) == ([], [])
    assert watch.lost_nodes() == [LostNode("host1", 21.0)]


def test_any_other_error_of_the_rendezvous_is_named() -> None:
    text = rendezvous_failure(RendezvousError(), "host0:29400", "job")
    given = rendezvous_failure(RendezvousError("why"), "host0:29400", "job")

    start = "run: the nodes cannot meet at host0:29400 (--rdzv-endpoint): "
    assert (text, given) == (f"{start}RendezvousError", f"{start}why")

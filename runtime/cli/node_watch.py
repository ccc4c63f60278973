"""Detects that another node of the job, or the rendezvous store, is lost.

torch's agent on each node sees the processes of its own node only. If another node is switched off
or cut from the network, nothing closes the connections to it, and the ranks wait in a collective
until a timeout of many minutes. So the agents write heartbeats to the rendezvous store. An agent
that misses the heartbeats of another node ends its own ranks, and the agents meet again.

The thread of torch's agent may wait: for other ranks of its node, or for a disk. So a thread of the
watch kills the ranks that are left when a node has been lost for longer.

Ranks on a single node need no store. If it is lost, they train on, and the agent must not wait for
it: a thread of the watch asks which nodes want to join.

The clocks of two nodes may differ, so a heartbeat contains a count. Its age is the time for which
the reader has seen the same count. Times in which it could not read do not count.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import CommandLineError
from ..common.fail_open import FailOpen
from ..common.launcher_link import RunFolderReceiver
from ..common.plain_text import write_line_if_open
from .launcher_notes import note_ended_workers, worker_pids

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousError

BEAT_SECONDS = 2.0
# A node counts as lost after this time without a new heartbeat: above the 15 s after which torch's
# own rendezvous forgets the node, so that the others do not wait for it there.
NODE_LOST_SECONDS = 20.0
# Of a longer time between two readings, only this much counts: this process or the store was
# stopped, and the other nodes may not have been able to write.
MAX_GAP_SECONDS = 3 * BEAT_SECONDS
# Above the time in which a busy store answers, and below the 60 s of torch's own timeout.
STORE_LOST_SECONDS = 30.0
GUARD_SECONDS = 1.0
# A process that was stopped for long first has this many checks to hear from the store.
MIN_CHECKS = 20
# Each node watches the next ones, in a ring. One is enough to detect any loss, because it informs
# the others; more make the message complete.
MAX_WATCHED = 8
# Stuck ranks do not react to SIGTERM in a collective of NCCL.
KILL_AFTER_SECONDS = 3
# Ranks that a lost node has left behind are killed then, whatever the agent waits for. torch gives
# ranks 30 s to end after SIGTERM, if another rank of this node has failed or a node joins.
RANKS_KILLED_SECONDS = NODE_LOST_SECONDS + KILL_AFTER_SECONDS + 2.0
# Meetings of an attempt in which a node is lost; each of them lasts until torch's timeout of 60 s.
MOST_MEETINGS = 5
_ENDED = "ended"
_LOST = "lost"


class LostNode(NamedTuple):
    """A node without heartbeats: its name, and the seconds since the last one."""

    name: str
    seconds: float


class NodeHeartbeats:
    """Writes the heartbeats of one node to a store, and reads those of other nodes.

    `beat` is called on a thread of its own, because a store on a lost host blocks its callers. The
    other methods never wait.

    Args:
        store: A c10d store that only the ranks of this attempt use.
        node: Number of this node.
        num_nodes: Nodes of the job.
        name: Name of this node in messages.
        now: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        store: Any,
        node: int,
        num_nodes: int,
        name: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._node, self._name, self._now = store, node, name, now
        others = ((node + distance) % num_nodes for distance in range(1, num_nodes))
        self._watched = [other for other, _ in zip(others, range(MAX_WATCHED), strict=False)]
        self._count = 0
        self._has_ended = False
        self._seen: dict[int, tuple[str, float]] = {}  # by node: its heartbeat, since when
        self._lost_elsewhere: dict[str, float] = {}  # by name: since when, as other nodes report
        self._started_at = self._answered_at = now()

    def beat(self) -> None:
        """Write a heartbeat, read the others, and share which nodes are lost.

        Raises:
            RuntimeError: The store does not respond.
        """
        self._count += 1
        count = _ENDED if self._has_ended else self._count
        self._store.set(_key(self._node), json.dumps([count, self._name]))
        for other in self._watched:
            if other in self._seen or self._store.check([_key(other)]):
                text = self._store.get(_key(other)).decode()
                if other not in self._seen or self._seen[other][0] != text:
                    self._seen[other] = text, self._now()
        now = self._now()
        self._discount(now - self._answered_at - MAX_GAP_SECONDS, now)
        self._answered_at = now
        if lost := self._silent_nodes():
            self._store.set(_LOST, json.dumps(lost))
        elif self._store.check([_LOST]):
            for name, seconds in json.loads(self._store.get(_LOST)):
                self._lost_elsewhere.setdefault(name, self._now() - seconds)

    def end(self) -> None:
        """Let the next heartbeat be the last: the ranks of this node have succeeded."""
        self._has_ended = True

    def lost_nodes(self) -> list[LostNode]:
        """Return the nodes that have sent heartbeats and stopped, while the store answers.

        Nodes that only other nodes watch are included.
        """
        elsewhere = list(self._lost_elsewhere.items())
        return self._silent_nodes() or [
            LostNode(name, self._answered_at - since) for name, since in elsewhere
        ]

    def has_ended(self) -> bool:
        """Return whether the ranks of this node have succeeded."""
        return self._has_ended

    def _discount(self, seconds: float, now: float) -> None:
        """Do not count a time in which this node could not read; nothing if it is negative."""
        if seconds > 0.0:
            self._started_at += seconds
            for node, (text, since) in self._seen.items():
                self._seen[node] = text, min(since + seconds, now)
            for name, since in self._lost_elsewhere.items():
                self._lost_elsewhere[name] = since + seconds

    def _silent_nodes(self) -> list[LostNode]:
        lost = []
        for text, since in list(self._seen.values()):
            count, name = json.loads(text)
            seconds = self._answered_at - since
            if count != _ENDED and seconds > NODE_LOST_SECONDS:
                lost.append(LostNode(name, seconds))
        return lost

    def unheard_seconds(self) -> float:
        """Return for how long a node that is watched has sent no heartbeat at all; 0 if none."""
        is_complete = len(self._seen) == len(self._watched)
        return 0.0 if is_complete else self._answered_at - self._started_at

    def store_silence_seconds(self) -> float:
        """Return the seconds since the store has answered last."""
        return self._now() - self._answered_at


class NodeWatch:
    """Watches the other nodes of one attempt, and the store, on threads of its own.

    Args:
        heartbeats: The heartbeats of this attempt.
        on_store_lost: Function that ends this process if it needs the store. It is called on a
            thread, because the agent may wait for the store forever, and as long as the store does
            not answer.
        kill_ranks: Function that kills the ranks of this attempt on this node, and returns whether
            any was running. It is called on a thread, because the agent may wait for its ranks.
        members: Returns the nodes that torch's rendezvous knows, by a unique key.
        count_joining: Returns how many nodes wait to join. It is called on a thread, because a lost
            store blocks its callers. An error counts as no answer of the store.
    """

    def __init__(
        self,
        heartbeats: NodeHeartbeats,
        on_store_lost: Callable[[], object],
        kill_ranks: Callable[[], bool] = lambda: False,
        members: Callable[[], Mapping[str, str]] = dict,
        count_joining: Callable[[], int] | None = None,
    ) -> None:
        self._heartbeats = heartbeats
        self._on_store_lost, self._kill_ranks = on_store_lost, kill_ranks
        self._members, self._first_members = members, members()
        self._count_joining, self._num_joining = count_joining, 0
        self._joining_lock = threading.Lock()
        self._killed_for = ""
        self._stopped = threading.Event()
        for function in (self._beat, self._guard):
            threading.Thread(target=function, name="zerowatch-node-watch", daemon=True).start()

    @property
    def killed_for(self) -> str:
        """The names of the lost nodes for which the ranks were to be killed; empty if none."""
        return self._killed_for

    def lost_nodes(self) -> list[LostNode]:
        """Return the nodes that are lost, those without a first heartbeat included."""
        lost = self._heartbeats.lost_nodes()
        unheard = self._heartbeats.unheard_seconds()
        if lost or unheard <= NODE_LOST_SECONDS:
            return lost
        left = self._members()
        return [
            LostNode(name, unheard) for key, name in self._first_members.items() if key not in left
        ]

    def end(self) -> None:
        """Let the next heartbeat be the last: the ranks of this node have succeeded."""
        self._heartbeats.end()

    def num_joining(self) -> int:
        """Return how many nodes waited to join when the store has answered last. Never waits."""
        return self._num_joining

    def stop_counting(self) -> None:
        """Ask no more which nodes want to join, and wait for the last answer.

        torch's rendezvous cannot be asked while its nodes meet or while it is closed.
        """
        with self._joining_lock:
            self._count_joining = None

    def close(self) -> None:
        """Stop the threads, without waiting for the store. Safe to call twice."""
        self._stopped.set()

    def _beat(self) -> None:
        from torch.distributed.elastic.rendezvous import RendezvousError

        while not self._stopped.wait(BEAT_SECONDS):
            with suppress(RuntimeError, RendezvousError):  # the guard measures for how long
                with self._joining_lock:
                    if self._count_joining is not None:
                        self._num_joining = self._count_joining()
                self._heartbeats.beat()

    def _guard(self) -> None:
        num_checks = 0
        while not self._stopped.wait(GUARD_SECONDS):
            silence = self._heartbeats.store_silence_seconds()
            num_checks = 0 if silence < 2 * BEAT_SECONDS else num_checks + 1
            if silence > STORE_LOST_SECONDS and num_checks >= MIN_CHECKS:
                self._on_store_lost()
                continue
            lost = [] if self._killed_for else self.lost_nodes()
            if any(node.seconds > RANKS_KILLED_SECONDS for node in lost):
                self._killed_for = _names(lost)  # before the agent sees that they have ended
                if self._kill_ranks():
                    write_line_if_open(
                        sys.stderr,
                        f"run: node lost: {_seconds(lost)}. The ranks of this node were killed",
                    )


@contextmanager
def watch_nodes(endpoint: str, receiver: RunFolderReceiver) -> Iterator[None]:
    """Watch the other nodes of each attempt that an agent of torch starts while this is open.

    If a node is lost after the nodes have met and before they know their ranks, they meet again.
    Only attempts on several nodes are watched, and only if `--max-restarts` allows restarts.

    Args:
        endpoint: Address of the rendezvous store, as the user wrote it.
        receiver: Receives the run folders. Ranks that are ended get a note there.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    meet = LocalElasticAgent._rendezvous
    start, monitor = LocalElasticAgent._start_workers, LocalElasticAgent._monitor_workers
    watches: list[NodeWatch] = []
    # A store that cannot be opened twice leaves the nodes unwatched.
    heartbeats_of = FailOpen().wrap("heartbeats of nodes", _heartbeats, is_kept=True)
    waiting_of = FailOpen().wrap("heartbeats of nodes", _waiting, is_kept=True)

    def met(agent: Any, worker_group: Any) -> None:
        from torch.distributed import DistNetworkError, DistStoreError
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError

        handler = worker_group.spec.rdzv_handler
        for watch in watches:
            watch.stop_counting()
        vars(handler).pop("num_nodes_waiting", None)
        if not watches and _is_watched(worker_group):  # the first meeting
            waiting = waiting_of(worker_group)
            if waiting is not None:
                watches.append(NodeWatch(waiting, _ending(agent, waiting, endpoint, receiver)))
        for num_meetings in count(1):
            try:
                meet(agent, worker_group)
                return
            except (DistNetworkError, DistStoreError) as error:
                if not _is_dynamic(worker_group.spec):
                    raise CommandLineError(
                        _static_text(worker_group.spec, endpoint, error)
                    ) from error
                if isinstance(error, DistNetworkError):
                    raise RendezvousConnectionError(str(error)) from error
                # No answer of a node within `read_timeout`.
                if num_meetings == MOST_MEETINGS:
                    _keep_job_open(handler)
                    raise CommandLineError(_meetings_text(endpoint, error)) from error
                write_line_if_open(
                    sys.stderr,
                    f"run: a node was lost while the nodes met ({error}). They meet again",
                )

    def started(agent: Any, worker_group: Any) -> Any:
        ids = start(agent, worker_group)
        earlier = list(watches)
        if _is_watched(worker_group):
            # The earlier watch goes on meanwhile, because opening a lost store blocks.
            heartbeats = heartbeats_of(agent, worker_group)
            if heartbeats is not None:
                handler = worker_group.spec.rdzv_handler
                is_alone = worker_group.group_world_size == 1
                watch = NodeWatch(
                    heartbeats,
                    _ending(agent, heartbeats, endpoint, receiver),
                    partial(_kill_ranks, agent._pcontext),
                    partial(_members, worker_group),
                    partial(_joining, handler, handler.num_nodes_waiting) if is_alone else None,
                )
                if is_alone:
                    handler.num_nodes_waiting = watch.num_joining
                watches.append(watch)
        for watch in earlier:
            watch.close()
            watches.remove(watch)
        return ids

    def monitored(agent: Any, worker_group: Any) -> Any:
        from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

        result = monitor(agent, worker_group)
        if not watches:
            return result
        (watch,) = watches
        if result.state == WorkerState.SUCCEEDED:
            watch.end()
        if result.state != WorkerState.HEALTHY:
            worker_group.state = result.state  # from now on, a lost store ends the launcher
            watch.stop_counting()
        elif lost := watch.lost_nodes():
            _leave(agent, lost, receiver.runs())
            return RunResult(state=WorkerState.UNHEALTHY)
        if result.failures and watch.killed_for:
            pids = worker_pids(worker_group)
            note_killed_ranks(receiver.runs(), pids, result.failures, watch.killed_for)
        return result

    LocalElasticAgent._rendezvous = met  # type: ignore[method-assign]
    LocalElasticAgent._start_workers = started  # type: ignore[method-assign]
    LocalElasticAgent._monitor_workers = monitored  # type: ignore[method-assign]
    try:
        yield
    finally:
        for watch in watches:
            watch.close()
        LocalElasticAgent._rendezvous = meet  # type: ignore[method-assign]
        LocalElasticAgent._start_workers = start  # type: ignore[method-assign]
        LocalElasticAgent._monitor_workers = monitor  # type: ignore[method-assign]


def note_killed_ranks(
    runs: Sequence[Path], pids: Mapping[int, int], failures: Mapping[int, Any], names: str
) -> None:
    """Note why ranks were killed; their first notes only say that SIGKILL ended them.

    Args:
        runs: The folders of run folders.
        pids: Process ids of the workers by rank.
        failures: torch's ProcessFailure by rank.
        names: Names of the lost nodes.
    """
    killed = [rank for rank in failures if failures[rank].exitcode == -signal.SIGKILL]
    _note_lost_nodes(runs, {rank: pids[rank] for rank in killed}, names)


def rendezvous_failure(error: RendezvousError, endpoint: str, job_id: str) -> str:
    """Return the message about an error of torch's rendezvous.

    Args:
        error: The error.
        endpoint: Address of the store, as the user wrote it.
        job_id: torchrun's `--rdzv-id`.
    """
    from torch.distributed.elastic.rendezvous import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousTimeoutError,
    )

    if isinstance(error, RendezvousTimeoutError):
        return (
            f"run: fewer nodes than --nnodes requires have met at {endpoint} (--rdzv-endpoint). "
            "Start the same command on the missing nodes, or allow fewer nodes by --nnodes "
            "LEAST:MOST; --rdzv-conf join_timeout=SECONDS sets how long to wait"
        )
    if isinstance(error, RendezvousConnectionError):
        return store_lost_text(endpoint, "cannot be reached")
    if isinstance(error, RendezvousClosedError):
        return (
            f"run: the job {job_id!r} (--rdzv-id) has ended: its ranks have succeeded, or have "
            f"failed on a node without restarts left. The store at {endpoint} (--rdzv-endpoint) "
            "accepts no more nodes for it. To train on, start the same command with another "
            "--rdzv-id on all nodes; training resumes from its last checkpoint"
        )
    reason = str(error) or type(error).__name__
    return f"run: the nodes cannot meet at {endpoint} (--rdzv-endpoint): {reason}"


def store_lost_text(endpoint: str, reason: str) -> str:
    """Return the message about a rendezvous store that does not respond.

    Args:
        endpoint: Address of the store, as the user wrote it.
        reason: What was observed.
    """
    return (
        f"run: the rendezvous store at {endpoint} (--rdzv-endpoint) {reason}. The ranks of this "
        "node have ended, because without the store the nodes cannot meet. If that host still "
        "trains, start the same command here once the network is back: this node joins it. If it "
        "is lost, start `zerowatch run` on the nodes that are left with --rdzv-endpoint of a host "
        "that is up; training resumes from its last checkpoint"
    )


def _is_watched(worker_group: Any) -> bool:
    spec = worker_group.spec
    # Also a node that trains alone: torch's agent would wait for a lost store.
    settings = getattr(spec.rdzv_handler, "settings", None)
    most = worker_group.group_world_size if settings is None else settings.max_nodes
    return bool(_is_dynamic(spec) and (most or 1) > 1 and spec.max_restarts > 0)


def _is_dynamic(spec: Any) -> bool:
    return bool(spec.rdzv_handler.get_backend() != "static")  # static nodes cannot meet again


def _members(worker_group: Any) -> dict[str, str]:
    """Return the nodes of torch's rendezvous, by a unique key; empty if it does not list them.

    The rendezvous drops a node after 15 s without a sign of it, by the clocks of two nodes. It is
    asked only about a node that was lost before its first heartbeat.
    """
    return {repr(node): node.addr for node in _participants(worker_group.spec.rdzv_handler)}


def _participants(handler: Any) -> list[Any]:
    holder = getattr(handler, "_state_holder", None)
    return [] if holder is None else list(holder.state.participants)  # a thread may change them


def _joining(handler: Any, num_waiting: Callable[[], int]) -> int:
    """Return how many nodes wait to join a node that trains alone, or have met without it.

    torch's rendezvous drops a node after 15 s in which it could not reach the store, for good.
    """
    num, met = num_waiting(), _participants(handler)
    return num if handler._this_node in met else num + len(met)


def _heartbeats(agent: Any, worker_group: Any) -> NodeHeartbeats:
    from torch.distributed.distributed_c10d import PrefixStore

    from ..common.rank_store import new_client, reconnectable

    client = new_client(reconnectable(agent._store), timeout_seconds=None)  # its own connection
    attempt = PrefixStore("zerowatch/nodes", client)
    name = worker_group.spec.local_addr or os.uname().nodename
    return NodeHeartbeats(attempt, worker_group.group_rank, worker_group.group_world_size, name)


def _waiting(worker_group: Any) -> NodeHeartbeats:
    """Return heartbeats of a node that waits for others: they only show that the store answers."""
    from torch.distributed.distributed_c10d import PrefixStore

    from ..common.rank_store import new_client, reconnectable

    store = new_client(reconnectable(worker_group.spec.rdzv_handler._store), timeout_seconds=None)
    return NodeHeartbeats(PrefixStore("zerowatch/waiting", store), 0, 1, os.uname().nodename)


def _ending(
    agent: Any, heartbeats: NodeHeartbeats, endpoint: str, receiver: RunFolderReceiver
) -> Callable[[], None]:
    from torch.distributed.elastic.agent.server.api import WorkerState

    is_printed = False

    def end() -> None:
        nonlocal is_printed
        reason = f"has not answered for {STORE_LOST_SECONDS:.0f} s"
        group = agent._worker_group
        if group.state == WorkerState.HEALTHY and group.group_world_size == 1:
            if not is_printed:
                write_line_if_open(
                    sys.stderr,
                    f"run: the rendezvous store at {endpoint} (--rdzv-endpoint) {reason}. The "
                    "ranks train on, because this node trains alone. If one of them fails, the "
                    "launcher ends, because ranks cannot start again without the store. Do not "
                    "start this job on other nodes until then",
                )
            is_printed = True
            return
        if heartbeats.has_ended():
            write_line_if_open(
                sys.stderr,
                f"run: the ranks of this node have succeeded. The rendezvous store at {endpoint} "
                f"(--rdzv-endpoint) {reason}, so this launcher does not wait for other nodes",
            )
            os._exit(0)
        is_ending_ranks = agent._pcontext is not None and _kill_ranks(agent._pcontext)
        write_line_if_open(sys.stderr, store_lost_text(endpoint, reason))
        if is_ending_ranks:
            text = f"the store at {endpoint} was lost"
            note_ended_workers(receiver.runs(), worker_pids(group), text)
        os._exit(1)

    return end


def _leave(agent: Any, lost: Sequence[LostNode], runs: Sequence[Path]) -> None:
    """End the ranks of this node after the loss of another one.

    Raises:
        CommandLineError: No restart is left.
    """
    has_restarts = agent._remaining_restarts > 0
    handler = agent._worker_group.spec.rdzv_handler
    if has_restarts:
        settings = getattr(handler, "settings", None)
        least = "as many nodes as before" if settings is None else f"{settings.min_nodes} node(s)"
        write_line_if_open(
            sys.stderr,
            f"run: node lost: {_seconds(lost)}. The ranks of this node end, and start again from "
            f"the last checkpoint once {least} have met (--nnodes); no action is needed if enough "
            "nodes are left, else start the same command on another node",
        )
    agent._pcontext.close(signal.SIGTERM, KILL_AFTER_SECONDS)
    _note_lost_nodes(runs, worker_pids(agent._worker_group), _names(lost))
    if not has_restarts:
        _keep_job_open(handler)
        raise CommandLineError(
            f"run: node lost: {_seconds(lost)}, and no restart is left. Start `zerowatch run` "
            "again with more --max-restarts; training resumes from its last checkpoint"
        )


def _keep_job_open(handler: Any) -> None:
    """Let other nodes and the next start use the job: torch closes it when this launcher ends."""
    handler.shutdown = lambda: True


def _meetings_text(endpoint: str, error: Exception) -> str:
    return (
        f"run: in {MOST_MEETINGS} meetings at {endpoint} (--rdzv-endpoint) a node was lost before "
        f"the nodes knew their ranks ({error}). Look for a node whose launcher is stopped or ends "
        "at its start, and check that all nodes have the same version of torch; then start the "
        "same command again, or leave that node out"
    )


def _static_text(spec: Any, endpoint: str, error: Exception) -> str:
    option = "--rdzv-endpoint" if endpoint else "--master-port"
    return (
        f"run: the nodes cannot meet at {spec.master_addr}:{spec.master_port} ({option}): "
        f"{str(error).rstrip('.')}. If another process uses the port, give another {option}, or "
        "--standalone on a single node. On several nodes, start the same command on all of them, "
        "each with its --node-rank and the address of the first"
    )


def _kill_ranks(context: Any) -> bool:
    """Kill the running ranks of an attempt, with their children; return whether there were any.

    Args:
        context: torch's context of the processes. Only the agent's thread reaps them: torch's
            `close` expects that.
    """
    running = [each.proc for each in context.subprocess_handlers.values()]
    running = [process for process in running if process.returncode is None]
    for process in running:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return bool(running)


def _note_lost_nodes(runs: Sequence[Path], pids: Mapping[int, int], names: str) -> None:
    note_ended_workers(runs, pids, f"node {names} was lost")


def _names(lost: Sequence[LostNode]) -> str:
    return " and ".join(node.name for node in lost)


def _seconds(lost: Sequence[LostNode]) -> str:
    return ", ".join(f"{node.name} (no heartbeat for {node.seconds:.0f} s)" for node in lost)


def _key(node: int) -> str:
    return f"beat/{node}"

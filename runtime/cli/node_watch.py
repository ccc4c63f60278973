"""Detects that another node of the job, or the rendezvous store, is lost.

torch's agent on each node sees the processes of its own node only. If another node is switched off
or cut from the network, nothing closes the connections to it, and the ranks wait in a collective
until a timeout of many minutes. So the agents write heartbeats to the rendezvous store. An agent
that misses the heartbeats of another node ends its own ranks, and the agents meet again.

The clocks of two nodes may differ, so a heartbeat contains a count. Its age is the time for which
the reader has seen the same count.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import CommandLineError
from ..common.fail_open import FailOpen
from .launcher_notes import note_ended_workers, worker_pids

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousError

BEAT_SECONDS = 2.0
# A node counts as lost after this time without a new heartbeat: above the 15 s after which torch's
# own rendezvous forgets the node, so that the others do not wait for it there.
NODE_LOST_SECONDS = 20.0
# Above the time in which a busy store answers, and below the 60 s of torch's own timeout.
STORE_LOST_SECONDS = 30.0
GUARD_SECONDS = 1.0
# A process that was stopped for long first has this many checks to hear from the store.
MIN_CHECKS = 20
# Each node watches the next ones, in a ring. One is enough to detect any loss, because torch's
# agents leave as soon as one of them rejoins; the others make the message complete.
MAX_WATCHED = 8
# Stuck ranks do not react to SIGTERM in a collective of NCCL.
KILL_AFTER_SECONDS = 3
# A run folder on a lost host blocks its readers.
NOTES_SECONDS = 2.0
_ENDED = "ended"


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
        self._started_at = self._answered_at = now()

    def beat(self) -> None:
        """Write a heartbeat, and read the others.

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
        self._answered_at = self._now()

    def end(self) -> None:
        """Let the next heartbeat be the last: the ranks of this node have succeeded."""
        self._has_ended = True

    def lost_nodes(self) -> list[LostNode]:
        """Return the nodes that have sent heartbeats and stopped, while the store answers."""
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
        on_store_lost: Function that ends this process. It is called on a thread, because the agent
            may wait for the store forever.
    """

    def __init__(self, heartbeats: NodeHeartbeats, on_store_lost: Callable[[], object]) -> None:
        self.heartbeats = heartbeats
        self._on_store_lost = on_store_lost
        self._stopped = threading.Event()
        for function in (self._beat, self._guard):
            threading.Thread(target=function, name="zerowatch-node-watch", daemon=True).start()

    def close(self) -> None:
        """Stop the threads, without waiting for the store. Safe to call twice."""
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            with suppress(RuntimeError):  # the guard measures for how long
                self.heartbeats.beat()

    def _guard(self) -> None:
        num_checks = 0
        while not self._stopped.wait(GUARD_SECONDS):
            silence = self.heartbeats.store_silence_seconds()
            num_checks = 0 if silence < 2 * BEAT_SECONDS else num_checks + 1
            if silence > STORE_LOST_SECONDS and num_checks >= MIN_CHECKS:
                self._on_store_lost()
                return


@contextmanager
def watch_nodes(endpoint: str, runs: Path) -> Iterator[None]:
    """Watch the other nodes of each attempt that an agent of torch starts while this is open.

    Only attempts on several nodes are watched, and only if `--max-restarts` allows restarts.

    Args:
        endpoint: Address of the rendezvous store, as the user wrote it.
        runs: The folder of run folders. Ranks that are ended get a note there.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    start, monitor = LocalElasticAgent._start_workers, LocalElasticAgent._monitor_workers
    watches: list[NodeWatch] = []
    members: dict[str, str] = {}
    # A store that cannot be opened twice leaves the nodes unwatched.
    heartbeats_of = FailOpen().wrap("heartbeats of nodes", _heartbeats, is_kept=True)

    def started(agent: Any, worker_group: Any) -> Any:
        ids = start(agent, worker_group)
        while watches:
            watches.pop().close()
        members.clear()
        if _is_watched(agent, worker_group):
            heartbeats = heartbeats_of(agent, worker_group)
            if heartbeats is not None:
                watches.append(NodeWatch(heartbeats, _ending(agent, endpoint, runs)))
                members.update(_members(worker_group))
        return ids

    def monitored(agent: Any, worker_group: Any) -> Any:
        from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

        result = monitor(agent, worker_group)
        if not watches:
            return result
        if result.state == WorkerState.SUCCEEDED:
            watches[0].heartbeats.end()
        lost = watches[0].heartbeats.lost_nodes()
        unheard = watches[0].heartbeats.unheard_seconds()
        if not lost and unheard > NODE_LOST_SECONDS:
            left = _members(worker_group)
            lost = [LostNode(members[key], unheard) for key in members if key not in left]
        if result.state != WorkerState.HEALTHY or not lost:
            return result
        _report_lost_nodes(agent, lost)
        agent._pcontext.close(signal.SIGTERM, KILL_AFTER_SECONDS)
        names = " and ".join(node.name for node in lost)
        note_ended_workers(runs, worker_pids(worker_group), f"node {names} was lost")
        return RunResult(state=WorkerState.UNHEALTHY)

    LocalElasticAgent._start_workers = started  # type: ignore[method-assign]
    LocalElasticAgent._monitor_workers = monitored  # type: ignore[method-assign]
    try:
        yield
    finally:
        for watch in watches:
            watch.close()
        LocalElasticAgent._start_workers = start  # type: ignore[method-assign]
        LocalElasticAgent._monitor_workers = monitor  # type: ignore[method-assign]


def rendezvous_failure(error: RendezvousError, endpoint: str) -> str:
    """Return the message about an error of torch's rendezvous.

    Args:
        error: The error.
        endpoint: Address of the store, as the user wrote it.
    """
    from torch.distributed.elastic.rendezvous import (
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
    return f"run: the nodes cannot meet at {endpoint} (--rdzv-endpoint): {error}"


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


def _is_watched(agent: Any, worker_group: Any) -> bool:
    spec = worker_group.spec
    is_dynamic = spec.rdzv_handler.get_backend() != "static"  # static nodes cannot meet again
    return bool(is_dynamic and worker_group.group_world_size > 1 and spec.max_restarts > 0)


def _members(worker_group: Any) -> dict[str, str]:
    """Return the nodes of torch's rendezvous, by a unique key; empty if it does not list them.

    The rendezvous drops a node after 15 s without a sign of it, by the clocks of two nodes. It is
    asked only about a node that was lost before its first heartbeat.
    """
    holder = getattr(worker_group.spec.rdzv_handler, "_state_holder", None)
    nodes = () if holder is None else holder.state.participants
    return {repr(node): node.addr for node in nodes}


def _heartbeats(agent: Any, worker_group: Any) -> NodeHeartbeats:
    from torch.distributed.distributed_c10d import PrefixStore

    attempt = PrefixStore("zerowatch/nodes", agent._store.clone())  # a connection of its own
    name = worker_group.spec.local_addr or os.uname().nodename
    return NodeHeartbeats(attempt, worker_group.group_rank, worker_group.group_world_size, name)


def _ending(agent: Any, endpoint: str, runs: Path) -> Callable[[], None]:
    def end() -> None:
        _print(store_lost_text(endpoint, f"has not answered for {STORE_LOST_SECONDS:.0f} s"))
        for pid in agent._pcontext.pids().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended = (runs, worker_pids(agent._worker_group), f"the store at {endpoint} was lost")
        notes = threading.Thread(target=note_ended_workers, args=ended, daemon=True)
        notes.start()
        notes.join(NOTES_SECONDS)
        os._exit(1)

    return end


def _report_lost_nodes(agent: Any, lost: Sequence[LostNode]) -> None:
    """Print which nodes are lost.

    Raises:
        CommandLineError: No restart is left.
    """
    names = ", ".join(f"{node.name} (no heartbeat for {node.seconds:.0f} s)" for node in lost)
    if agent._remaining_restarts <= 0:
        raise CommandLineError(
            f"run: node lost: {names}, and no restart is left. Start `zerowatch run` again with "
            "more --max-restarts; training resumes from its last checkpoint"
        )
    handler = agent._worker_group.spec.rdzv_handler
    settings = getattr(handler, "settings", None)
    least = "as many nodes as before" if settings is None else f"{settings.min_nodes} node(s)"
    _print(
        f"run: node lost: {names}. The ranks of this node end, and start again from the last "
        f"checkpoint once {least} have met (--nnodes); no action is needed if enough nodes are "
        "left, else start the same command on another node"
    )


def _print(text: str) -> None:
    sys.stderr.write(f"zerowatch: {text}\n")
    sys.stderr.flush()


def _key(node: int) -> str:
    return f"beat/{node}"

"""Compares wire bytes with what the network interface counted; `wire_bytes.py FILE RANKS...`.

The ranks talk in a network of their own, over a loopback interface that carries nothing else. FILE
gets {ranks: {operation: [bytes by our factors, bytes counted]}}, summed over the ranks, or stays
absent where this machine allows no private network.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import multiprocessing
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLONE_NEWUSER, CLONE_NEWNET, SIOCSIFFLAGS, IFF_UP = 0x10000000, 0x40000000, 0x8914, 1
PAYLOAD_BYTES, REPEATS = 16 << 20, 5
HEADER_BYTES = 14 + 20 + 32  # Ethernet, IPv4, TCP with timestamps
COUNTERS = Path("/proc/self/net/dev")


def enter_private_network() -> bool:
    """Move this process, which must have one thread only, into an empty network."""
    libc = ctypes.CDLL(None)
    if all(libc.unshare(flags) for flags in (CLONE_NEWNET, CLONE_NEWUSER | CLONE_NEWNET)):
        return False
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    return True


def sent_bytes() -> int:
    """Return what the loopback interface has sent, without headers; all ranks' bytes pass there."""
    (line,) = [line for line in COUNTERS.read_text().splitlines() if "lo:" in line]
    num_bytes, num_packets = map(int, line.split()[9:11])
    return num_bytes - num_packets * HEADER_BYTES


def measure(ranks: int) -> dict[str, list[float]]:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(ranks, timeout=120)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        members = [
            context.Process(target=be_rank, args=(rank, ranks, folder, barrier))
            for rank in range(ranks)
        ]
        for member in members:
            member.start()
        for member in members:
            member.join()
        found: dict[str, list[float]] = json.loads((folder / "found").read_text())
    return found


def be_rank(rank: int, ranks: int, folder: Path, barrier: Any) -> None:
    import torch
    import torch.distributed as dist

    from zerowatch.runtime.collectives.instrument import CollectiveInstrumentation
    from zerowatch.runtime.common.fail_open import FailOpen

    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    collectives = CollectiveInstrumentation(FailOpen())
    collectives.open()
    found = {}
    for name, operation in operations(torch, dist, ranks).items():
        operation()  # the first time connections are made
        collectives.call_recorder.drain()
        # TCP sends again what overran a buffer, so that the least is what the operation needs.
        counted = min(counted_bytes(operation, barrier) for _ in range(REPEATS))
        call, *_ = collectives.call_recorder.drain().calls
        assert call.payload_bytes == PAYLOAD_BYTES
        factor = call.group.wire_factor(call.op, call.payload_bytes)
        found[name] = [ranks * call.payload_bytes * factor, counted]
    if rank == 0:
        (folder / "found").write_text(json.dumps(found))
    os._exit(0)  # gloo's threads may abort an ordinary exit


def counted_bytes(operation: Callable[[], Any], barrier: Any) -> int:
    barrier.wait()
    before = sent_bytes()
    barrier.wait()
    operation()
    barrier.wait()
    return sent_bytes() - before


def operations(torch: Any, dist: Any, ranks: int) -> dict[str, Callable[[], Any]]:
    whole = torch.ones(PAYLOAD_BYTES // 4)
    other = torch.empty_like(whole)
    part = torch.ones(whole.numel() // ranks)
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather(list(other.chunk(ranks)), part),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(other, part),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce": lambda: dist.reduce(whole, 0),
        "all_to_all_single": lambda: dist.all_to_all_single(other, whole),
    }


if __name__ == "__main__":
    if not enter_private_network():
        sys.exit("this machine allows no private network")
    import torch.distributed  # noqa: F401, once, before the forks

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    figures = {ranks: measure(int(ranks)) for ranks in sys.argv[2:]}
    Path(sys.argv[1]).write_text(json.dumps(figures))

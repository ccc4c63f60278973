"""Reads the CPU time of zerowatch's own threads from the kernel's counters.

As a script it polls the threads of another process and prints the longest stretch of CPU time that
one of them got between two polls, in seconds: `own_threads.py pid tid...`, until stdin closes.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time

POLL_SECONDS = 0.002


def own_threads() -> dict[int, str]:
    """Return this process's zerowatch threads: names by thread id."""
    return {
        thread.native_id: thread.name
        for thread in threading.enumerate()
        if thread.name.startswith("zerowatch") and thread.native_id is not None
    }


def cpu_seconds(pid: int, thread_id: int) -> float:
    """Return the CPU seconds a thread has had; its schedstat counts in nanoseconds."""
    with open(f"/proc/{pid}/task/{thread_id}/schedstat", encoding="ascii") as file:
        return int(file.read().split()[0]) / 1e9


def ended_threads_seconds() -> float:
    """Return the CPU seconds of ended threads; only those of scrapes end here."""
    living = sum(cpu_seconds(os.getpid(), int(each)) for each in os.listdir("/proc/self/task"))
    return time.process_time() - living


def longest_stretch(pid: int, thread_ids: list[int]) -> float:
    """Watch from outside until stdin closes; a stretch that a poll cuts in two counts as two."""
    before = {each: cpu_seconds(pid, each) for each in thread_ids}
    longest = 0.0
    while not select.select([sys.stdin], [], [], POLL_SECONDS)[0]:
        for each in thread_ids:
            now = cpu_seconds(pid, each)
            longest = max(longest, now - before[each])
            before[each] = now
    return longest


if __name__ == "__main__":
    os.nice(5)
    print(longest_stretch(int(sys.argv[1]), [int(each) for each in sys.argv[2:]]))

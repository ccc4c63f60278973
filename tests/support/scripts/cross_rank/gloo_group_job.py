"""One rank of two, on hosts that resolve their own names to 127.0.1.1: adds up over a gloo group.

The default group communicates nothing, like one of NCCL at the start of a job.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

from zerowatch.runtime.common.host_group import new_host_group

PORT = 29655


def main(rank: int) -> None:
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], PORT, 2, rank == 0, timeout=timedelta(seconds=60)
    )
    dist.init_process_group("fake", store=store, rank=rank, world_size=2)
    total = torch.tensor([rank + 1])
    dist.all_reduce(total, group=new_host_group())
    print("sum:", int(total))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))

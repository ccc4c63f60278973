"""Exits while an asynchronous collective is in flight; its peer is two seconds late."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    time.sleep(2)
work = dist.all_reduce(torch.ones(4), async_op=True)
if dist.get_rank() == 1:
    work.wait()
print("out: leaving", os.environ["RANK"], flush=True)

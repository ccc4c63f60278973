"""Trains a small language model with FSDP2 (`fully_shard`), without DeepSpeed.

One line of the script starts monitoring; `--no-watch` leaves it out:

    torchrun --standalone --nproc-per-node 2 examples/torch_fsdp2.py
    torchrun --standalone --nproc-per-node 2 examples/torch_fsdp2.py --no-watch

`zerowatch run` monitors the script without that line, too.
"""

from __future__ import annotations

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_ddp import LENGTH, VOCABULARY, LanguageModel


def main() -> None:
    """Train, and print a checksum of the weights."""
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--watch", action=argparse.BooleanOptionalAction, default=True)
    arguments = options.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)

    model = LanguageModel().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    for layer in model.layers.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if arguments.watch:
        import zerowatch

        watch = zerowatch.watch(model, optimizer)
        if dist.get_rank() == 0:
            print(f"metrics at {watch.address}")

    torch.manual_seed(dist.get_rank())
    for step in range(1, arguments.steps + 1):
        loss = model(torch.randint(VOCABULARY, (4, LENGTH), device=device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
    whole = [parameter.full_tensor() for parameter in model.parameters()]
    if dist.get_rank() == 0:
        weights = b"".join(one.detach().cpu().numpy().tobytes() for one in whole)
        print(f"weights {hashlib.sha256(weights).hexdigest()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Trains a small Llama whose layers DeepSpeed's AutoTP splits over two ranks.

    zerowatch run --standalone --nproc-per-node 2 examples/deepspeed_auto_tp.py

The script does not import zerowatch. It needs transformers.
"""

from __future__ import annotations

import argparse
import hashlib

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH, MICRO_BATCH = 256, 32, 4
CONFIG = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH,
    "gradient_accumulation_steps": 2,
    "tensor_parallel": {"autotp_size": 2},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 10**9,
}


def main() -> None:
    """Train, and print a checksum of each rank's part of the weights."""
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=40)
    steps = options.parse_args().steps
    if not torch.cuda.is_available():  # this op would first be compiled, which takes a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    torch.manual_seed(0)

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    data = torch.Generator().manual_seed(1)  # all ranks of a tensor parallel group read the same
    for step in range(1, steps + 1):
        for _ in range(engine.gradient_accumulation_steps()):
            tokens = torch.randint(VOCABULARY, (MICRO_BATCH, LENGTH), generator=data)
            tokens = tokens.to(engine.device)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
    weights = b"".join(one.detach().cpu().numpy().tobytes() for one in engine.module.parameters())
    print(f"weights of rank {dist.get_rank()} {hashlib.sha256(weights).hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

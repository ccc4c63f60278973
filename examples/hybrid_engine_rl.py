"""Generates text and trains on it in turns with DeepSpeed's hybrid engine, as RLHF trainers do.

    zerowatch run --standalone --nproc-per-node 2 examples/hybrid_engine_rl.py

Each round samples answers to prompts, scores them by a reward, and takes one step of REINFORCE with
the batch's mean reward as the baseline. The reward counts a token, so it grows within some rounds.
The script does not import zerowatch. It needs transformers.
"""

from __future__ import annotations

import argparse
import hashlib

import deepspeed
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCABULARY, PROMPTS, PROMPT_LENGTH, NEW_TOKENS, WANTED = 32, 8, 4, 12, 7
CONFIG = {
    "train_micro_batch_size_per_gpu": PROMPTS,
    "hybrid_engine": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 10**9,
}


def main() -> None:
    """Train, and print a checksum of the weights."""
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=40)
    steps = options.parse_args().steps
    if not torch.cuda.is_available():  # this op would first be compiled, which takes a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    torch.manual_seed(0)

    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(1, steps + 1):
        prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT_LENGTH)).to(engine.device)
        engine.eval()
        tokens = engine.module.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=NEW_TOKENS,
            do_sample=True,
        )
        engine.train()
        answers = tokens[:, PROMPT_LENGTH:]
        reward = (answers == WANTED).float().mean(dim=1)
        scores = engine(input_ids=tokens).logits[:, PROMPT_LENGTH - 1 : -1]
        chosen = scores.log_softmax(-1).gather(-1, answers.unsqueeze(-1)).squeeze(-1)
        loss = -((reward - reward.mean()).unsqueeze(1) * chosen).sum(dim=1).mean()
        engine.backward(loss)
        engine.step()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: reward {reward.mean().item():.4f}", flush=True)
    weights = b"".join(one.detach().cpu().numpy().tobytes() for one in engine.module.parameters())
    print(f"weights of rank {dist.get_rank()} {hashlib.sha256(weights).hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Trains a tiny GPT-2 with Hugging Face's Trainer, which parses `--deepspeed ds.json` itself."""

import os

import deepspeed
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Tokens(torch.utils.data.Dataset):
    """Random tokens, the same in every process."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(0, 64, (32, 16), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
result = trainer.train()
if os.environ["RANK"] == "0":
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"out: steps {result.global_step} losses {losses}", flush=True)
torch.distributed.destroy_process_group()

"""Trains a tiny GPT-2 with Hugging Face's Trainer and DeepSpeed.

zerowatch run --standalone --nproc-per-node 2 examples/huggingface_trainer.py
torchrun --standalone --nproc-per-node 2 examples/huggingface_trainer.py --callback
"""

import argparse
import os

import torch
from tiny_gpt import Sentences, fingerprint, tiny_gpt
from transformers import Trainer, TrainingArguments

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2},
    "zero_force_ds_cpu_optimizer": False,  # on a CPU, Trainer's own AdamW
}

parser = argparse.ArgumentParser()
parser.add_argument("--callback", action="store_true", help="monitor by a callback")
parser.add_argument("--ddp", action="store_true", help="train without DeepSpeed")
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()

callbacks = []
if options.callback:
    import zerowatch

    callbacks.append(zerowatch.TransformersCallback())

trainer = Trainer(
    model=tiny_gpt(),
    args=TrainingArguments(
        output_dir="output",
        deepspeed=None if options.ddp else DS_CONFIG,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=options.steps,
        logging_steps=1,
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=options.steps // 2,
        report_to="none",
        # Else, on a machine without a GPU, each rank takes itself for the only one.
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    ),
    train_dataset=Sentences(),
    eval_dataset=Sentences(16),
    callbacks=callbacks,
)
trainer.train()
if os.environ["RANK"] == "0":
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print("losses:", *losses)
    print("weights:", fingerprint(trainer.model))

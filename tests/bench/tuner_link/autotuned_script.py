"""Script for DeepSpeed's own autotuner: the same model, in plain DeepSpeed."""

from __future__ import annotations

import argparse

import deepspeed
import torch
from bench.tuner_link.linked_model import MODEL, batch

from zerowatch.runtime.cli.demo.model import ByteGpt

STEPS = 6  # it looks at the third to the fifth


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ByteGpt(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(args=arguments, model=model, optimizer=optimizer)
    for _ in range(STEPS * engine.gradient_accumulation_steps()):
        engine.backward(engine(**batch(engine.train_micro_batch_size_per_gpu())))
        engine.step()


if __name__ == "__main__":
    main()

"""One rank of the compression bench: trains the demo's model in each format, reports losses."""

from __future__ import annotations

import warnings
from typing import Any

import deepspeed
import torch
from bench import gpt_training

from zerowatch.runtime.cli.demo.corpus import NextByteSequences, standard_library_text
from zerowatch.runtime.cli.demo.job import ds_config
from zerowatch.runtime.cli.demo.model import ByteGpt, GptConfig
from zerowatch.runtime.engine.compression.gradient_compressor import GradientCompressor

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

JUDGED_WINDOWS = 256
TEXT = standard_library_text()


def train(asked: dict[str, Any], kind: str | None, feedback: bool | None, seed: int) -> float:
    """Return the loss on text that was not trained on."""
    torch.manual_seed(seed)
    model = ByteGpt(GptConfig(**asked["model"]))
    config = ds_config(steps=asked["steps"], stage=2) | {"managed_gradient_accumulation": False}
    parameters = model.parameters()
    engine = deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]
    compressor = GradientCompressor(kind, feedback=feedback) if kind else None
    if compressor is not None:
        compressor.attach(engine)
    sequences = NextByteSequences(TEXT, model.config.max_position_embeddings)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    order = torch.randperm(
        len(sequences) - JUDGED_WINDOWS, generator=torch.Generator().manual_seed(seed)
    )
    batch = engine.train_micro_batch_size_per_gpu()
    for step in range(asked["steps"]):
        begin = (step * world + rank) * batch
        if compressor is not None:
            compressor.begin_window()
        engine.backward(engine(**gathered(sequences, order[begin : begin + batch].tolist())))
        engine.step()
        if compressor is not None:
            compressor.commit_window()
    judged = range(len(sequences) - JUDGED_WINDOWS, len(sequences))
    with torch.no_grad():
        loss = float(model(**gathered(sequences, list(judged))))
    engine.destroy()
    return loss


def gathered(sequences: NextByteSequences, chosen: list[int]) -> dict[str, torch.Tensor]:
    """Return some sequences as one batch."""
    items = [sequences[index] for index in chosen]
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def main() -> None:
    asked = gpt_training.arguments()
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    gpt_training.meet()
    losses = {
        name: [train(asked, kind, feedback, seed) for seed in asked["seeds"]]
        for name, kind, feedback in asked["arms"]
    }
    gpt_training.report(losses)


if __name__ == "__main__":
    main()

"""One rank that trains the demo's model from several seeds, with or without a tuner.

Reports for each seed the loss on held-out text, and the number of steps with each gradient format.
The next seed starts with what the tuner found with the seed before.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench.trainer.compression_training_job import JUDGED_WINDOWS, TEXT, gathered
from bench.tuner_link.linked_model import asked, configuration_of, report
from torch.utils.data import Subset

import zerowatch
from zerowatch.runtime.cli.demo.corpus import NextByteSequences
from zerowatch.runtime.cli.demo.job import ds_config, mean_loss
from zerowatch.runtime.cli.demo.model import ByteGpt, GptConfig


def train(asked: dict[str, Any], seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = ByteGpt(GptConfig(**asked["model"]))
    config = ds_config(steps=asked["steps"], stage=2)
    folder = Path(asked["folder"], "runs")
    settings = {
        "serve": {"enabled": False},
        "run_log": {"folder": str(folder)},
        **asked["settings"],
    }
    run = zerowatch.TrainingRun(
        model, config=config, loss=mean_loss, settings=settings, **asked["tuner"]
    )
    sequences = NextByteSequences(TEXT, model.config.max_position_embeddings)
    first_judged = len(sequences) - JUDGED_WINDOWS
    samples = config["train_micro_batch_size_per_gpu"] * dist.get_world_size()
    loader = run.loader(Subset(sequences, range(first_judged)), batch_samples=samples, seed=seed)
    forms: Counter[str] = Counter()
    for batch in islice(loader.forever(), asked["steps"]):
        forms[str(configuration_of(run)["gradient_compression"])] += 1
        run.train_batch(batch)
    with torch.no_grad():
        loss = float(model(**gathered(sequences, list(range(first_judged, len(sequences))))))
    run.close()
    run.engine.destroy()
    return {"seed": seed, "loss": loss, "forms": forms}


def main(asked: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    for seed in asked["seeds"]:
        report(train(asked, seed))
    dist.barrier()
    report({"ended": True})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(asked())

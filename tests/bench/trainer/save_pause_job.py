"""One rank of the bench of saves: saves that training waits for, and saves in background."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench import gpt_training

import zerowatch
from zerowatch.metrics.catalog import training

WIDTH = 512
BATCH_SAMPLES, LENGTH = 2, 33


def main() -> None:
    asked = gpt_training.arguments()
    warnings.simplefilter("ignore")
    gpt_training.meet()
    torch.manual_seed(0)
    run = zerowatch.TrainingRun(
        gpt_training.TinyGpt(WIDTH, asked["layers"]),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": asked["stage"]},
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-4}},
        },
        loss=lambda model, batch: model(batch),
        settings={"serve": {"enabled": False}, "run_log": {"enabled": False}, "console": "off"},
    )
    names = [tempfile.mkdtemp(prefix="zerowatch-saves-")] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(names)
    report = measure(run, Path(names[0]), asked["pairs"])
    run.close()
    dist.barrier()
    if names[0] and dist.get_rank() == 0:
        shutil.rmtree(names[0])
    gpt_training.report(report)


def measure(run: Any, folder: Path, pairs: int) -> dict[str, Any]:
    """Return seconds by kind of save; the kinds take turns in being the first of three."""
    times: dict[str, list[float]] = {
        name: [] for name in ("waited", "again", "copied", "writing", "beside", "after")
    }
    window(run)
    for background in (False, True):
        pause(run, folder / "same" / str(background), background=background)
    run.wait_for_save()
    files = [content(folder / "same" / str(background)) for background in (False, True)]
    for number in range(pairs):
        for place in range(3):
            kind = ("waited", "again", "copied")[(number + place) % 3]
            in_background = kind == "copied"
            before = written_seconds(run)
            dist.barrier()
            times[kind].append(pause(run, folder / kind, background=in_background))
            beside = window(run)
            run.wait_for_save()
            after = window(run)
            if in_background:
                times["beside"].append(beside)
                times["after"].append(after)
                times["writing"].append(written_seconds(run) - before)
    num_bytes = sum(map(len, files[0].values()))
    return {**times, "equal": files[0] == files[1], "bytes": num_bytes}


def window(run: Any) -> float:
    began = time.perf_counter()
    run.train_batch(torch.randint(0, gpt_training.VOCABULARY, (BATCH_SAMPLES, LENGTH)))
    return time.perf_counter() - began


def pause(run: Any, folder: Path, *, background: bool) -> float:
    began = time.perf_counter()
    run.save(folder, background=background)
    return time.perf_counter() - began


def written_seconds(run: Any) -> float:
    series = run.watch.snapshot().series()
    return float(series.get(training.CHECKPOINT_BACKGROUND_SECONDS.name, 0.0))


def content(folder: Path) -> dict[str, bytes]:
    """Return the files of the latest checkpoint, without the manifest, which has a save number."""
    latest = folder / (folder / "latest").read_text()
    paths = itertools.filterfalse(lambda path: path.suffix == ".json", latest.rglob("*"))
    return {str(path.relative_to(latest)): path.read_bytes() for path in paths if path.is_file()}


if __name__ == "__main__":
    main()

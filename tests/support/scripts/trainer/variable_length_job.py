"""One rank of a training on batches of changing length; see variable_length.py.

`variable_length_job.py JSON`; rank r appends a line to FOLDER/MODE-r.jsonl after each window.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch.nn import functional as F

import zerowatch

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 32, 4, 2
SAMPLES = 16  # of a rank in each window
SHORTEST, LONGEST, TAIL = 24, 512, 1.6
MULTIPLE = 16  # of a length: for each new shape oneDNN keeps what it compiled
FIRST = 5  # windows before the limit is set, all of them short
IGNORED = -100


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.wide = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.back = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.attend(self.before(x)))
        return x + self.back(F.gelu(self.wide(self.between(x))))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Attend with the whole matrix of scores in memory."""
        samples, length, _ = x.shape
        parts = self.qkv(x).view(samples, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
        return (weights @ value).transpose(1, 2).reshape(samples, length, WIDTH)


class Language(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.places = torch.nn.Embedding(LONGEST, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch_of(window: int) -> dict[str, torch.Tensor]:
    """Return this rank's share of a global batch: tokens, targets, and the samples' numbers."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(1000 * window + rank)
    drawn = SHORTEST * float(torch.rand(1, generator=random)) ** (-1 / TAIL)
    length = SHORTEST if window < FIRST else min(LONGEST, math.ceil(drawn / MULTIPLE) * MULTIPLE)
    # A text that can be learned: each token follows from the one before, but for some noise.
    tokens = torch.randint(VOCABULARY, (SAMPLES, length), generator=random)
    noise = torch.rand(SAMPLES, length, generator=random) < 0.1
    for place in range(1, length):
        follows = (5 * tokens[:, place - 1] + 3) % VOCABULARY
        tokens[:, place] = torch.where(noise[:, place], tokens[:, place], follows)
    targets = tokens.roll(-1, dims=1)
    lengths = torch.randint(length // 2, length + 1, (SAMPLES, 1), generator=random)
    targets[torch.arange(length) >= lengths - 1] = IGNORED
    first = (window * ranks + rank) * SAMPLES
    return {"tokens": tokens, "targets": targets, "id": torch.arange(first, first + SAMPLES)}


def token_loss(engine, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean over target tokens and how many there are."""
    logits = engine(batch["tokens"]).flatten(0, 1)
    count = (batch["targets"] != IGNORED).sum()
    loss = F.cross_entropy(logits, batch["targets"].flatten(), ignore_index=IGNORED)
    return loss, count


def ds_config(stage: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 20_000},
    }


def mapped_bytes() -> int:
    """Return what RLIMIT_AS counts of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


class Limit:
    """RLIMIT_AS, from what the process has mapped when `set` is called."""

    def __init__(self, room_bytes: int) -> None:
        self._room_bytes = room_bytes
        self._before = resource.getrlimit(resource.RLIMIT_AS)

    def set(self) -> None:
        limit = mapped_bytes() + self._room_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, self._before[1]))

    def lift(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self._before)


@contextmanager
def lines(file: Path) -> Iterator[Callable[[dict], None]]:
    with file.open("a", buffering=1) as out:
        yield lambda found: print(json.dumps(found), file=out)


def train_plain(windows: int, stage: int, limit: Limit, write: Callable[[dict], None]) -> None:
    torch.manual_seed(0)
    model = Language()
    engine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ds_config(stage)
    )[0]
    for window in range(windows):
        if window == FIRST:
            limit.set()
        batch = batch_of(window)
        loss, _ = token_loss(engine, batch)
        engine.backward(loss)
        engine.step()
        write({"arm": "plain", "window": window, "loss": float(loss), "mapped": mapped_bytes()})


def train_owned(
    arm: str,
    windows: int,
    stage: int,
    write: Callable[[dict], None],
    plans: list[int],
    limit: Limit,
) -> list[int]:
    """Train with a TrainingRun, split by `plans` if given; return the sizes that were used."""
    torch.manual_seed(0)
    seen: list[int] = []

    def loss(engine, batch):
        seen.extend(batch["id"].tolist())
        return token_loss(engine, batch)

    settings = {"serve": {"enabled": False}}
    run = zerowatch.TrainingRun(Language(), config=ds_config(stage), loss=loss, settings=settings)
    run.on_window_abort(seen.clear)
    used_sizes = []
    for window in range(windows):
        if window == FIRST and arm == "limited":
            limit.set()
        if plans:
            run.set_micro_batch(plans[window])
        seen.clear()
        result = run.train_batch(batch_of(window))
        used_sizes.append(max(result.micro_batches))
        write(
            {
                "arm": arm,
                "window": window,
                "loss": result.loss,
                "micro_batches": result.micro_batches,
                "replays": result.replays,
                "mapped": mapped_bytes(),
                "ids": list(seen),
            }
        )
    limit.lift()
    run.close()
    run.engine.destroy()
    return used_sizes


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    num_windows, zero_stage, limiting = asked["windows"], asked["stage"], Limit(asked["room_bytes"])
    with lines(Path(asked["folder"], f"{asked['mode']}-{dist.get_rank()}.jsonl")) as write_line:
        if asked["mode"] == "plain":
            train_plain(num_windows, zero_stage, limiting, write_line)
        else:
            cut = train_owned("limited", num_windows, zero_stage, write_line, [], limiting)
            train_owned("alike", num_windows, zero_stage, write_line, cut, limiting)
            train_owned("uncut", num_windows, zero_stage, write_line, [], limiting)

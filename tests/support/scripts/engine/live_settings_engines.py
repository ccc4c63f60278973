"""Small engines for tests of live settings; a difference in training changes their weights."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm
from deepspeed.runtime.zero import parameter_offload

from zerowatch.runtime.common.deepspeed_internals import clear_release_cache

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

WIDTH, BLOCKS, MICRO_BATCH, MICRO_BATCHES, WINDOWS = 32, 2, 2, 2, 7
APPLY_BEFORE, UNDO_BEFORE = 3, 5  # windows, counted from 0
COUNTED = (
    "all_reduce",
    "reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.wide = torch.nn.Linear(WIDTH, 3 * WIDTH + 1)  # no multiple of the ranks
        self.drop = torch.nn.Dropout(0.1)
        self.back = torch.nn.Linear(3 * WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.wide(self.norm(x)))
        return x + self.back(self.drop(hidden))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (self.head(x).squeeze(-1) - y).square().mean()


class Counts:
    """Counts of DeepSpeed's collectives and of other calls that a setting changes."""

    def __init__(self) -> None:
        self.window: Counter[str] = Counter()
        for name in COUNTED:
            setattr(comm.cdb, name, self._counting(name, getattr(comm.cdb, name)))
        accelerator = get_accelerator()
        accelerator.synchronize = self._counting("synchronize", accelerator.synchronize)

    def _counting(self, name: str, function: Callable) -> Callable:
        def counted(*args, **kwargs):
            self.window[name] += 1
            return function(*args, **kwargs)

        return counted

    def watch(self, engine) -> None:
        """Count the buffers of each backward, and the buckets that go out by owner."""
        optimizer = engine.optimizer
        if hasattr(optimizer, "_release_ipg_buffers"):
            optimizer._release_ipg_buffers = self._counting_buffers(optimizer)
        if hasattr(optimizer, "allreduce_and_scatter"):
            optimizer.allreduce_and_scatter = self._counting(
                "scattered", optimizer.allreduce_and_scatter
            )

    def _counting_buffers(self, optimizer) -> Callable[[], None]:
        release = optimizer._release_ipg_buffers

        def counted() -> None:
            (bucket,) = optimizer.ipg_buckets.values()
            self.window["buffers"] = max(self.window["buffers"], len(bucket.buffer))
            release()

        return counted

    def close(self, engine) -> dict[str, int]:
        """Return the counts since the last call."""
        parameters = list(engine.module.parameters())
        if hasattr(parameters[0], "ds_tensor"):
            kept = [p for p in parameters if p.ds_persist]
            self.window["kept_bytes"] = sum(p.data.nbytes for p in kept)
            buckets = engine.optimizer.ipg_buckets.values()
            self.window["buffers"] = sum(bucket.buffer is not None for bucket in buckets)
        window, self.window = self.window, Counter()
        return dict(window)


def make_engine(stage: int, zero: dict, model: torch.nn.Module | None = None, bf16: bool = False):
    if model is None:
        torch.manual_seed(0)
        model = Net()
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 5_000} | zero,
    }
    if bf16:
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(
    engine, rank: int, before_window: Callable[[int], None], after_window: Callable[[], None]
) -> None:
    data = torch.Generator().manual_seed(1 + rank)
    torch.manual_seed(7)
    kind = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    for window in range(WINDOWS):
        before_window(window)
        for _ in range(MICRO_BATCHES):
            x = torch.randn(MICRO_BATCH, WIDTH, generator=data).to(engine.device, kind)
            y = torch.randn(MICRO_BATCH, generator=data).to(engine.device, kind)
            with saved_bytes(engine):
                loss = engine(x, y)
            engine.backward(loss / MICRO_BATCHES, scale_wrt_gas=False)
        engine.step()
        after_window()


@contextmanager
def saved_bytes(engine) -> Iterator[None]:
    """Set `engine.saved` to the bytes that autograd keeps of a forward, without parameters."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        # Computed each time: ZeRO 3 gathers parameters into other memory.
        held = {parameter.data_ptr() for parameter in engine.module.parameters()}
        if tensor.data_ptr() not in held:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield
    engine.saved = sum(kept.values())


def join() -> None:
    """Join the process group: NCCL's if DS_ACCELERATOR is "cuda"."""
    on_cuda = os.environ.get("DS_ACCELERATOR") == "cuda"
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("nccl" if on_cuda else "gloo", verbose=False)


def weights(engine) -> torch.Tensor:
    whole = []
    for parameter in engine.module.parameters():
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                whole.append(parameter.detach().clone().flatten().float())
        else:
            whole.append(parameter.detach().clone().flatten().float())
    return torch.cat(whole)


def give_up(engine) -> None:
    engine.destroy()
    parameter_offload.FWD_MODULE_STACK.clear()
    clear_release_cache()
    gc.collect()

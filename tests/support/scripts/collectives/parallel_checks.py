"""Trains on two ranks with each kind of parallel groups, and writes what was recorded, as JSON.

`parallel_checks.py FOLDER CHECK...`; each rank leaves FOLDER/rank-R.json.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups

import zerowatch
from zerowatch.metrics.catalog import communication, overhead
from zerowatch.runtime.estimator.engine_estimate import estimate_of_engine, estimated_layouts
from zerowatch.runtime.instrumentation.pipeline_hooks import INSTRUCTION_MAP
from zerowatch.runtime.memory.engine_memory import bytes_by_category

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

QUIET = {"serve": {"enabled": False}, "run_log": {"enabled": False}}
STEPS, MICRO_BATCHES, MICRO_BATCH, LENGTH, WIDTH, WORDS = 4, 3, 2, 6, 16, 32
DELAY_SECONDS, DELAYED_STEPS = 0.1, 9
CONFIG = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH,
    "gradient_clipping": 1.0,
    "steps_per_print": 10**9,
    "zero_allow_untested_optimizer": True,
}


def start_engine(model: torch.nn.Module, parameters=None, mpu=None, **config: object):
    optimizer = torch.optim.AdamW(parameters or model.parameters(), lr=1e-2)
    options = {"model": model, "optimizer": optimizer, "config": {**CONFIG, **config}}
    return deepspeed.initialize(mpu=mpu, **options)[0]


def forget(engine) -> None:
    """Release the process groups, so that the next engine starts without them."""
    engine.destroy()
    groups._release_process_group_references()
    dist.barrier()


def watched(engine, train: Callable[[], object]) -> dict:
    """Train with monitoring; return the recorded figures."""
    watch = zerowatch.watch(engine, QUIET)
    before = watch.snapshot().values.get(communication.COLLECTIVE_CALLS, {})
    records, coverage = [], []
    watch.subscribe(records.append)
    watch.subscribe(
        lambda _: coverage.append(watch.snapshot().value(communication.COMM_COVERAGE_RATIO))
    )
    result = train()
    watch.close()
    snapshot = watch.snapshot()
    calls = snapshot.values[communication.COLLECTIVE_CALLS]
    return {
        "result": result,
        "steps": [dataclasses.asdict(record) for record in records],
        "coverage": coverage,
        "calls": [
            (*key, int(count - before.get(key, 0)))
            for key, count in calls.items()
            if count > before.get(key, 0)
        ],
        "failures": [
            hook
            for (hook,), times in snapshot.values.get(overhead.HOOK_FAILURES, {}).items()
            if times
        ],
    }


def weights(engine) -> torch.Tensor:
    return torch.cat([one.detach().clone().flatten() for one in engine.module.parameters()])


def same_as_unmonitored(make: Callable[[], object], train: Callable[[object], object]) -> dict:
    """Train without and with a watch."""
    engine = make()
    untrained = weights(engine)
    train(engine)
    expected = weights(engine)
    forget(engine)
    engine = make()
    seen = watched(engine, lambda: train(engine))
    seen["trained"] = not torch.equal(untrained, expected)
    seen["bitwise_equal"] = torch.equal(expected, weights(engine))
    forget(engine)
    return seen


class Block(torch.nn.Module):
    seconds = 0.0  # for how long it sleeps

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.drop = torch.nn.Dropout(0.1)  # shows whether monitoring uses the RNG

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(Block.seconds)
        return x + self.drop(torch.nn.functional.gelu(self.inner(x)))


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def to_words(embedding: torch.nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return x @ embedding.weight.T


def make_pipeline(stages: int = 2, micro_batches: int = MICRO_BATCHES, **config: object):
    torch.manual_seed(0)
    layers = [
        TiedLayerSpec("words", torch.nn.Embedding, WORDS, WIDTH),
        LayerSpec(Block),
        LayerSpec(Block),
        TiedLayerSpec("words", torch.nn.Embedding, WORDS, WIDTH, forward_fn=to_words),
    ]
    model = PipelineModule(
        layers, num_stages=stages, loss_fn=token_loss, partition_method="uniform"
    )
    parameters = [one for one in model.parameters() if one.requires_grad]
    return start_engine(model, parameters, gradient_accumulation_steps=micro_batches, **config)


def token_batches(seed: int = 1):
    random = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(WORDS, (MICRO_BATCH, LENGTH), generator=random)
        yield ids, ids.roll(-1, 1)


def train_pipeline(engine) -> list[float]:
    torch.manual_seed(7)
    batches = token_batches()
    return [float(engine.train_batch(batches)) for _ in range(STEPS)]


def pipeline() -> dict:
    return same_as_unmonitored(make_pipeline, train_pipeline)


def pipeline_with_evaluation() -> dict:
    engine = make_pipeline()
    names = ("train_batch", "eval_batch", "save_checkpoint", "load_checkpoint", INSTRUCTION_MAP)
    before = {name: vars(engine).get(name) for name in names}
    during = {}

    def train() -> None:
        during.update({name: vars(engine).get(name) for name in names})
        batches = token_batches()
        engine.train_batch(batches)
        engine.eval_batch(batches)
        engine.train_batch(batches)

    seen = watched(engine, train)
    seen["wrapped"] = all(during[name] is not before[name] for name in names)
    seen["left"] = [name for name in names if vars(engine).get(name) is not before[name]]
    forget(engine)
    return seen


def pipeline_whose_first_stage_is_slow() -> dict:
    """Delay the first stage in every other step; return how much longer those took."""
    engine = make_pipeline(micro_batches=1)
    batches = token_batches()

    def train() -> None:
        for step in range(2 * (1 + DELAYED_STEPS)):
            Block.seconds = DELAY_SECONDS * (step % 2) * (dist.get_rank() == 0)
            dist.barrier()
            engine.train_batch(batches)

    steps = watched(engine, train)["steps"][2:]  # the first sends the tensors' shapes too
    forget(engine)
    readings = {
        "recv": [step["collectives"]["recv"]["seconds"] for step in steps],
        "forward": [step["phase_seconds"].get("forward", 0.0) for step in steps],
        "exposed": [step["comm_exposed_seconds"] for step in steps],
    }
    return {
        name: statistics.median(slow - fast for fast, slow in zip(of[::2], of[1::2], strict=True))
        for name, of in readings.items()
    }


def pipeline_there_and_back() -> dict:
    """Send each micro-batch through both ranks twice, as DualPipeV does."""
    torch.manual_seed(0)
    layers = [torch.nn.Embedding(WORDS, WIDTH), Block(), Block(), torch.nn.Linear(WIDTH, WORDS)]
    model = DualPipeVModule(layers, num_stages=2, loss_fn=token_loss, partition_method="uniform")
    engine = start_engine(model, gradient_accumulation_steps=4)
    batches = token_batches()
    seen = watched(engine, lambda: [float(engine.train_batch(batches)) for _ in range(2)])
    forget(engine)
    return seen


def one_stage_on_two_ranks() -> dict:
    engine = make_pipeline(stages=1)
    batches = token_batches(dist.get_rank())
    seen = watched(engine, lambda: [float(engine.train_batch(batches)) for _ in range(2)])
    forget(engine)
    return seen


def estimated_pipeline() -> dict:
    """Estimate a pipeline in bf16 without ZeRO, whose optimizer DeepSpeed partitions."""
    engine = make_pipeline(stages=1, bf16={"enabled": True})
    engine.train_batch(token_batches())
    memory = estimate_of_engine(engine).memory
    held = bytes_by_category(engine)["cpu"]
    seen = {
        "stages": sorted({layout.stage for layout in estimated_layouts(engine)}),
        "estimated": memory.device_bytes["optimizer"],
        "held": held["optimizer"],
        "resting": memory.resting_bytes,
        "held_in_all": sum(held.values()),
    }
    forget(engine)
    return seen


def make_tensor_parallel():
    from transformers import LlamaConfig, LlamaForCausalLM  # of all checks only this one needs it

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    return start_engine(
        model,
        tensor_parallel={"autotp_size": 2},
        gradient_accumulation_steps=2,
        zero_optimization={"stage": 1},
    )


def train_language_model(engine) -> list[float]:
    torch.manual_seed(7)
    batches, losses = token_batches(), []
    for _ in range(STEPS):
        for _ in range(2):
            ids, _ = next(batches)
            loss = engine(input_ids=ids, labels=ids).loss
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
    return losses


def tensor_parallel() -> dict:
    return same_as_unmonitored(make_tensor_parallel, train_language_model)


class Experts(torch.nn.Module):
    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, torch.nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=ep_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, balance, _ = self.moe(self.first(x))
        return output.square().mean() + 0.01 * balance


class Attention(torch.nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.project = torch.nn.Linear(WIDTH, WIDTH)
        self.attend = DistributedAttention(self._attend, group)

    def _attend(self, query, key, value):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).unflatten(-1, (4, WIDTH // 4))
        return self.attend(heads, heads, heads, batch_dim_idx=0).square().mean()


def train_on_floats(engine) -> None:
    random = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(2):
        engine.backward(engine(torch.randn(MICRO_BATCH, LENGTH, WIDTH, generator=random)))
        engine.step()


def experts_apart() -> dict:
    return trained_on_floats(start_engine(Experts(ep_size=2), zero_optimization={"stage": 0}))


def experts_on_every_rank() -> dict:
    return trained_on_floats(start_engine(Experts(ep_size=1), zero_optimization={"stage": 0}))


def sequence_by_state() -> dict:
    parallel_state_sp.initialize_sequence_parallel(2)
    model = Attention(parallel_state_sp.get_sequence_parallel_group())
    return trained_on_floats(start_engine(model, mpu=parallel_state_sp))


def sequence_by_mesh() -> dict:
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "sp"))
    model = Attention(mesh.get_group("sp"))
    return trained_on_floats(
        start_engine(model, sequence_parallel_size=2, data_parallel_size=1, train_batch_size=2)
    )


def trained_on_floats(engine) -> dict:
    seen = watched(engine, lambda: train_on_floats(engine))
    forget(engine)
    return seen


CHECKS = (
    pipeline,
    pipeline_with_evaluation,
    pipeline_whose_first_stage_is_slow,
    pipeline_there_and_back,
    one_stage_on_two_ranks,
    estimated_pipeline,
    experts_apart,
    experts_on_every_rank,
    sequence_by_state,
    sequence_by_mesh,
    tensor_parallel,
)

if __name__ == "__main__":
    deepspeed.init_distributed("gloo", verbose=False)
    results = {}
    for check in CHECKS:
        if check.__name__ not in sys.argv[2:]:
            continue
        began = time.perf_counter()
        results[check.__name__] = check()
        print("out:", check.__name__, round(time.perf_counter() - began, 1), flush=True)
    Path(sys.argv[1], f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))

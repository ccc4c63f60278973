"""Trains and generates in turns with one engine, with and without monitoring.

`generate_job.py FOLDER hybrid|plain STAGE...` writes what was measured and what the script itself
has counted as JSON per rank; on GPUs if DS_ACCELERATOR is "cuda". With `hybrid`, the engine is
DeepSpeed's hybrid engine, which compiles an op on a GPU. The sampled tokens depend on the weights
and on the RNG, and end at different lengths.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pickle
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch._C import _distributed_c10d as c10d
from transformers import LogitsProcessor, LogitsProcessorList, Qwen2Config, Qwen2ForCausalLM

import zerowatch
from zerowatch.metrics.catalog import generation
from zerowatch.runtime.entry_points import watch

# Compiling this op takes a minute on a new machine, and only inference uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

ON_CUDA = os.environ.get("DS_ACCELERATOR") == "cuda"
IS_HYBRID = sys.argv[2:3] == ["hybrid"]
ROUNDS, PROMPTS, PROMPT_LENGTH, NEW_TOKENS = 20, 4, 5, 8
END, PADDING, VOCABULARY = 1, 0, 16
SETTINGS = {"serve": {"enabled": False}, "memory": {"detailed_sample_seconds": 0.001}}
METRICS = (
    generation.GENERATE_CALLS,
    generation.GENERATED_SEQUENCES,
    generation.GENERATED_TOKENS,
    generation.GENERATE_COMM_EXPOSED_SECONDS,
)


class TokenCounter(LogitsProcessor):
    """Counts a token for each sequence that has not ended when the next token is chosen."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.times_ns: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Count, and return the scores unchanged."""
        self.times_ns.append(time.perf_counter_ns())
        has_ended = (input_ids[:, PROMPT_LENGTH:] == END).any(dim=1)
        self.num_tokens += int((~has_ended).sum())
        return scores


@dataclass
class Round:
    """What the script measures in one round; times by `perf_counter_ns`, but `unix_ns`."""

    tokens: int = 0
    sequences: int = 0
    inside_ns: int = 0  # from the first token to the last
    outside_ns: int = 0  # around the call
    unix_ns: tuple[int, int] = (0, 0)
    step_ns: tuple[int, int] = (0, 0)  # before and after the step
    idle_ns: int = 0  # of the first and last round: when the device has ended the step
    samples: list[list[int]] = field(default_factory=list)


def config_of(stage: int) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": PROMPTS,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "hybrid_engine": {"enabled": IS_HYBRID},
        "zero_optimization": zero or {"stage": stage},
    }


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            attention_dropout=0.1,  # shows whether monitoring uses the RNG
            bos_token_id=None,
            eos_token_id=END,
            pad_token_id=PADDING,
            **shape,
            **heads,
        )
    )


def make_engine(stage: int) -> Any:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = config_of(stage)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def generate(engine: Any, prompts: torch.Tensor, stage: int, found: Round) -> torch.Tensor:
    """Generate as scripts do. At ZeRO 3 all ranks take as many steps as the slowest."""
    counter, unix_ns, started_ns = TokenCounter(), time.time_ns(), time.perf_counter_ns()
    ids = engine.module.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        synced_gpus=stage == 3,
        logits_processor=LogitsProcessorList([counter]),
    )
    found.outside_ns = time.perf_counter_ns() - started_ns
    found.unix_ns = unix_ns, time.time_ns()
    found.inside_ns = counter.times_ns[-1] - counter.times_ns[0]
    found.tokens, found.sequences, found.samples = counter.num_tokens, len(ids), ids.tolist()
    return ids


def train(engine: Any, stage: int) -> list[Round]:
    """Generate and train on what was generated, in turns."""
    data = torch.Generator().manual_seed(1 + dist.get_rank())
    torch.manual_seed(7 + dist.get_rank())
    rounds = []
    for number in range(ROUNDS):
        found = Round()
        prompts = torch.randint(2, VOCABULARY, (PROMPTS, PROMPT_LENGTH), generator=data)
        prompts = prompts.to(engine.device)
        engine.eval()
        ids = generate(engine, prompts, stage, found)
        engine.train()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        before_ns = time.perf_counter_ns()
        engine.step()
        found.step_ns = before_ns, time.perf_counter_ns()
        if number in (0, ROUNDS - 1):
            get_accelerator().synchronize()
            found.idle_ns = time.perf_counter_ns()
        rounds.append(found)
    return rounds


def weights(engine: Any) -> torch.Tensor:
    parameters = list(engine.module.parameters())
    if not hasattr(parameters[0], "ds_id"):
        return torch.cat([each.detach().clone().flatten() for each in parameters]).cpu()
    with deepspeed.zero.GatheredParameters(parameters):
        return torch.cat([each.detach().clone().flatten() for each in parameters]).cpu()


def flight_entries() -> list[dict[str, Any]]:
    dump = c10d._dump_nccl_trace if ON_CUDA else c10d._dump_fr_trace
    entries: list[dict[str, Any]] = pickle.loads(dump())["entries"]
    return entries


def gathers_seen(since: int, rounds: list[Round]) -> int:
    """Count the all-gathers that PyTorch's Flight Recorder saw during calls of `generate`."""
    entries = flight_entries()[since:]
    created = [each["time_created_ns"] for each in entries if "gather" in each["profiling_name"]]
    return sum(start <= at <= end for at in created for start, end in [r.unix_ns for r in rounds])


def compare(stage: int) -> dict[str, Any]:
    unwatched = make_engine(stage)
    expected = train(unwatched, stage)
    expected_weights = weights(unwatched)
    unwatched.destroy()
    engine = make_engine(stage)
    opened = watch(
        engine, {"serve": {"enabled": False}, "memory": {"detailed_sample_seconds": 0.001}}
    )
    records: list[zerowatch.StepRecord] = []
    opened.subscribe(records.append)
    at_start = [opened.snapshot().value(spec) for spec in METRICS]
    seen = len(flight_entries())
    rounds = train(engine, stage)
    gathers = gathers_seen(seen, rounds)
    opened.close()
    trained = weights(engine)
    snapshot = opened.snapshot()
    result = {
        "engine": type(engine).__name__,
        "weights_are_equal": torch.equal(expected_weights, trained),
        "samples_are_equal": [r.samples for r in expected] == [r.samples for r in rounds],
        "has_trained": not torch.equal(expected_weights, fresh_weights()),
        "rounds": [dataclasses.asdict(each) for each in rounds],
        "records": [dataclasses.asdict(each) for each in records],
        "at_start": at_start,
        "metrics": {spec.name: snapshot.value(spec) for spec in METRICS},
        "gathers": gathers,
        "failures": dict(opened.fail_open.failures),
        "is_restored": "generate" not in {*vars(engine.module), *vars(engine)},
    }
    engine.destroy()
    return result


def fresh_weights() -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in make_model().parameters()])


def training_run() -> dict[str, Any]:
    """Train a TrainingRun with the hybrid engine, and generate between its windows."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerowatch").addHandler(handler)
    model = make_model()
    run = zerowatch.TrainingRun(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config=config_of(2),
        loss=lambda engine, batch: engine(input_ids=batch, labels=batch).loss,
        settings={"serve": {"enabled": False}},
    )
    records: list[zerowatch.StepRecord] = []
    run.watch.subscribe(records.append)
    torch.manual_seed(3)
    found = Round()
    batch = torch.randint(2, VOCABULARY, (PROMPTS, PROMPT_LENGTH)).to(run.engine.device)
    for _ in range(2):
        run.engine.eval()
        batch = generate(run.engine, batch[:, :PROMPT_LENGTH], 2, found)
        run.engine.train()
        run.train_batch(batch)
    try:
        run.rebuild({"zero_optimization": {"stage": 1}})
        refusal = ""
    except zerowatch.RebuildError as error:
        refusal = str(error)
    run.close()
    last = records[-1].generation
    return {
        "messages": messages,
        "refusal": refusal,
        "steps": run.steps,
        "tokens": [found.tokens, None if last is None else last.tokens],
    }


if __name__ == "__main__":
    if ON_CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("nccl" if ON_CUDA else "gloo", verbose=False)
    results = {f"stage {stage}": compare(int(stage)) for stage in sys.argv[3:]}
    if IS_HYBRID:
        results["training run"] = training_run()
    Path(sys.argv[1], f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))

"""Compares estimated memory with that of real engines, and of real forward and backward passes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

from zerowatch.runtime.estimator.ds_options import DsOptions
from zerowatch.runtime.estimator.estimate_step import estimate_step
from zerowatch.runtime.estimator.model_memory import peak_of
from zerowatch.runtime.estimator.model_shape import (
    ModelShape,
    ModuleShape,
    ParameterShape,
    Topology,
)
from zerowatch.runtime.estimator.read_module import read_model_shape
from zerowatch.runtime.estimator.trace_activations import trace_activations
from zerowatch.runtime.estimator.typical_model import typical_activations

from .estimate_cases import (
    CASES,
    FURTHER,
    MODELS,
    RANKS,
    SHAPES,
    WITH_ACTIVATIONS,
    Case,
    Decoder,
)

# Without it glibc keeps freed memory, and RSS shows an earlier peak.
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "131072"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Estimated and measured bytes; `rss` is the growth of the process."""

    name: str
    estimated: int
    measured: int
    rss: int
    held_estimated: int = 0
    held_measured: int = 0

    @property
    def error(self) -> float:
        """Return the error of the estimate, relative to the measurement."""
        return self.estimated / self.measured - 1


def compare(names: Sequence[str], model: str, folder: Path) -> Iterator[Compared]:
    """Train these cases on two ranks; the larger rank counts for each quantity."""
    script = SCRIPTS / "estimator" / "estimate_job.py"
    command = (script, folder, model, *names)
    finished = start_ranks(RANKS, *command, cwd=folder, variables=RETURN_FREED_MEMORY)
    files = [folder / f"rank-{rank}.json" for rank in range(RANKS)]
    assert all(file.exists() for file in files), finished.stderr[-3000:]
    ranks = [json.loads(file.read_text()) for file in files]
    for name in names:
        read = {key: max(rank[name][key] for rank in ranks) for key in ranks[0][name]}
        estimated, held = _estimated({**CASES, **FURTHER, **WITH_ACTIVATIONS}[name], model)
        yield Compared(
            name=name,
            estimated=estimated,
            measured=max(read["passes_peak"], read["step_peak"]),
            rss=read["rss_peak"],
            held_estimated=held,
            held_measured=read["walked"],
        )


def _estimated(case: Case, model: str) -> tuple[int, int]:
    """Return the bytes at the peak and between steps; on CPU device and host bytes add up."""
    with torch.device("meta"):
        module = MODELS[case.model or model]()
    # Live bytes are those of a device, where a bucket counts in full; but nothing is pinned.
    backend = "gloo" if "offload_optimizer" in case.zero else "nccl"
    topology = Topology(world_size=RANKS, backend=backend)
    memory = estimate_step(read_model_shape(module), case.ds_config, topology).memory
    samples, tokens = case.batch
    activations = None
    if case.batch != Case.batch:
        activations = trace_activations(module, case.dtype, samples=samples, tokens=tokens)
    peak = peak_of(
        memory, micro_batches=case.accumulation, activations=activations, samples=samples
    )
    held = memory.resting_bytes + memory.host_bytes
    held += (case.accumulation > 1) * memory.accumulated_host_bytes
    return peak.device_bytes + peak.host_bytes, held


def compare_activations(names: Sequence[str], folder: Path) -> Iterator[tuple[Compared, Compared]]:
    """Run each micro-batch; yield the comparison of the trace, and that of the formula."""
    file = folder / "activations.json"
    script = SCRIPTS / "estimator" / "estimate_activations.py"
    finished = start_ranks(1, script, file, *names, cwd=folder, variables=RETURN_FREED_MEMORY)
    assert file.exists(), finished.stderr[-3000:]
    for name, read in json.loads(file.read_text()).items():
        build, dtype, samples, tokens = SHAPES[name]
        with torch.device("meta"):
            module = build()
        traced = trace_activations(module, dtype, samples=samples, tokens=tokens)
        measured = {"name": name, "measured": read["rss"], "rss": read["rss"]}
        by_trace = Compared(estimated=traced.bytes_of(samples), **measured)
        formula = _by_formula(module, dtype, tokens)
        yield by_trace, Compared(estimated=samples * formula, **measured)


def _by_formula(module: Decoder, dtype: str, tokens: int) -> int:
    """Return a sample's bytes by the formula, for a model of the same size."""
    width = module.words.embedding_dim
    words = ParameterShape(name="embedding.weight", shape=(module.words.weight.numel(),))
    layers = (
        ParameterShape(name=f"layers.{n}.attention.qkv", shape=(3 * width, width))
        for n in range(len(module.layers))
    )
    shape = ModelShape(parameters=(words, *layers), root=ModuleShape(name=""))
    model_dtype = None if dtype == "fp32" else dtype
    formula = typical_activations(shape, DsOptions(stage=0, model_dtype=model_dtype), tokens)
    if module.recompute and formula.recomputed:
        return formula.recomputed.sample_bytes
    return formula.sample_bytes

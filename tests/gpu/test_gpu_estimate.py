"""Traced activations against a real pass on a GPU."""

from __future__ import annotations

import pytest
import torch
from scripts.estimator.estimate_cases import LARGE

from zerowatch.runtime.estimator.trace_activations import trace_activations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize(("samples", "tokens"), [(4, 512), (16, 256)])
def test_traced_activations_are_within_ten_percent_of_the_allocators_peak(samples, tokens):
    model = LARGE().to("cuda", torch.bfloat16)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda it: setattr(it, "grad", None))
    run(model, samples, tokens)  # cuBLAS allocates its workspace once
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    run(model, samples, tokens)

    grown = torch.cuda.max_memory_allocated() - before
    traced = trace_activations(model, "bf16", samples=samples, tokens=tokens)
    assert traced.bytes_of(samples) == pytest.approx(grown, rel=0.10)


def run(model: torch.nn.Module, samples: int, tokens: int) -> None:
    ids = torch.zeros(samples, tokens, dtype=torch.long, device="cuda")
    logits = model(ids)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()).backward()

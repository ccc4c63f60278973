"""Tests of the tables and remarks of an estimate whose numbers are given."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import pytest

from zerowatch.runtime.cli.estimate.inputs import RankBatch
from zerowatch.runtime.cli.estimate.result_tables import Heading, print_estimates
from zerowatch.runtime.estimator.model_memory import Activations, MemoryEstimate
from zerowatch.runtime.estimator.model_shape import Topology
from zerowatch.runtime.estimator.step_estimate import EstimatedCollective, StepEstimate
from zerowatch.runtime.estimator.typical_model import typical_transformer

GIB = 2**30
MODEL = typical_transformer(7 * 10**9)


def collective(op: str, *, calls: int, payload: int, wire: float, size: int) -> EstimatedCollective:
    return EstimatedCollective(
        op=op,
        group="dp",
        group_size=size,
        dtype="bf16",
        purpose="gradients",
        calls=calls,
        payload_bytes=payload,
        wire_bytes=wire,
    )


# Permanent are 4 + 12 GiB. Backward adds 3 + 2 + 1 GiB, the step 2.5 GiB, forward 0.5 GiB.
MEMORY = MemoryEstimate(
    device_bytes={
        "parameters": 4 * GIB,
        "gathered": 3 * GIB,
        "gradients": 2 * GIB,
        "optimizer": 12 * GIB,
        "comm_buffers": GIB,
    },
    step_bytes=5 * GIB // 2,
    forward_bytes=GIB // 2,
    bucket_bytes=0,
    resting_bytes=16 * GIB,
    host_bytes=0,
    nvme_bytes=0,
)
SECOND = StepEstimate(
    stage=2,
    collectives=(
        collective("all_reduce", calls=1200, payload=3 * GIB, wire=5 * GIB, size=4),
        collective("all_gather", calls=7, payload=GIB, wire=GIB, size=2),
    ),
    reference_wire_bytes=4 * GIB,
    memory=MEMORY,
    exact=True,
    assumptions=("no parameter is unused", "each layer has one input"),
    remarks=("Gradients: reduced once.", "A remark on the stage."),
)
THIRD = replace(
    SECOND,
    stage=3,
    reference_wire_bytes=0.0,
    exact=False,
    memory=replace(MEMORY, step_bytes=7 * GIB, host_bytes=6 * GIB, nvme_bytes=8 * GIB),
)


def printed(estimates: Sequence[StepEstimate], heading: Heading) -> str:
    stream = io.StringIO()
    print_estimates(estimates, heading, stream)
    return stream.getvalue()


def heading(batch: RankBatch | None = None, **topology: object) -> Heading:
    ranks = Topology(**{"world_size": 4, **topology})  # type: ignore[arg-type]
    return Heading("ds.json", MODEL, ranks, 2, batch or RankBatch())


def test_the_tables_have_the_sums_of_each_stage_and_mark_the_configured_one() -> None:
    lines = printed([SECOND, THIRD], heading()).splitlines()

    rows = [" ".join(line.split()) for line in lines]
    assert rows[0] == "ds.json: a typical transformer of 7B parameters, 4 ranks (nccl)"
    assert rows[2:10] == [
        "Communication per rank and optimizer step",
        "stage collective dtype calls payload sent reference ratio",
        "2 <- all_reduce, gradients bf16 1,200 3.00 GiB 5.00 GiB",
        "all_gather, gradients in groups of 2 bf16 7 1.00 GiB 1.00 GiB",
        "total 1,207 4.00 GiB 6.00 GiB 4.00 GiB 1.50",
        "",
        "3 all_reduce, gradients bf16 1,200 3.00 GiB 5.00 GiB",
        "all_gather, gradients in groups of 2 bf16 7 1.00 GiB 1.00 GiB",
    ]
    assert rows[10] == "total (approximate) 1,207 4.00 GiB 6.00 GiB 0 B -"
    assert rows[12:16] == [
        "Memory per rank in training, without activations",
        "stage parameters gathered gradients optimizer comm buffers peak host NVMe",
        "2 <- 4.00 GiB 3.00 GiB 2.00 GiB 12.0 GiB 1.00 GiB 22.0 GiB - -",
        "3 4.00 GiB 3.00 GiB 2.00 GiB 12.0 GiB 1.00 GiB 23.0 GiB 6.00 GiB 8.00 GiB",
    ]
    remarks = " ".join(rows[16:])
    assert remarks == (
        "- The columns are not all present at once. The peak is at the start or the end of "
        "backward; at stage 3 it is in the optimizer's step, which copies gradients. "
        "- Activations are not included; add --sequence (tokens per sample) to include them.  "
        "Stage 2 (configured) - Gradients: reduced once. - A remark on the stage. "
        "- Between steps, 16.0 GiB stay on the device. - Calls and payload bytes are exact. "
        "- Assumed: no parameter is unused; each layer has one input.  "
        "Stage 3 - Gradients: reduced once."
    )


def test_figures_that_do_not_fit_in_the_usual_width_are_complete() -> None:
    sizes = dict.fromkeys(MEMORY.device_bytes, 100 * GIB)
    memory = replace(MEMORY, device_bytes=sizes, host_bytes=200 * GIB, nvme_bytes=300 * GIB)
    batch = RankBatch(samples=1, activations=Activations(tokens=8192, sample_bytes=400 * GIB))

    text = printed([replace(SECOND, memory=memory)], heading(batch))

    [row] = (line for line in text.splitlines() if line.count("GiB") == 9)
    assert len(row) > 98
    assert [figure.strip() for figure in row.split("GiB")][1:9] == [
        *["100.0"] * 4,
        *("400.0", "700.5", "200.0", "300.0"),
    ]


def test_a_single_stage_has_all_remarks_though_it_is_not_configured() -> None:
    text = " ".join(printed([THIRD], heading()).split())

    assert "Stage 3 - Gradients: reduced once. - A remark on the stage. - Between" in text
    assert "exact" not in text


@pytest.mark.parametrize(
    ("topology", "ranks"),
    [
        ({"world_size": 16, "backend": "gloo"}, "16 ranks (gloo)"),
        (
            {"world_size": 24, "tensor_parallel": 2, "pipeline_parallel": 3},
            "24 ranks (nccl) = 4 data x 2 tensor x 3 pipeline",
        ),
    ],
)
def test_the_title_has_the_kinds_of_parallelism(topology: dict[str, object], ranks: str) -> None:
    title = printed([SECOND], heading(**topology)).splitlines()[0]

    assert title == f"ds.json: a typical transformer of 7B parameters, {ranks}"


def test_activations_have_a_column_and_the_micro_batch_that_fits_is_named() -> None:
    recomputed = Activations(tokens=2048, sample_bytes=GIB // 4, fixed_bytes=GIB)
    activations = replace(recomputed, sample_bytes=2 * GIB, recomputed=recomputed)
    batch = RankBatch(samples=3, activations=activations, limit_bytes=40 * GIB)

    text = printed([SECOND], heading(batch))

    words = " ".join(text.split())
    assert "Memory per rank in training, micro-batches of 3 x 2,048 tokens" in words
    assert "comm buffers activations peak host" in words
    assert "1.00 GiB 7.00 GiB" in words
    assert (
        "- Activations assume flash attention, which stores no scores. - With activation" in words
    )
    assert "activation checkpointing of each layer, activations need 1.75 GiB." in words
    # 16 GiB are permanent, and forward adds 3.5 GiB: (40 - 19.5 - 1) / 2, and / 0.25.
    assert "Largest micro-batch (samples) that fits in 40.0 GiB: stage 2: 9." in words
    assert "With activation checkpointing of each layer: stage 2: 78." in words
    assert batch.activation_bytes == 7 * GIB


@pytest.mark.parametrize(("recomputed", "is_named"), [(None, False), (2 * GIB, False), (GIB, True)])
def test_recomputation_is_named_if_it_needs_less(recomputed: int | None, is_named: bool) -> None:
    smaller = None if recomputed is None else Activations(tokens=8, sample_bytes=recomputed)
    activations = Activations(tokens=8, sample_bytes=2 * GIB, recomputed=smaller)

    batch = RankBatch(samples=1, activations=activations, limit_bytes=40 * GIB)
    text = printed([SECOND], heading(batch))

    assert " ".join(text.split()).count("checkpointing of each layer") == 2 * is_named


def test_unknown_activations_are_a_question_mark_with_the_reason() -> None:
    batch = RankBatch(samples=3, unknown="not modeled with pipelines", limit_bytes=40 * GIB)

    words = " ".join(printed([SECOND], heading(batch)).split())

    assert "1.00 GiB ? 22.0 GiB -" in words
    assert "- Activations are unknown: not modeled with pipelines." in words
    assert "Largest" not in words
    assert "in training, without activations" in words

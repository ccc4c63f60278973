"""Tests of estimated memory, activations and peaks, against closed forms.

Covers `pinned_memory.py`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from scripts.estimator.estimate_cases import Decoder
from scripts.estimator.traffic_cases import deep

from zerowatch.runtime.estimator.ds_options import DsOptions
from zerowatch.runtime.estimator.estimate_step import estimate_step
from zerowatch.runtime.estimator.gradient_memory import _BucketedReduction
from zerowatch.runtime.estimator.model_memory import (
    Activations,
    MemoryEstimate,
    largest_micro_batch,
    peak_of,
)
from zerowatch.runtime.estimator.model_shape import (
    BufferShape,
    ModelShape,
    ModuleShape,
    ParameterShape,
    Topology,
)
from zerowatch.runtime.estimator.pinned_memory import pinned_size
from zerowatch.runtime.estimator.stage_0_to_2_traffic import _GradientReduction, flat_groups
from zerowatch.runtime.estimator.trace_activations import (
    LiveBytes,
    UnknownActivationsError,
    trace_activations,
)
from zerowatch.runtime.estimator.typical_model import typical_activations, typical_transformer

MIB = 2**20


def memory_of(
    zero: dict,
    *numels: int,
    frozen: tuple[int, ...] = (),
    ranks: int = 4,
    backend: str = "gloo",
    **config: object,
) -> MemoryEstimate:
    """Estimate a chain of layers of one parameter each, frozen ones last; in bf16 by default.

    The ranks run on CPU by default, where DeepSpeed pins no memory.
    """
    sizes = (*numels, *frozen)
    layers = tuple(ModuleShape(name=str(n), parameters=(n,)) for n in range(len(sizes)))
    parameters = tuple(
        ParameterShape(name=str(n), shape=(size,), requires_grad=n < len(numels))
        for n, size in enumerate(sizes)
    )
    model = ModelShape(parameters=parameters, root=ModuleShape(name="", children=layers))
    whole = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, **config}
    whole["zero_optimization"] = {"reduce_bucket_size": 100, **zero}
    return estimate_step(model, whole, Topology(world_size=ranks, backend=backend)).memory


def memory_estimate(**given: int) -> MemoryEstimate:
    """Return an estimate with these bytes; all others are 0."""
    categories = ("parameters", "gathered", "gradients", "optimizer", "comm_buffers")
    rest = ("step", "forward", "bucket", "resting", "host", "nvme")
    return MemoryEstimate(
        device_bytes={name: given.pop(name, 0) for name in categories},
        **{**{f"{name}_bytes": 0 for name in rest}, **given},
    )


def test_a_rank_keeps_complete_gradients_of_which_it_owns_a_slice():
    memory = memory_of({"stage": 2}, 1000, 200, ranks=4)

    assert memory.device_bytes["gradients"] == 2 * (1000 + 200)  # the last rank owns of both


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_enter_buckets_in_the_order_of_the_estimated_traffic(overlap):
    layers = tuple(ModuleShape(name=str(n), parameters=(n,)) for n in range(5))
    parameters = tuple(ParameterShape(name=str(n), shape=(10 + n,)) for n in range(5))
    model = ModelShape(parameters=parameters, root=ModuleShape(name="", children=layers))
    options = DsOptions(stage=1, round_robin_gradients=True, overlap_comm=overlap)
    groups = flat_groups(model, options, 2)

    in_memory = _BucketedReduction.of(model, groups, options, 4).order

    assert list(in_memory) == list(_GradientReduction.of(model, groups, options, 2).order)
    assert list(in_memory) == ([4, 3, 2, 1, 0] if overlap else [0, 1, 2, 3, 4])


def test_gradients_summed_in_fp32_are_kept_for_the_ranks_part_only():
    sums = {"data_types": {"grad_accum_dtype": "fp32"}}

    memory = memory_of({"stage": 2}, 1000, 200, ranks=4, **sums)

    assert memory.device_bytes["gradients"] == 4 * 300


def test_the_step_of_zero_copies_gradients_flat_and_then_to_fp32():
    memory = memory_of({"stage": 2}, *[100] * 8, ranks=4)

    assert memory.step_bytes == 2 * 200 + (2 + 4) * 200


def test_deepspeeds_fused_adam_without_zero_copies_gradients_to_fp32_twice():
    adam = {"optimizer": {"type": "AdamW"}}

    fused, own = (memory_of({"stage": 0}, 1000, **config).step_bytes for config in (adam, {}))

    assert (fused, own) == ((2 + 4 + 4) * 1000, (2 + 4) * 1000)


def test_buckets_are_allocated_in_full_and_twice_with_overlap_comm():
    zero = {"stage": 2, "reduce_bucket_size": 10**6}
    plain = memory_of(zero, 1000, backend="nccl")
    overlapped = memory_of({**zero, "overlap_comm": True}, 1000, backend="nccl")

    twice = overlapped.device_bytes["comm_buffers"] - plain.device_bytes["comm_buffers"]
    assert twice == 2 * 10**6


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("overlaps", [False, True])
def test_on_cpu_a_bucket_takes_no_more_memory_than_the_gradients_written_to_it(stage, overlaps):
    zero = {"stage": stage, "overlap_comm": overlaps}
    default, filled = (
        memory_of({**zero, "reduce_bucket_size": size}, 1000) for size in (500_000_000, 1000)
    )

    assert default.device_bytes["comm_buffers"] == filled.device_bytes["comm_buffers"]
    assert peak_of(default).device_bytes < 100_000


@pytest.mark.parametrize(("overlaps", "num_buckets"), [(False, 1), (True, 2)])
def test_on_cpu_buckets_that_a_model_fills_count_in_full(overlaps, num_buckets):
    zero = {"stage": 2, "overlap_comm": overlaps, "reduce_bucket_size": 1000}

    on_gpu, on_cpu = (memory_of(zero, *[1000] * 4, backend=name) for name in ("nccl", "gloo"))

    assert on_cpu.bucket_bytes == on_gpu.bucket_bytes == num_buckets * 1000 * 2


def test_a_prefetch_of_several_parameters_needs_an_additional_buffer():
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}

    together = memory_of(zero, 1000, 1000).device_bytes["gathered"]
    alone = memory_of({**zero, "stage3_prefetch_bucket_size": 0}, 1000, 1000)

    assert together == 2 * 2 * 2000
    assert alone.device_bytes["gathered"] == 2 * 2000


def mixed(frozen_dtype: str, trained_dtype: str = "fp32") -> ModelShape:
    """Return a trained layer of 1000 elements, and a frozen one of 4000."""
    parameters = (
        ParameterShape(name="0", shape=(1000,), dtype=trained_dtype),
        ParameterShape(name="1", shape=(4000,), dtype=frozen_dtype, requires_grad=False),
    )
    layers = tuple(ModuleShape(name=str(n), parameters=(n,)) for n in range(2))
    return ModelShape(parameters=parameters, root=ModuleShape(name="", children=layers))


@pytest.mark.parametrize(
    ("frozen", "trained", "in_bf16", "parameters", "gradients"),
    [
        ("bf16", "fp32", False, 4 * 1000 + 2 * 4000, 4 * 1000),
        ("fp32", "bf16", False, 2 * 1000 + 4 * 4000, 2 * 1000),
        ("fp32", "fp32", True, 2 * 1000 + 2 * 4000, 2 * 1000),
        ("uint8", "fp32", True, 2 * 1000 + 4000, 2 * 1000),
    ],
)
def test_frozen_parameters_have_their_own_width(frozen, trained, in_bf16, parameters, gradients):
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": in_bf16}}

    memories = [
        estimate_step(mixed(frozen, trained), config, Topology(world_size=2), stage=stage).memory
        for stage in (0, 3)
    ]

    assert [memory.device_bytes["parameters"] for memory in memories] == [
        parameters,
        parameters // 2,
    ]
    assert memories[0].device_bytes["gradients"] == gradients
    assert memories[1].resting_bytes - memories[1].forward_bytes == (
        memories[1].device_bytes["optimizer"] + parameters // 2 + parameters  # all persistent
    )


HPZ = {"stage": 3, "stage3_param_persistence_threshold": 10, "stage3_prefetch_bucket_size": 0}


def test_hpz_keeps_a_secondary_partition_from_the_first_release_to_the_end_of_the_step():
    plain, hpz = (
        memory_of({**HPZ, "zero_hpz_partition_size": size}, 1000, 998, 10, ranks=4)
        for size in (1, 2)
    )

    released, persistent = 2 * (500 + 500), 2 * 6  # padded to the ranks: 1000, 1000 and 12
    assert hpz.device_bytes["gathered"] - plain.device_bytes["gathered"] == released
    assert hpz.step_bytes - plain.step_bytes == released + persistent
    assert hpz.resting_bytes == plain.resting_bytes


def test_hpz_keeps_the_secondary_partition_of_frozen_parameters_between_steps():
    plain, hpz = (
        memory_of({**HPZ, "zero_hpz_partition_size": size}, 1000, frozen=(400, 10), ranks=4)
        for size in (1, 2)
    )

    kept = 2 * (200 + 6)
    assert hpz.resting_bytes - plain.resting_bytes == kept
    assert hpz.device_bytes["parameters"] - plain.device_bytes["parameters"] == kept
    assert hpz.step_bytes - plain.step_bytes == 2 * 500


def test_hpz_has_secondary_partitions_on_the_host_if_parameters_are_offloaded():
    zero = {**HPZ, "offload_param": {"device": "cpu"}}

    plain, hpz = (
        memory_of({**zero, "zero_hpz_partition_size": size}, 1000, frozen=(400,), ranks=4)
        for size in (1, 2)
    )

    assert hpz.host_bytes - plain.host_bytes == 2 * (500 + 200)
    assert hpz.device_bytes == plain.device_bytes


def test_offloading_keeps_gradients_and_a_copy_of_the_weights_on_the_host():
    memory = memory_of({"stage": 2, "offload_optimizer": {"device": "cpu"}}, *[100] * 8, ranks=4)

    states, gradients, weights, buffer = 12 * 200, 4 * 200, 2 * 200, 2 * 100
    assert memory.host_bytes == states + gradients + weights + buffer


@pytest.mark.parametrize(
    ("given", "pinned"), [(0, 0), (1, 1), (3, 4), (2048, 2048), (2049, 4096), (2**33 + 1, 2**34)]
)
def test_a_pinned_tensor_has_the_next_power_of_two_of_bytes(given, pinned):
    assert pinned_size(given) == pinned


PINNED = {"device": "cpu"}
PAGEABLE = {"device": "cpu", "pin_memory": False}


# In bf16, and by ranks with a GPU: torch rounds each pinned tensor up to a power of two.
@pytest.mark.parametrize(
    ("stage", "numels", "config", "host"),
    [
        # Master weights and gradients of 300 elements in fp32, their copy in bf16, and a buffer
        # of the largest gradient are pinned; two states are not.
        (2, (1000, 200), {}, 2 * 2048 + 1024 + 2048 + 2 * 1200),
        (1, (1000, 200), {}, 2 * 2048 + 1024 + 2048 + 2 * 1200),
        # The gradients of all sub-groups in bf16, and one of each sub-group in fp32 are pinned.
        (3, (1000, 200), {}, 1024 + 2048 + 3 * 1200),
        (3, (400, 400, 400), {"sub_group_size": 150}, 1024 + 1024 + 512 + 3 * 1200),
    ],
)
def test_pinned_tensors_of_an_offloaded_optimizer_have_a_power_of_two_of_bytes(
    stage, numels, config, host
):
    zero = {"stage": stage, **config}

    pinned, pageable = (
        memory_of({**zero, "offload_optimizer": place}, *numels, backend="nccl")
        for place in (PINNED, PAGEABLE)
    )
    on_cpu = memory_of({**zero, "offload_optimizer": PINNED}, *numels)

    assert pinned.host_bytes == host
    assert pageable == on_cpu
    assert pageable.host_bytes < host


@pytest.mark.parametrize(
    ("place", "zero", "host"),
    [
        # The flat tensor, and each partition: those of trained parameters were copied to it.
        (PINNED, {}, 1024 + (512 + 128) + (512 + 16)),
        # Without pin_memory only the flat tensor is pinned.
        (PAGEABLE, {}, 1024 + 2 * (250 + 8)),
        # With hpZ there is a secondary partition of each parameter, too.
        (
            PINNED,
            {"zero_hpz_partition_size": 2},
            1024 + (512 + 128) + (512 + 16) + (1024 + 256) + (1024 + 32),
        ),
        # If secondary partitions have the sizes of the copied ones, they reuse their memory.
        (PINNED, {"zero_hpz_partition_size": 4}, 1024 + (512 + 128) + (512 + 16) + (512 + 16)),
    ],
)
def test_pinned_tensors_of_offloaded_parameters_have_a_power_of_two_of_bytes(place, zero, host):
    zero = {"stage": 3, "offload_param": place, **zero}

    memory = memory_of(zero, 1000, 200, frozen=(1000, 30), backend="nccl")

    assert memory.host_bytes == host


def test_pinned_gradients_of_several_micro_batches_have_a_power_of_two_of_bytes():
    zero = {"stage": 2, "offload_optimizer": PINNED}

    memory = memory_of(zero, 1000, 200, backend="nccl")

    assert memory.accumulated_host_bytes == 2048 + 512  # the last rank owns slices of both


@pytest.mark.parametrize(("distance", "numel"), [(0, 1000), (2001, 2000), (10**6, 8000)])
def test_a_single_rank_has_the_offloaded_parameters_on_the_device_that_it_fetched(distance, numel):
    zero = {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": distance,
        "stage3_prefetch_bucket_size": 0,
    }

    memory, on_cpu = (
        memory_of(zero, *[1000] * 8, ranks=1, backend=backend) for backend in ("nccl", "gloo")
    )

    assert memory.device_bytes["parameters"] == 0
    assert memory.device_bytes["gathered"] == 2 * numel
    assert on_cpu.device_bytes["gathered"] == 0  # it uses those in CPU memory


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_buffers_of_the_model_are_on_each_rank_in_full(stage):
    buffers = (BufferShape(numel=100, width=4), BufferShape(numel=7, width=8, is_float=False))
    model = mixed("fp32")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"offload_param": {"device": "cpu"}},
    }

    without, with_buffers = (
        estimate_step(each, config, Topology(world_size=2), stage=stage).memory
        for each in (model, replace(model, buffers=buffers))
    )

    added = 2 * 100 + 8 * 7
    parameters = without.device_bytes["parameters"]
    assert with_buffers.device_bytes["parameters"] == parameters + added
    assert with_buffers.resting_bytes == without.resting_bytes + added
    assert with_buffers.host_bytes == without.host_bytes


MILLION, NUMEL = 2**20, 8 * 2**20  # eight layers of a million elements
NVME, CPU = {"device": "nvme"}, {"device": "cpu"}
TWO_EACH = {"sub_group_size": 2 * MILLION}
SMALL_BUFFERS = {"buffer_count": 9, "buffer_size": 2 * MILLION}


# Each was also measured on an engine of one rank.
@pytest.mark.parametrize(
    ("zero", "host", "nvme"),
    [
        # Four buffers of a sub-group in fp32, and gradients in bf16.
        ({"offload_optimizer": NVME}, 4 * NUMEL * 4 + NUMEL * 2, 16 * NUMEL),
        (
            {"offload_optimizer": {**NVME, "buffer_count": 5}, **TWO_EACH},
            5 * 2 * MILLION * 4 + NUMEL * 2,
            16 * NUMEL,
        ),
        # Parameters have buffers too, and all of them stay in CPU memory.
        (
            {"offload_optimizer": NVME, "offload_param": NVME | SMALL_BUFFERS},
            4 * NUMEL * 4 + NUMEL * 2 + 9 * 2 * MILLION * 2 + NUMEL * 2,
            16 * NUMEL + 2 * NUMEL,
        ),
        # Three of the eight layers stay there, and a buffer of a sub-group swaps the others.
        (
            {
                "offload_optimizer": NVME,
                "offload_param": {**NVME, **SMALL_BUFFERS, "max_in_cpu": 3 * MILLION},
                **TWO_EACH,
            },
            4 * 2 * MILLION * 4 + NUMEL * 2 + (9 * 2 + 3 + 2) * MILLION * 2,
            16 * NUMEL + 2 * NUMEL,
        ),
        ({"offload_optimizer": CPU}, 12 * NUMEL + 4 * NUMEL + 2 * NUMEL, 0),
    ],
)
def test_offloading_to_nvme_needs_buffers_on_the_host(zero, host, nvme):
    memory = memory_of({"stage": 3, **zero}, *[MILLION] * 8, ranks=1)

    assert (memory.host_bytes, memory.nvme_bytes) == (host, nvme)
    assert memory.device_bytes["optimizer"] == memory.device_bytes["gradients"] == 0


def test_gradients_too_small_for_nvme_stay_on_the_device_until_the_step():
    zero = {"stage": 3, "offload_optimizer": NVME}

    memory = memory_of(zero, MILLION, MILLION // 4, MILLION // 16, ranks=1)

    unswapped, numel = MILLION // 16, MILLION + MILLION // 4 + MILLION // 16
    assert memory.device_bytes["gradients"] == 4 * unswapped
    assert memory.nvme_bytes == 16 * numel - 4 * unswapped
    assert memory.step_bytes - memory.forward_bytes == 4 * unswapped


def test_below_stage_3_nvme_is_the_host():
    on_nvme, on_host = (
        memory_of({"stage": 2, "offload_optimizer": place}, *[MILLION] * 8) for place in (NVME, CPU)
    )

    assert on_nvme == on_host
    assert on_nvme.nvme_bytes == 0


@pytest.mark.parametrize(("sub_group_size", "on_device"), [(NUMEL, 0), (MILLION, 5)])
def test_a_ratio_moves_whole_sub_groups_of_stage_3(sub_group_size, on_device):
    zero = {
        "stage": 3,
        "sub_group_size": sub_group_size,
        "offload_optimizer": {"device": "cpu", "ratio": 0.3},
    }

    memory = memory_of(zero, *[MILLION] * 8, ranks=1)

    assert memory.device_bytes["optimizer"] == on_device * 12 * MILLION
    assert memory.device_bytes["gradients"] == on_device * 4 * MILLION
    assert memory.host_bytes == (8 - on_device) * (12 + 4) * MILLION + 2 * NUMEL


def test_the_peak_is_at_an_end_of_backward_or_in_the_step():
    memory = memory_estimate(parameters=10, gradients=5, step_bytes=7, optimizer=100)

    activations = Activations(tokens=1, sample_bytes=20)

    peaks = [peak_of(memory, activations=activations, samples=samples) for samples in (0, 1)]

    assert [(peak.device_bytes, peak.moment) for peak in peaks] == [(117, "step"), (130, "forward")]


@pytest.mark.parametrize(
    ("loss_bytes", "peak"), [(5, (22, "backward")), (7, (20, "forward")), (-1, (28, "backward"))]
)
def test_buckets_are_allocated_at_the_first_gradient_when_the_loss_is_freed(loss_bytes, peak):
    memory = memory_estimate(comm_buffers=7, bucket_bytes=7)
    activations = Activations(tokens=1, sample_bytes=20, loss_sample_bytes=loss_bytes)

    found = peak_of(memory, activations=activations, samples=1)

    assert (found.device_bytes, found.moment) == peak


def test_gradients_of_earlier_micro_batches_stay_while_activations_grow():
    memory = memory_estimate(gradients=5, accumulated_forward_bytes=5)
    activations = Activations(tokens=1, sample_bytes=20)

    peaks = [peak_of(memory, micro_batches=n, activations=activations, samples=1) for n in (1, 2)]

    assert [peak.device_bytes for peak in peaks] == [20, 25]


@pytest.mark.parametrize(("limit", "samples"), [(9, 0), (10, 0), (17, 1), (18, 2), (1000, 142)])
def test_the_largest_micro_batch_is_the_last_that_fits(limit, samples):
    activations = Activations(tokens=1, sample_bytes=7, fixed_bytes=1)

    assert largest_micro_batch(memory_estimate(parameters=3), activations, limit) == samples


def test_typical_activations_follow_the_paper_without_dropout_but_with_flash_attention():
    model = typical_transformer(10**9)
    layers = [p for p in model.parameters if p.name.endswith("qkv")]
    width = layers[0].shape[1]

    taken = typical_activations(model, DsOptions(stage=0, model_dtype="bf16"), 2048).sample_bytes

    stored = len(layers) * 2048 * width * 32
    logits = 2048 * 32_000 * 14
    assert taken == pytest.approx(stored + logits, rel=0.01)


def test_recomputed_layers_keep_one_input_each():
    model = typical_transformer(10**9)

    taken = typical_activations(model, DsOptions(stage=0, model_dtype="bf16"), 2048)

    recomputed = taken.recomputed
    assert recomputed is not None and recomputed.tokens == 2048
    assert recomputed.sample_bytes < taken.sample_bytes / 2


@pytest.mark.parametrize("recompute", [False, True])
def test_a_traced_pass_needs_the_memory_of_a_real_pass(recompute):
    model = Decoder(101, 32, 2, recompute=recompute)

    traced = trace_activations(model, None, samples=3, tokens=16)

    assert traced.bytes_of(3) == pytest.approx(real_peak(model, 3, 16), rel=0.01)


def test_a_traced_pass_has_the_peak_of_a_real_pass_from_the_first_gradient_on():
    model, live_bytes = Decoder(101, 32, 2), LiveBytes()
    model.head.weight.register_post_accumulate_grad_hook(
        lambda _: setattr(live_bytes, "peak", live_bytes.live)
    )

    traced = trace_activations(model, None, samples=3, tokens=16)

    later = real_peak(model, 3, 16, live_bytes)
    assert traced.bytes_of(3) - traced.loss_bytes_of(3) == pytest.approx(later, rel=0.01)
    assert traced.loss_bytes_of(3) > 0


def real_peak(
    model: Decoder, samples: int, tokens: int, live_bytes: LiveBytes | None = None
) -> int:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda it: setattr(it, "grad", None))
    live_bytes = live_bytes or LiveBytes()
    with live_bytes:
        ids = torch.zeros(samples, tokens, dtype=torch.long)
        logits = model(ids)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    return live_bytes.peak


class Attention(torch.nn.Module):
    """Takes token ids; v may have another width than q and k."""

    def __init__(self, dropout: float, width: int = 16) -> None:
        super().__init__()
        self.dropout, self.sizes = dropout, (16, 16, width)
        self.words, self.qkv = torch.nn.Embedding(11, 32), torch.nn.Linear(32, 32 + width)
        self.head = torch.nn.Linear(width, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.words(ids)).unsqueeze(1).split(self.sizes, -1)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout, is_causal=True
        )
        return self.head(mixed.squeeze(1))


@pytest.mark.parametrize("width", [16, 8])
def test_attention_with_dropout_stores_no_scores_as_on_a_gpu(width):
    plain, dropped = (
        trace_activations(Attention(dropout, width), "bf16", samples=2, tokens=512)
        for dropout in (0.0, 0.1)
    )

    assert dropped == plain


@pytest.mark.parametrize("width", [8, 24])
def test_attention_whose_value_has_another_width_stores_no_scores_as_on_a_gpu(width):
    per_token = [
        trace_activations(Attention(0.0, width), "bf16", samples=1, tokens=n).sample_bytes / n
        for n in (256, 1024)
    ]

    assert per_token[1] == pytest.approx(per_token[0], rel=0.01)


def test_dropout_in_a_layer_of_torch_stores_masks_and_no_scores():
    def layer(dropout: float, in_attention: float) -> torch.nn.Module:
        inner = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=dropout, batch_first=True)
        inner.self_attn.dropout = in_attention
        return torch.nn.Sequential(torch.nn.Embedding(11, 32), inner, torch.nn.Linear(32, 11))

    plain, outside, everywhere = (
        trace_activations(layer(*dropout), "bf16", samples=1, tokens=256)
        for dropout in ((0.0, 0.0), (0.1, 0.0), (0.1, 0.1))
    )

    assert plain.sample_bytes < outside.sample_bytes
    assert everywhere == outside


class FailingAttention(Attention):
    """Fails after attention."""

    error: BaseException = ValueError("no")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        super().forward(ids)
        raise self.error


class InterruptedAttention(FailingAttention):
    """Is interrupted after attention."""

    error = KeyboardInterrupt()


@pytest.mark.parametrize("model", [Attention, FailingAttention, InterruptedAttention])
def test_a_trace_leaves_the_attention_of_torch_as_it_was(model):
    with suppress(UnknownActivationsError, KeyboardInterrupt):
        trace_activations(model(0.1), None, samples=1, tokens=8)

    ones = torch.ones(1, 1, 8, 8, requires_grad=True, device="cpu")
    dropped = torch.nn.functional.scaled_dot_product_attention(ones, ones, ones, dropout_p=0.5)
    assert not dropped.allclose(ones)


def test_a_model_on_the_meta_device_is_traced_without_memory():
    with torch.device("meta"):
        model = Decoder(50_000, 1024, 4)

    traced = trace_activations(model, "bf16", samples=4, tokens=512)

    assert traced.bytes_of(4) > 4 * 512 * 50_000 * 14
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_model_that_takes_no_token_ids_raises():
    with pytest.raises(UnknownActivationsError, match="RuntimeError: "):
        trace_activations(deep(), None, samples=1, tokens=7)


def test_live_bytes_drop_freed_storages_and_keep_the_peak():
    live_bytes = LiveBytes()

    with live_bytes:
        kept = torch.zeros(MIB, dtype=torch.uint8)
        view = kept[:10]
        torch.zeros(2 * MIB, dtype=torch.uint8)

    assert (live_bytes.live, live_bytes.peak) == (MIB, 3 * MIB)
    assert len(view) == 10

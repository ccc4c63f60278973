"""Every private name of DeepSpeed that the codec leans on, by where it stands."""

from __future__ import annotations

from collections.abc import Mapping

from .deepspeed_internals import BF16, ENGINE, ZERO_1_AND_2, ZERO_3

PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    ENGINE: (
        "_reduce_non_expert_gradients",
        "allreduce_bucket",
        "gradient_average",
        "has_moe_layers",
        "seq_data_parallel_group",
        "sequence_parallel_size",
    ),
    ZERO_1_AND_2: (
        "allreduce_and_copy",
        "allreduce_and_copy_with_multiple_ranks",
        "allreduce_bucket",
        "average_tensor",
        "bit16_groups",
        "contiguous_gradients",
        "dp_process_group",
        "extra_large_param_to_reduce",
        "get_gradient_for_reduction",
        "gradient_average",
        "gradient_reduction_w_predivide",
        "ipg_buckets",
        "overlap_comm",
        "reduce_bucket_size",
        "reduce_ipg_grads",
        "reduce_scatter",
    ),
    ZERO_3: (
        "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads",
        "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
        "_get_param_partition_group",
        "all2all_process_group",
        "gradient_accumulation_dtype",
        "ipg_buckets",
    ),
    BF16: ("bf16_groups", "fp32_groups_gradients", "fp32_groups_gradients_flat"),
}

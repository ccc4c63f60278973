"""What a plan does not know, and what it takes for granted, in words."""

from __future__ import annotations

from .buckets import fill_buckets
from .options import Options
from .shapes import ModelShape, Topology
from .stage_1_and_2 import gradients_as_they_come

ALL_USED = "every trainable parameter gets a gradient in every micro-batch"
AS_MANY = "the script runs gradient_accumulation_steps micro-batches for each step"
IN_ORDER = "each module runs once per micro-batch, in the order in which it is registered"
NO_RECOMPUTATION = "activations are not recomputed: checkpointing gathers parameters once more"


def unknowns(model: ModelShape, options: Options, topology: Topology) -> list[str]:
    """Say what makes the plan inexact, if anything."""
    faults = [f"{feature} is on, which is not planned" for feature in options.unmodelled]
    faults += model.unknowns + (model.stage_3_unknowns if options.stage == 3 else ())
    if options.stage == 3 and (model.recomputes or options.activation_checkpointing):
        faults.append("activations are recomputed, which gathers parameters once more in backward")
    if model.invented:
        faults.append(
            "the parameters are those of a typical transformer of this size, so bytes are right "
            "to its total and calls are approximate; --model gives the real ones"
        )
    if topology.tensor_parallel > 1 or topology.pipeline_parallel > 1:
        faults.append(
            "parameters are divided evenly over tensor and pipeline ranks, and the collectives of "
            "those two are not planned"
        )
    return [f"Not exact: {fault}." for fault in faults]


def assumptions(model: ModelShape, options: Options) -> tuple[str, ...]:
    """Say what the plan takes for granted, where another truth would change it."""
    taken = []
    if options.stage > 0:
        taken.append(ALL_USED)
    if not options.managed_accumulation:
        taken.append(AS_MANY)
    if options.stage == 3 and model.recomputes is None and not options.activation_checkpointing:
        taken.append(NO_RECOMPUTATION)
    if not model.order_known and (options.stage == 3 or _order_matters(model, options)):
        taken.append(IN_ORDER)
    return tuple(taken)


def _order_matters(model: ModelShape, options: Options) -> bool:
    """Tell whether gradients fill more than one bucket, which their order then cuts."""
    if options.stage == 0 or options.uses_bf16_optimizer or not gradients_as_they_come(options):
        return False
    sizes = {index: parameter.numel for index, parameter in enumerate(model.parameters)}
    return len(fill_buckets(model.gradient_order(), sizes, options.reduce_bucket_size)) > 1

"""Computes the FLOPs of a training step from the model's size and the number of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ...metrics.catalog import training
from ...metrics.recorder import Recorder
from ...metrics.settings import FlopsSettings
from ..common import accelerator
from ..common.torch_engine import TorchEngine
from ..devices.device_probes import peak_flops_per_second
from .raw_step import StepCounts

# The usual names of these sizes in a model's config. The first name with an int value is used.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
# The parts of a model's config that describe encoders of images and sound.
_FEATURE_CONFIGS = ("vision_config", "audio_config", "image_config")
# Dimensions of a device mesh on which each rank multiplies by its own part of a weight. On others,
# as those of FSDP, a rank stores a part and multiplies by the whole weight.
_TENSOR_DIMENSIONS = {"tp", "tensor", "tensor_parallel", "model"}
# The `quant_method` of quantized models whose parameters have the shapes of the whole weights, or
# say what these were. Others pack several weights into one element, or hold them in buffers.
_METHODS_WITH_SHAPES = ("bitsandbytes", "fbgemm_fp8", "fp8", "quanto", "torchao")


class FlopsCounter:
    """Computes the FLOPs of steps of one model, without holding a reference to the model."""

    def __init__(self, terms: FlopsTerms | None) -> None:
        self._terms = terms

    def __call__(self, counts: StepCounts) -> float | None:
        """Return a step's FLOPs. None if the formula or the number of tokens is unknown."""
        if self._terms is None or counts.tokens is None:
            return None
        return self._terms.per_token(counts.sequence_length) * counts.tokens


def flops_counter(engine: Any, method: Literal["analytic", "off"]) -> FlopsCounter:
    """Return the FLOPs counter of an engine's model. `method` is the setting `flops.method`."""
    if method == "off":
        return FlopsCounter(None)
    return FlopsCounter(flops_terms(engine.module, _sequence_parallel_size(engine)))


def publish_peak(
    settings: FlopsSettings, recorder: Recorder, *, device_index: int | None
) -> float | None:
    """Publish and return the peak FLOP/s of this rank's device. Return None if it is unknown."""
    peak = settings.peak_per_second
    if peak is None and settings.method != "off":
        peak = peak_flops_per_second(device_index=device_index)
    if peak is not None:
        device = "cpu" if device_index is None else f"{accelerator.current.kind}:{device_index}"
        recorder.set(training.PEAK_FLOPS, peak, device)
    return peak


@dataclass(frozen=True, slots=True)
class FlopsTerms:
    """The terms of the formula for one model.

    Attributes:
        weights: FLOPs per token for the parameters.
        attention: FLOPs per token for each token of its sequence that this rank has.
    """

    weights: int
    attention: int

    def per_token(self, sequence_length: int | None) -> float:
        """Return the FLOPs of one token in a sequence of this length."""
        return float(self.weights + self.attention * (sequence_length or 0))


def flops_terms(model: torch.nn.Module, sequence_parallel_size: int = 1) -> FlopsTerms | None:
    """Count forward and backward of one token, by PaLM's formula (arXiv 2204.02311, appendix B).

    The formula is 6 N + 12 L W T FLOPs per token. N is the number of parameters that multiply the
    token, L the number of layers, W the width of all attention heads together, and T the sequence
    length.

    N excludes embedding tables, because a token only looks up a row. A table that is also the
    output projection counts once. A frozen parameter has no weight gradient, so its factor is 4
    instead of 6. Below the first trained layer, the true factor is 2. Causal attention needs half
    of the second term, and a sliding window needs less. By convention full attention is counted, so
    figures can be compared. Recomputed activations are not counted.

    Args:
        model: A model whose `config` names its layers and hidden size. Under ZeRO-3 and FSDP the
            whole parameters count, not the shards.
        sequence_parallel_size: Number of ranks that have a part of each sequence. A token attends
            to the parts of all of them.

    Returns:
        The terms, or None if the formula does not describe the model. Examples are a model without
        such a config, an encoder with a decoder, a model of images or sound, or of text and these
        without a language model, a mixture of experts, tensor parallelism, and quantized weights of
        unknown shape.
    """
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    layers, hidden = _whole_number(config, _LAYERS), _whole_number(config, _HIDDEN)
    if layers is None or hidden is None or _is_another_kind(model, config):
        return None
    weights = sum(
        numel * (6 if is_trained else 4) for numel, is_trained in _multiplied_weights(model)
    )
    attention = 12 * layers * _attention_width(config, hidden) * sequence_parallel_size
    return FlopsTerms(weights, attention)


def _sequence_parallel_size(engine: Any) -> int:
    if isinstance(engine, TorchEngine):
        roles = engine.group_roles()  # several meshes may have the same dimension
        sizes = {group.group_desc: group.size() for group, role in roles if role == "sp"}
        return math.prod(sizes.values())
    size: int = getattr(engine, "sequence_parallel_size", 1)
    return size


def _whole_number(config: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _is_another_kind(model: torch.nn.Module, config: Any) -> bool:
    if getattr(config, "is_encoder_decoder", False) or _is_of_features(model):
        return True
    has_experts = any("experts" in name.split(".") for name, _ in model.named_modules())
    return has_experts or _is_tensor_parallel(model) or _hides_shapes(model)


def _is_of_features(model: torch.nn.Module) -> bool:
    """Return whether most work of a model of transformers may be done on something else than text.

    So it is with two encoders, one of text and one of features. A language model of text and images
    has a token for each part of an image.
    """
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        return True
    parts = [getattr(model.config, name, None) for name in ("text_config", *_FEATURE_CONFIGS)]
    has_both = parts[0] is not None and any(part is not None for part in parts[1:])
    can_generate = getattr(model, "can_generate", None)
    return has_both and not (callable(can_generate) and can_generate())


def _hides_shapes(model: torch.nn.Module) -> bool:
    """Return whether the model is quantized so that parameters do not show how many weights."""
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is None:
        return False
    if list(_flat_parameters(model)):
        return True
    if isinstance(quantization, dict):
        return quantization.get("quant_method") not in _METHODS_WITH_SHAPES
    return getattr(quantization, "quant_method", None) not in _METHODS_WITH_SHAPES


def _is_tensor_parallel(model: torch.nn.Module) -> bool:
    """Return whether each rank multiplies by a part of the weights.

    The FLOPs of a rank are then unknown: which operations are split depends on the plan.
    """
    modules = list(model.modules())
    sizes = [getattr(module, "tp_world_size", 1) for module in modules]  # of DeepSpeed's AutoTP
    sizes.append(getattr(model, "_tp_size", 1))  # of transformers
    if any(isinstance(size, int) and size > 1 for size in sizes):
        return True
    # `fully_shard` makes each module an FSDPModule. Its own mesh has no names.
    is_fsdp = any(kind.__name__ == "FSDPModule" for each in modules for kind in type(each).__mro__)
    split = {name for parameter in model.parameters() for name in _split_dimensions(parameter)}
    return bool(split & _TENSOR_DIMENSIONS) or (None in split and not is_fsdp)


def _split_dimensions(parameter: Any) -> Iterator[str | None]:
    """Yield the names of the mesh dimensions that a DTensor is split over; None without a name."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is not None:
        names = mesh.mesh_dim_names or (None,) * mesh.ndim
        for name, placement in zip(names, parameter.placements, strict=True):
            if not placement.is_replicate():
                yield name


def _attention_width(config: Any, hidden: int) -> int:
    """Return heads times head size. In some models this differs from the hidden size."""
    heads, head_size = _whole_number(config, _HEADS), _whole_number(config, ("head_dim",))
    return hidden if heads is None or head_size is None else heads * head_size


def _multiplied_weights(model: torch.nn.Module) -> Iterator[tuple[int, bool]]:
    """Yield the size of each parameter, and whether it is trained.

    Embedding tables that are only looked up are left out.
    """
    flat_ids, flat_places = set(), set()
    for flat in _flat_parameters(model):
        flat_ids.add(id(flat))
        for places, numel, is_trained in _parameters_within(flat):
            flat_places |= {(id(module), name) for module, name in places}
            if not all(isinstance(module, torch.nn.Embedding) for module, _ in places):
                yield numel, is_trained
    multiplied = {
        id(parameter): parameter
        for module in model.modules()
        if not isinstance(module, torch.nn.Embedding)
        for name, parameter in module.named_parameters(recurse=False)
        if id(parameter) not in flat_ids and (id(module), name) not in flat_places
    }
    for parameter in multiplied.values():
        yield _numel(parameter), parameter.requires_grad


def _flat_parameters(model: torch.nn.Module) -> Iterator[Any]:
    """Yield what FullyShardedDataParallel (FSDP1) replaces the parameters of modules by."""
    for module in model.modules():
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            handle: Any = getattr(module, "_handle", None)
            if handle is not None:  # it has parameters
                yield handle.flat_param


def _parameters_within(flat: Any) -> Iterator[tuple[list[tuple[torch.nn.Module, str]], int, bool]]:
    """Yield the places, the size and whether it is trained, of each parameter in a flat one."""
    # The parameters themselves exist with `use_orig_params` only.
    trained = [each.requires_grad for each in flat._params or [flat] * flat._num_params]
    for info, numel, is_trained in zip(flat._param_infos, flat._numels, trained, strict=True):
        place = (info.module, info.param_name)
        shared = [
            (each.module, each.param_name)
            for each in flat._shared_param_infos
            if (each.prim_module, each.prim_param_name) == place
        ]
        yield [place, *shared], numel, is_trained


def _numel(parameter: torch.nn.Parameter) -> int:
    packed = getattr(parameter, "quant_state", None)  # of bitsandbytes: two weights in a byte
    if packed is not None:
        return math.prod(packed.shape)
    whole: int | None = getattr(parameter, "ds_numel", None)  # ZeRO-3 leaves an empty tensor behind
    return parameter.numel() if whole is None else whole

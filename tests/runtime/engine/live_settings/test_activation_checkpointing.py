"""Tests of activation checkpointing: selected modules, and their forward with and without it."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from zerowatch.errors import ZerowatchError
from zerowatch.runtime.engine.live_settings.activation_checkpointing import (
    ActivationCheckpointing,
    checkpoint_forward,
    checkpoints_activations,
    choose_modules,
)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.drop = nn.Dropout(0.5)
        self.out = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.out(self.drop(self.attention(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.stem = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for each in [*self.stem, *self.layers]:
            x = each(x)
        return x.square().mean()


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    torch.manual_seed(seed)


def engine_of(model: nn.Module) -> SimpleNamespace:
    return SimpleNamespace(module=model, optimizer=None)


def gradients(model: nn.Module, *inputs: Any, **named: Any) -> list[torch.Tensor]:
    model.zero_grad()
    with torch.random.fork_rng():  # each call draws the same dropout
        output = model(*inputs, **named)
        (output if isinstance(output, torch.Tensor) else output.loss).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["layers.0", "layers.1", "layers.2"]),
        ("layers.[02]", ["layers.0", "layers.2"]),
        ("Attention", [f"layers.{i}.attention" for i in range(3)]),
        (Attention, [f"layers.{i}.attention" for i in range(3)]),
        ([Attention, "layers.1"], ["layers.0.attention", "layers.1", "layers.2.attention"]),
        ("*", ["embed", "stem", "layers"]),
    ],
)
def test_modules_are_selected_by_class_name_or_pattern_without_nested_ones(chosen, names):
    assert sorted(choose_modules(Model(), chosen)) == sorted(names)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("layer.*", r"'layer\.\*'; close are .*'layers"),
        ("Layr", "'Layr'; close are .*'Layer'"),
        (nn.Conv2d, "class 'Conv2d'; "),
        ("quite another", "there are 'Linear', "),
        ([], "empty"),
    ],
)
def test_a_selector_without_matches_is_named_with_close_names(chosen, message):
    with pytest.raises(ZerowatchError, match=message):
        ActivationCheckpointing(chosen).attach(engine_of(Model()))


def test_a_model_without_repeated_blocks_needs_a_selector():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

    with pytest.raises(ZerowatchError, match=r"Sequential has no .* of several equal blocks"):
        ActivationCheckpointing().attach(engine_of(model))


@pytest.mark.parametrize("chosen", [None, "layers.1", Attention, "embed", "*"])
def test_gradients_are_bitwise_equal_with_the_same_random_numbers(chosen):
    model, x = Model(), torch.randn(5, 4)
    expected = gradients(model, x)

    undo = ActivationCheckpointing(chosen).attach(engine_of(model))
    actual = gradients(model, x)
    undo()
    after = gradients(model, x)

    assert all(map(torch.equal, actual, expected))
    assert all(map(torch.equal, after, expected))


def test_forward_is_recomputed_only_while_training_with_gradients():
    model, x = Model(), torch.randn(5, 4)
    undo = ActivationCheckpointing().attach(engine_of(model))
    layer = model.layers[0]

    gradients(model, x)
    twice, layer.calls = layer.calls, 0
    with torch.no_grad():
        model(x)
    gradients(model.eval(), x)
    twice_once, layer.calls = layer.calls, 0
    undo()
    gradients(model.train(), x)

    assert (twice, twice_once, layer.calls) == (2, 2, 1)


def test_a_model_tells_whether_its_activations_are_recomputed():
    model, other = Model(), Model()
    undo = ActivationCheckpointing("layers.1").attach(engine_of(model))

    while_attached = [checkpoints_activations(each) for each in (model, other)]
    undo()

    assert while_attached == [True, False]
    assert not checkpoints_activations(model)


def test_undo_restores_an_instances_own_forward():
    model = Model()
    own = model.layers[1].forward
    model.layers[1].forward = own

    undo = ActivationCheckpointing("layers.*").attach(engine_of(model))
    undo()
    undo()

    assert vars(model.layers[1])["forward"] is own
    assert "forward" not in vars(model.layers[0])


def test_after_undo_a_wrapper_around_ours_stays_and_ours_does_nothing():
    layer = Layer()
    undo = checkpoint_forward(layer)
    ours = layer.forward
    layer.forward = theirs = lambda x: ours(x)

    undo()
    layer(torch.randn(2, 8)).sum().backward()

    assert layer.forward is theirs
    assert layer.calls == 1


def test_a_copy_runs_its_own_forward_and_a_pickled_model_the_plain_one():
    layer, x = Layer().eval(), torch.randn(2, 8)
    checkpoint_forward(layer)
    buffer = io.BytesIO()

    copied = copy.deepcopy(layer)
    torch.save(layer, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        layer.out[0].weight.zero_()

    assert copied.forward.__self__ is copied
    assert not torch.equal(copied(x), layer(x))
    assert torch.equal(loaded(x), copied(x))
    assert loaded.forward.__func__ is Layer.forward


def test_running_statistics_are_updated_once_per_batch():
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    checkpointed = copy.deepcopy(plain)
    checkpoint_forward(checkpointed)
    x = torch.randn(6, 4)

    expected, actual = (
        gradients(nn.Sequential(model, Mean()), x) for model in (plain, checkpointed)
    )

    assert all(map(torch.equal, actual, expected))
    assert all(map(torch.equal, checkpointed.buffers(), plain.buffers()))


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def test_a_hugging_face_model_is_switched_by_its_own_method_and_restored():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=16, n_layer=2, n_head=2))
    tokens = {"input_ids": torch.arange(8).view(2, 4), "labels": torch.arange(8).view(2, 4)}
    before = state_of(model)
    expected = gradients(model, **tokens)

    undo = ActivationCheckpointing().attach(engine_of(model))
    was_on = [block.gradient_checkpointing for block in model.transformer.h]
    again = ActivationCheckpointing().unsupported_reason(engine_of(model))
    actual = gradients(model, **tokens)
    undo()

    assert was_on == [True, True]
    assert again is not None and "on already" in again
    assert all(map(torch.equal, actual, expected))
    assert state_of(model) == before


def state_of(model: nn.Module) -> list[tuple[str, dict, list]]:
    """Return the attributes of each module except for tensors and modules, and its hooks."""
    return [
        (
            name,
            {key: value for key, value in vars(each).items() if "checkpointing" in key},
            [*each._forward_hooks.values(), *each._forward_pre_hooks.values()],
        )
        for name, each in model.named_modules()
    ]


def test_if_one_module_cannot_be_switched_none_stays_switched():
    class Fixed(Layer):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "forward":
                raise RuntimeError("this forward is fixed")
            super().__setattr__(name, value)

    model = Model()
    model.layers.append(Fixed())

    with pytest.raises(RuntimeError, match="fixed"):
        ActivationCheckpointing("layers.*").attach(engine_of(model))

    assert [name for name, each in model.named_modules() if "forward" in vars(each)] == []

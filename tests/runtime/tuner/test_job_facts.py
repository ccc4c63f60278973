"""Traits of a model, as found in its modules."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from zerowatch.runtime.tuner import job_facts as job_facts_module
from zerowatch.runtime.tuner.job_facts import job_facts, model_traits, warn_of_batch_statistics
from zerowatch.runtime.tuner.policy.policy_types import ModelTraits


class MixtralSparseMoeBlock(nn.Module):
    """Named as transformers names it."""


class Attention(nn.Module):
    """Drops by a function, not by a layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention_dropout = dropout


class DropPath(nn.Module):
    """Named as timm names it."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob


@pytest.mark.parametrize(
    ("module", "traits"),
    [
        (nn.Linear(2, 2), ModelTraits()),
        (nn.Dropout(0.0), ModelTraits()),
        (nn.Dropout(0.1), ModelTraits(dropout=True)),
        (Attention(0.0), ModelTraits()),
        (Attention(0.1), ModelTraits(dropout=True)),
        (DropPath(0.2), ModelTraits(dropout=True)),
        (nn.MultiheadAttention(4, 2, dropout=0.1), ModelTraits(dropout=True)),
        (nn.LSTM(2, 2, num_layers=2), ModelTraits()),
        (nn.TransformerEncoderLayer(4, 2, dropout=0.0), ModelTraits()),
        (nn.BatchNorm1d(2), ModelTraits(batch_statistics=True)),
        (nn.SyncBatchNorm(2), ModelTraits(batch_statistics=True)),
        (nn.LayerNorm(2), ModelTraits()),
        (MixtralSparseMoeBlock(), ModelTraits(expert_capacity=True)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_module_anywhere_in_a_model_shows_its_traits(module, traits):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(module))

    assert model_traits(model) == traits


def test_the_facts_have_the_sizes_of_trained_and_of_all_parameters(monkeypatch):
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)]).bfloat16()
    model.requires_grad_(False)
    model.append(nn.Linear(8, 2, bias=False))  # fp32
    engine = SimpleNamespace(
        module=model, communication_data_type=torch.bfloat16, seq_data_parallel_group=None
    )
    monkeypatch.setattr(job_facts_module.dist, "get_world_size", lambda group: 8)
    monkeypatch.setattr(job_facts_module, "backend_name", lambda: "nccl")

    facts = job_facts(engine)

    assert (facts.gradient_bytes, facts.num_gradients) == (32, 16)
    assert (facts.parameter_bytes, facts.stage_3_bytes) == (64, 4 * 64 * 2 + 64)
    assert facts.num_tensors == 5


def test_deepspeeds_own_experts_are_known():
    from deepspeed.moe.experts import Experts

    model = nn.Sequential(Experts(nn.Linear(2, 2)))

    assert model_traits(model).expert_capacity


def test_only_the_user_knows_of_a_loss_between_samples():
    assert not model_traits(nn.Linear(2, 2), loss_decomposable=False).loss_decomposable


def test_batch_statistics_are_warned_of_by_name(caplog):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    with caplog.at_level(logging.WARNING):
        warn_of_batch_statistics(model)

    assert "1 normalize over the samples of a micro-batch" in caplog.text

"""The model, the data and the fingerprint of the weights that the examples share."""

import hashlib

import torch
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY, LENGTH = 64, 32


def tiny_gpt() -> torch.nn.Module:
    """Return a GPT-2 of two layers with random weights, the same in each process."""
    torch.manual_seed(0)
    shape = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **shape)
    )


class Sentences(torch.utils.data.Dataset):
    """Random tokens, the same in each process."""

    def __init__(self, number: int = 256) -> None:
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randint(0, VOCABULARY, (number, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def fingerprint(model: torch.nn.Module) -> str:
    """Return a hash of all weights; equal weights have equal hashes."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()[:16]

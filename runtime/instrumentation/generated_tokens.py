"""Counts the tokens that calls of `generate` return, without waiting for the device.

The rules are those of transformers' `GenerationMixin.generate`: a returned sequence is the prompt
and the new tokens, and padding follows the first end-of-sequence token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..common.device_scalar import ScalarOrPending, read, scalar

# Where `generate` takes the prompt if it is not the first argument.
_PROMPT_NAMES = ("inputs", "input_ids")
# Options that end a sequence at another token than the configured one.
_OTHER_ENDS = ("stop_strings", "stopping_criteria")


@dataclass(slots=True)
class GenerationCounts:
    """Counts over the calls of `generate` since the last step.

    Attributes:
        calls: Number of calls that returned.
        sequences: Number of returned sequences. None if a call did not show it.
        tokens: For each call the number of new tokens, which may still be on the device.
    """

    calls: int = 0
    sequences: int | None = 0
    tokens: list[ScalarOrPending] = field(default_factory=list)

    def add(self, sequences: int | None, tokens: ScalarOrPending) -> None:
        """Count one call. Unknown values are None."""
        self.calls += 1
        known = sequences is not None and self.sequences is not None
        self.sequences = (self.sequences or 0) + (sequences or 0) if known else None
        self.tokens.append(tokens)

    def total_tokens(self) -> int | None:
        """Return the tokens of all calls, or None if those of a call are unknown."""
        counts = [read(each) for each in self.tokens]
        known = [round(count) for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """What the arguments of one call of `generate` show about the sequences that it returns.

    Attributes:
        prompt_length: The tokens at the start of each returned sequence that are not new.
        end_tokens: Tokens that end a sequence, after which padding follows.
    """

    prompt_length: int
    end_tokens: tuple[int, ...]


def generate_options(
    module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> GenerateOptions | None:
    """Return what is known about a call; None if its new tokens cannot be counted exactly.

    This is so if the module is no decoder of transformers, if the call has no prompt, or if a stop
    string or another criterion of the caller may end a sequence: the padding that follows looks
    like a token.

    Args:
        module: The module that generates.
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.
    """
    defaults = getattr(module, "generation_config", None)
    if defaults is None or _is_encoder_decoder(module):
        return None
    given = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    end_tokens = _token_ids(_option("eos_token_id", kwargs, given, defaults))
    has_other_ends = any(_option(name, kwargs, given, defaults) for name in _OTHER_ENDS)
    prompt_length = _prompt_length(args, kwargs)
    if end_tokens is None or prompt_length is None or (end_tokens and has_other_ends):
        return None
    return GenerateOptions(prompt_length=prompt_length, end_tokens=end_tokens)


def count_result(result: Any, options: GenerateOptions | None) -> tuple[int | None, Any]:
    """Return the number of sequences in a result and of their new tokens; None if unknown.

    Args:
        result: What `generate` returned: token ids of shape `[sequences, length]`, or an output
            whose attribute `sequences` holds them.
        options: The options of the call.
    """
    ids = getattr(result, "sequences", result)
    if options is None or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return None, None
    return ids.shape[0], scalar(_new_tokens(ids[:, options.prompt_length :], options.end_tokens))


def _new_tokens(ids: torch.Tensor, end_tokens: tuple[int, ...]) -> torch.Tensor | int:
    """Count the tokens of each sequence up to its first end token, and add them up."""
    if not end_tokens:
        return ids.numel()
    # Comparisons with numbers: a tensor of the end tokens would have to be copied to the device.
    ends = ids == end_tokens[0]
    for token in end_tokens[1:]:
        ends = ends | (ids == token)
    ended_before = ends.cumsum(1) - ends.long()
    return (ended_before == 0).sum()


def _is_encoder_decoder(module: Any) -> bool:
    return bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))


def _option(name: str, kwargs: Mapping[str, Any], given: Any, defaults: Any) -> Any:
    """Return an option of `generate`: from the call, its configuration, or the module's."""
    if name in kwargs:
        return kwargs[name]
    value = getattr(given, name, None)
    return getattr(defaults, name, None) if value is None else value


def _token_ids(value: Any) -> tuple[int, ...] | None:
    """Return token ids as numbers; None if they are on a device, where reading them would wait."""
    if value is None:
        return ()
    if isinstance(value, torch.Tensor):
        return tuple(value.flatten().tolist()) if value.device.type == "cpu" else None
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)


def _prompt_length(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    prompts = (*args[:1], *(kwargs.get(name) for name in _PROMPT_NAMES))
    ids = next((each for each in prompts if each is not None), None)
    if isinstance(ids, torch.Tensor):
        return ids.shape[1] if ids.dim() == 2 else None
    # A prompt of embeddings only: the result has no prompt.
    return 0 if ids is None and kwargs.get("inputs_embeds") is not None else None

"""Which modules of a model a caller means, by class, by name, or as its repeated block."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Sequence

from torch import nn

from ....errors import ZerowatchError
from .zero_optimizer import total_elements

# A class, its name, a pattern of module names as `blocks.*`, or several of these; None: the
# repeated block.
ModuleSelector = type[nn.Module] | str | Sequence[type[nn.Module] | str] | None

CONTAINERS = (nn.ModuleList, nn.Sequential)
_SHOWN = 5  # close names in a message


def choose_modules(model: nn.Module, chosen: ModuleSelector) -> dict[str, nn.Module]:
    """Return the chosen modules by name; none of them lies within another.

    Raises:
        ZerowatchError: No module of the model is meant.
    """
    if chosen is None:
        return repeated_block(model)
    wishes = [chosen] if isinstance(chosen, str | type) else list(chosen)
    found: dict[str, nn.Module] = {}
    for wish in wishes:
        matching = {name: each for name, each in _named(model) if _matches(name, each, wish)}
        if not matching:
            raise ZerowatchError(_nothing_found(model, wish))
        found |= matching
    if not found:
        raise ZerowatchError("the choice of modules to checkpoint is empty")
    return _outermost(found)


def repeated_block(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that the model repeats: the list of equals with the most parameters.

    Raises:
        ZerowatchError: It repeats nothing but single layers, if that.
    """
    candidates = [
        {f"{name}.{key}".lstrip("."): each for key, each in container.named_children()}
        for name, container in model.named_modules()
        if isinstance(container, CONTAINERS) and _repeats_a_block(container)
    ]
    if not candidates:
        raise ZerowatchError(
            f"{type(model).__name__} has no nn.ModuleList or nn.Sequential of several equal "
            "blocks, so activation checkpointing has to be told what to checkpoint: a class or a "
            'pattern of names such as "blocks.*"'
        )
    return max(candidates, key=_size)  # the first, and so the outermost, of equals


def _size(blocks: dict[str, nn.Module]) -> int:
    return sum(total_elements(block.parameters()) for block in blocks.values())


def _repeats_a_block(container: nn.Module) -> bool:
    kinds = [type(child) for child in container.children()]
    return len(kinds) > 1 and len(set(kinds)) == 1 and not _is_single_layer(container)


def _is_single_layer(container: nn.Module) -> bool:
    """Whether the children are torch's own layers: each would keep its input all the same."""
    child = next(container.children())
    return type(child).__module__.startswith("torch.nn.") and not any(child.children())


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules but the model itself, which would be run twice for nothing."""
    return ((name, module) for name, module in model.named_modules() if name)


def _matches(name: str, module: nn.Module, wish: type[nn.Module] | str) -> bool:
    if isinstance(wish, str):
        return type(module).__name__ == wish or fnmatch.fnmatchcase(name, wish)
    return isinstance(module, wish)


def _outermost(found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    inside = {id(inner) for each in found.values() for inner in each.modules() if inner is not each}
    return {name: each for name, each in found.items() if id(each) not in inside}


def _nothing_found(model: nn.Module, wish: type[nn.Module] | str) -> str:
    looked_for = wish if isinstance(wish, str) else wish.__name__
    names = [name for name, _ in _named(model)]
    known = [*dict.fromkeys(type(module).__name__ for _, module in _named(model)), *names]
    close = difflib.get_close_matches(looked_for, known, n=_SHOWN, cutoff=0.5)
    shown = close or known[:_SHOWN]
    kind = "class or module name" if isinstance(wish, str) else "class"
    text = f"no module of {type(model).__name__} has the {kind} {looked_for!r}; "
    if not shown:
        return text + "it has no modules within it"
    return text + f"{'close' if close else 'there'} are {', '.join(map(repr, shown))}"

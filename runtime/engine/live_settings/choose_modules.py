"""Selection of modules of a model: by class, by name pattern, or as the repeated block."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Sequence

from torch import nn

from ....errors import ZerowatchError
from .zero_optimizer import total_elements

# A class, its name, a pattern of module names such as `blocks.*`, or several of these; None selects
# the repeated block.
ModuleSelector = type[nn.Module] | str | Sequence[type[nn.Module] | str] | None

CONTAINERS = (nn.ModuleList, nn.Sequential)
_NUM_SUGGESTIONS = 5


def choose_modules(model: nn.Module, selector: ModuleSelector) -> dict[str, nn.Module]:
    """Return the selected modules by name, without modules nested in another selected one.

    Raises:
        ZerowatchError: No module of the model matches.
    """
    if selector is None:
        return repeated_block(model)
    selectors = [selector] if isinstance(selector, str | type) else list(selector)
    found: dict[str, nn.Module] = {}
    for each in selectors:
        matching = {name: module for name, module in _named(model) if _matches(name, module, each)}
        if not matching:
            raise ZerowatchError(_no_match_message(model, each))
        found |= matching
    if not found:
        raise ZerowatchError("the choice of modules to checkpoint is empty")
    return _outermost(found)


def repeated_block(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks: the container of equal modules with the most parameters.

    Raises:
        ZerowatchError: The model repeats no block, or single layers only.
    """
    candidates = [
        {f"{name}.{key}".lstrip("."): each for key, each in container.named_children()}
        for name, container in model.named_modules()
        if isinstance(container, CONTAINERS) and _repeats_a_block(container)
    ]
    if not candidates:
        raise ZerowatchError(
            f"{type(model).__name__} has no nn.ModuleList or nn.Sequential of several equal "
            "blocks; select the modules to checkpoint by a class or a pattern of names such as "
            '"blocks.*"'
        )
    return max(candidates, key=_size)  # of equals the first, which is the outermost


def _size(blocks: dict[str, nn.Module]) -> int:
    return sum(total_elements(block.parameters()) for block in blocks.values())


def _repeats_a_block(container: nn.Module) -> bool:
    kinds = [type(child) for child in container.children()]
    return len(kinds) > 1 and len(set(kinds)) == 1 and not _is_single_layer(container)


def _is_single_layer(container: nn.Module) -> bool:
    """Whether the children are torch's own layers: checkpointed, each still keeps its input."""
    child = next(container.children())
    return type(child).__module__.startswith("torch.nn.") and not any(child.children())


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules except the model itself: recomputing all of it saves nothing."""
    return ((name, module) for name, module in model.named_modules() if name)


def _matches(name: str, module: nn.Module, selector: type[nn.Module] | str) -> bool:
    if isinstance(selector, str):
        return type(module).__name__ == selector or fnmatch.fnmatchcase(name, selector)
    return isinstance(module, selector)


def _outermost(found: dict[str, nn.Module]) -> dict[str, nn.Module]:
    inside = {id(inner) for each in found.values() for inner in each.modules() if inner is not each}
    return {name: each for name, each in found.items() if id(each) not in inside}


def _no_match_message(model: nn.Module, selector: type[nn.Module] | str) -> str:
    wanted = selector if isinstance(selector, str) else selector.__name__
    names = [name for name, _ in _named(model)]
    known = [*dict.fromkeys(type(module).__name__ for _, module in _named(model)), *names]
    close = difflib.get_close_matches(wanted, known, n=_NUM_SUGGESTIONS, cutoff=0.5)
    shown = close or known[:_NUM_SUGGESTIONS]
    kind = "class or module name" if isinstance(selector, str) else "class"
    text = f"no module of {type(model).__name__} has the {kind} {wanted!r}; "
    if not shown:
        return text + "it has no modules within it"
    return text + f"{'close' if close else 'there'} are {', '.join(map(repr, shown))}"

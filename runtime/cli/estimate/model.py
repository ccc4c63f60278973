"""The model that `estimate` plans for: a typical one of some size, or what a callable builds."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ....errors import CommandLineError

if TYPE_CHECKING:
    from torch import nn

    from ...estimator.shapes import ModelShape

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# What code that builds a model may raise; anything else is worth its traceback.
_BUILD_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


def model_of(size: str | None, name: str | None) -> tuple[ModelShape, nn.Module | None]:
    """Return the shape of the model asked for, and the module if there is one.

    Args:
        size: Number of parameters, as 7B.
        name: Module and callable, as my_project.model:build.

    Raises:
        CommandLineError: Not one of the two is given, or it cannot be used.
    """
    if (size is None) == (name is None):
        raise CommandLineError("give either --params, as 7B, or --model, as my_project.model:build")
    if name is not None:
        return _shape_of_model(name)
    from ...estimator.typical_model import typical_transformer

    return typical_transformer(_num_parameters(size or "")), None


def _num_parameters(size: str) -> int:
    unit = size[-1:].upper()
    digits = size[:-1] if unit in _UNITS else size
    try:
        number = round(float(digits) * _UNITS.get(unit, 1))
    except (ValueError, OverflowError) as error:
        raise CommandLineError(f"--params {size} is no size; give it as 125M, 7B or 1e9") from error
    if number < 1000:
        raise CommandLineError(f"--params {size} is no size of a model; give 1000 or more")
    return number


def _shape_of_model(name: str) -> tuple[ModelShape, nn.Module]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise CommandLineError(f"--model {name} names no callable; give it as package.module:name")
    sys.path.insert(0, "")  # as `python -m` finds modules
    try:
        build = getattr(import_module(module_name), attribute)
    except _BUILD_ERRORS as error:
        raise _unusable(name, "does not import", error) from error
    return _build(name, build)


def _build(name: str, build: Any) -> tuple[ModelShape, nn.Module]:
    import torch

    from ...estimator.read_module import shape_of
    from ...estimator.run_order import run_order

    try:
        with torch.device("meta"):  # no memory, and no time for random weights
            module = build()
    except _BUILD_ERRORS:
        try:
            module = build()
        except _BUILD_ERRORS as error:
            raise _unusable(name, "fails when it is called without arguments", error) from error
    if not isinstance(module, torch.nn.Module):
        kind = type(module).__name__
        raise CommandLineError(f"--model {name} returns a {kind}; let it return a torch.nn.Module")
    return shape_of(module, order=run_order(module)), module


def _unusable(name: str, fault: str, error: BaseException) -> CommandLineError:
    reason = " ".join(str(error).split())
    return CommandLineError(f"--model {name} {fault}: {type(error).__name__}: {reason}; correct it")

"""What is wrong with a setting, in one line: which option, what it got, what is allowed."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ..errors import SettingsError


def settings_error(settings: type[BaseModel], fault: ErrorDetails, origin: str) -> SettingsError:
    """Say which option is wrong, what it got and what is allowed."""
    option = ".".join(str(part) for part in fault["loc"]) or "settings"
    if fault["type"] == "extra_forbidden":
        known = [*settings.model_fields, *_option_names(settings.model_fields)]
        return SettingsError(
            f"setting {option!r} ({origin}) does not exist{_did_you_mean(option, known)}"
        )
    # What is wrong with an address may be that it holds a password.
    shown = re.sub(r"(?<=://)\S*@", "***@", repr(fault["input"]))
    got = "" if isinstance(fault["input"], dict) else f", got {shown}"
    return SettingsError(f"setting {option!r} ({origin}): {fault['msg']}{got}")


def check_environment_names(settings: type[BaseModel], prefix: str) -> None:
    """Reject a misspelt variable with our prefix, which pydantic-settings would pass over."""
    known = {
        prefix + name.replace(".", "_").upper() for name in _option_names(settings.model_fields)
    }
    for variable in os.environ:
        if variable.startswith(prefix) and variable not in known:
            raise SettingsError(
                f"environment variable {variable} is no setting{_did_you_mean(variable, known)}"
            )


def _option_names(fields: Mapping[str, FieldInfo], prefix: str = "") -> Iterable[str]:
    for name, field in fields.items():
        inner = next(
            (
                kind
                for kind in (field.annotation, *get_args(field.annotation))
                if isinstance(kind, type) and issubclass(kind, BaseModel)
            ),
            None,
        )
        if inner is None:
            yield prefix + name
        else:
            yield from _option_names(inner.model_fields, f"{prefix}{name}.")


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f"; did you mean {close[0]!r}?" if close else ""

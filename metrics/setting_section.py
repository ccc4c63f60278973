"""What every section of the settings is: frozen, and without options that nobody knows."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Some settings that belong together."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

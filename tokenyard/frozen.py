"""What all data of this project has in common that is read from files or given by users."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """A value: it never changes, and a field that is not known is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid")

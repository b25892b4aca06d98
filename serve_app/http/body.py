"""What all JSON bodies have in common: no unknown fields, and only the first error is reported.

A body of a megabyte can hold several hundred thousand mistakes. To list them all would take
seconds, in which no other request goes on. So lists in bodies have `fail_fast`, too.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

MAX_FIELDS = 64


class Body(BaseModel):
    """A JSON object without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise ValueError(f"an object has {len(data)} fields; at most {MAX_FIELDS} are read")
        return data


class StrictBody(Body):
    """A body in which a quoted number is an error."""

    model_config = ConfigDict(strict=True)

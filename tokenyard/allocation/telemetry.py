"""What a live allocator has seen, slot by slot: JSON lines that training reads back.

A line per slot: `format_version` 1, `slot` (slots since the Unix epoch, in the scenario's own time
where a slot of real time may be longer), `demand_per_s`, `plan`, `proposed`, and what a person
wants to know beside them. Missing slots are filled with the demand before them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, ValidationError

from tokenyard.allocation.demand import DemandStream
from tokenyard.config import FrozenModel, sentence_of

TELEMETRY_FILE = "allocation.jsonl"
_LONGEST_GAP = 288
"""Missing slots in a row that are filled; more of them, and the log begins anew after."""


class SlotRecord(FrozenModel):
    """One slot of a live pool."""

    format_version: Literal[1] = 1
    slot: Annotated[int, Field(ge=0)]
    """Slots since the Unix epoch."""
    time_s: float
    """When it ended, Unix time."""
    demand_per_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Requests per second that asked to be let in, in the scenario's time."""
    waiting: Annotated[int, Field(ge=0)]
    """Requests that waited at its end."""
    gpus_held: Annotated[int, Field(ge=0)]
    plan: str
    """In force, in words."""
    proposed: str
    """Asked for by the policy for the next slot."""


def append_record(path: Path, record: SlotRecord) -> None:
    """Write a line; a slot lasts minutes, so there is no hurry."""
    with path.open("a", encoding="utf-8") as file:
        file.write(record.model_dump_json() + "\n")


def read_telemetry(path: str | Path, slots_per_day: int) -> tuple[DemandStream, str]:
    """Read demand and its hash from a file, or from the `allocation.jsonl` of a folder.

    Raises:
        ValueError: There is no such file, or a line is no record; gives the line and the reason.
    """
    file = Path(path)
    if file.is_dir():
        file = file / TELEMETRY_FILE
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    records: dict[int, float] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = SlotRecord.model_validate_json(line)
        except ValidationError as error:
            raise ValueError(f"{file}, line {number}: {sentence_of(error)}") from None
        records[record.slot] = record.demand_per_s
    if not records:
        raise ValueError(f"{file} holds no slot")
    slots = np.array(sorted(records))
    gaps = np.flatnonzero(np.diff(slots) > _LONGEST_GAP)
    first = slots[gaps[-1] + 1] if len(gaps) else slots[0]
    every = np.arange(first, slots[-1] + 1)
    recorded = slots[slots >= first]
    before = recorded[np.searchsorted(recorded, every, side="right") - 1]
    demand = np.array([records[int(slot)] for slot in before])
    digest = hashlib.sha256(np.ascontiguousarray(demand).tobytes()).hexdigest()[:12]
    return DemandStream(demand, 0, int(first % slots_per_day)), digest

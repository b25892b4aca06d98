"""Tables that are filled cell by cell: what is there already is not measured again."""

from __future__ import annotations

import csv
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Table:
    """A CSV file whose rows are appended and kept; a row that was cut off is dropped."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path, self._columns = path, columns
        self.rows: list[dict[str, str]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                rows = [row for row in csv.DictReader(file) if None not in (*row, *row.values())]
        else:
            rows = []
        path.write_text(",".join(columns) + "\n", encoding="utf-8")
        self.add(*([row[name] for name in columns] for row in rows))

    def has(self, **cell: Any) -> bool:
        """Whether a row has these values."""
        wanted = {key: str(value) for key, value in cell.items()}
        return any(wanted.items() <= row.items() for row in self.rows)

    def add(self, *rows: Sequence[Any]) -> None:
        """Append rows of all columns, which are on the disk when this returns."""
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
        self.rows += [dict(zip(self._columns, map(str, row), strict=True)) for row in rows]


class Deadline:
    """Time after which no further cell is begun."""

    def __init__(self, minutes: float) -> None:
        self._end_s = time.monotonic() + 60 * minutes

    @property
    def passed(self) -> bool:
        """Whether it is over."""
        return time.monotonic() > self._end_s

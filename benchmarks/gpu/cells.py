"""Tables that are filled cell by cell: what is there already is not measured again."""

from __future__ import annotations

import csv
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Table:
    """A CSV file whose rows are appended and kept; a row that was cut off is dropped."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        """Take up the rows that the file has.

        Raises:
            ValueError: The file has other columns.
        """
        self._path, self._columns = path, tuple(columns)
        self.rows: list[dict[str, str]] = []
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                if reader.fieldnames and tuple(reader.fieldnames) != self._columns:
                    raise ValueError(f"{path} has other columns: take another folder")
                self.rows = [row for row in reader if None not in (*row, *row.values())]
        self._rewrite()

    def _rewrite(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(self.rows)

    def has(self, **cell: Any) -> bool:
        """Whether a row has these values."""
        wanted = {key: str(value) for key, value in cell.items()}
        return any(wanted.items() <= row.items() for row in self.rows)

    def add(self, *rows: Mapping[str, Any]) -> None:
        """Append rows, which are on the disk when this returns."""
        texts = [{name: str(row[name]) for name in self._columns} for row in rows]
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerows(texts)
        self.rows += texts


class Deadline:
    """Time after which no further cell is begun."""

    def __init__(self, minutes: float) -> None:
        """Begin now."""
        self._end_s = time.monotonic() + 60 * minutes

    @property
    def passed(self) -> bool:
        """Whether it is over."""
        return time.monotonic() > self._end_s

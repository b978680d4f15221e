"""JSON lines and Parquet: rows in order, and any row again by its key."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..errors import RolloutError
from .rollout import field_error

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet",)
_ROWS_PER_GROUP = 1024


class Row(NamedTuple):
    """One line or row of a file.

    Attributes:
        key: what `Source.read` needs to find it again.
        number: its line or row, from 1.
        record: the parsed row, or the `RolloutError` that parsing gave.
    """

    key: int
    number: int
    record: Any


class Source(Protocol):
    """One file of rollouts."""

    path: Path
    unit: str  # what `Row.number` counts

    def rows(self) -> Iterator[Row]: ...

    def read(self, key: int) -> Any: ...


class JsonLines:
    """A file with one JSON object per line; blank lines are skipped. Keys are byte offsets."""

    unit = "line"

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self) -> Iterator[Row]:
        offset = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield Row(offset, number, parsed_line(line))
                offset += len(line)

    def read(self, key: int) -> Any:
        with self.path.open("rb") as file:
            file.seek(key)
            return parsed_line(file.readline())


class Parquet:
    """A Parquet file. Keys are row indices; `read` keeps the table in memory."""

    unit = "row"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._table: Any = None

    def rows(self) -> Iterator[Row]:
        index = 0
        for batch in self.open().iter_batches(batch_size=_ROWS_PER_GROUP):
            for record in batch.to_pylist():
                yield Row(index, index + 1, record)
                index += 1

    def read(self, key: int) -> Any:
        if self._table is None:
            self._table = self.open().read()
        return self._table.slice(key, 1).to_pylist()[0]

    def open(self) -> Any:
        parquet = pyarrow_module("parquet")
        try:
            return parquet.ParquetFile(self.path)
        except (OSError, ValueError) as error:
            raise RolloutError(f"{self.path}: cannot be read as Parquet: {error}") from error


def parsed_line(line: bytes) -> Any:
    """Returns the parsed line, or the error, so that the reader can say where it was."""
    try:
        return json.loads(line.decode("utf-8-sig"), object_pairs_hook=_without_duplicates)
    except RolloutError as error:
        return error
    except json.JSONDecodeError as error:
        return RolloutError(
            f"not valid JSON: {error.msg} at column {error.colno}; each line holds one object."
        )
    except UnicodeDecodeError as error:
        return RolloutError(f"not UTF-8 text: {error.reason} at byte {error.start} of the line.")
    except RecursionError:
        return RolloutError("nested too deeply.")
    except ValueError as error:  # a number of thousands of digits
        return RolloutError(f"cannot be parsed: {error}.")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise field_error(twice, "is given twice; keep one.")
    return record


def find_sources(path: str | Path) -> list[Source]:
    """Returns the files of `path` (a file, or all files of a folder in order of their names).

    Raises:
        RolloutError: nothing is there, or a file's suffix is not known.
    """
    path = Path(path)
    if path.is_dir():
        known = JSON_SUFFIXES + PARQUET_SUFFIXES
        files = sorted(p for p in path.iterdir() if p.suffix in known and p.name[0] != ".")
        if not files:
            raise RolloutError(f"{path}: the folder has no file ending in {', '.join(known)}.")
        return [_source(file) for file in files]
    if not path.is_file():
        raise RolloutError(f"{path}: no such file or folder of rollouts.")
    return [_source(path)]


def _source(path: Path) -> Source:
    return Parquet(path) if is_parquet(path) else JsonLines(path)


def is_parquet(path: Path) -> bool:
    """Tells Parquet from JSON lines by the suffix.

    Raises:
        RolloutError: it is neither's.
    """
    if path.suffix not in JSON_SUFFIXES + PARQUET_SUFFIXES:
        raise RolloutError(
            f"{path}: a rollout file ends in {', '.join(JSON_SUFFIXES)} (JSON lines) or "
            f"{', '.join(PARQUET_SUFFIXES)}, got {path.suffix or 'no suffix'!r}."
        )
    return path.suffix in PARQUET_SUFFIXES


def write_json_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Writes one JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, default=str) + "\n")


def write_parquet(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Writes a Parquet file; `metadata` becomes a column of JSON text."""
    import pyarrow

    rows = [_parquet_record(record) for record in records]
    names = list(dict.fromkeys(name for row in rows for name in row))
    per_token = any(isinstance(row.get("advantage"), list) for row in rows)
    for row in rows:
        if per_token and isinstance(row.get("advantage"), float):
            row["advantage"] = [row["advantage"]] * len(row["response_ids"])
    columns = {name: [row.get(name) for row in rows] for name in names}
    try:
        table = pyarrow.table(columns)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
        raise RolloutError(f"{path}: a column needs one type in all rows: {error}") from error
    pyarrow_module("parquet").write_table(table, path, row_group_size=_ROWS_PER_GROUP)


def _parquet_record(record: dict[str, Any]) -> dict[str, Any]:
    if "metadata" in record:
        record = {**record, "metadata": json.dumps(record["metadata"], default=str)}
    return record


def pyarrow_module(name: str) -> Any:
    """Returns a module of pyarrow, e.g. "parquet".

    Raises:
        RolloutError: pyarrow is not installed.
    """
    try:
        return importlib.import_module(f"pyarrow.{name}")
    except ImportError as error:
        raise RolloutError("Parquet files need pyarrow: pip install pyarrow.") from error

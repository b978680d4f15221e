"""Rollout files in blocks of rows, for reading files that do not fit into memory.

A block is some hundred rows. Where a block starts in its file (a `Place`) is
enough to read it again, so a reader can go on in the middle of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .columns import table_columns
from .json_columns import json_columns
from .sources import JsonLines, Parquet, Row, Source, parsed_line

BLOCK_ROWS = 1024
_BLOCK_BYTES = 2 * 2**20  # of JSON lines


class Place(NamedTuple):
    """Where a block starts: byte offset (JSON lines) or row index (Parquet), and row number."""

    key: int = 0
    number: int = 1


class Block(NamedTuple):
    """Rows that follow each other in a file.

    Attributes:
        start, end: where it starts, and where the next one does.
        columns: by field, see `table_columns`; None if the rows need a closer look.
        rows: makes the rows one by one, each with its number or its error.
    """

    start: Place
    end: Place
    num_rows: int
    columns: dict[str, Any] | None
    rows: Callable[[], list[Row]]


def blocks(source: Source, start: Place) -> Iterator[Block]:
    """Yields the blocks of a file from `start`, which is the start of one of them.

    Raises:
        RolloutError: the file cannot be read.
    """
    if isinstance(source, Parquet):
        return _parquet_blocks(source, start)
    assert isinstance(source, JsonLines)
    return _json_blocks(source, start)


def _parquet_blocks(source: Parquet, start: Place) -> Iterator[Block]:
    file = source.open()
    row = 0
    for group in range(file.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        if row + num_rows <= start.key:
            row += num_rows
            continue
        for batch in file.iter_batches(batch_size=BLOCK_ROWS, row_groups=[group]):
            here, row = row, row + batch.num_rows
            if here >= start.key and batch.num_rows:
                yield _parquet_block(batch, here)


def _parquet_block(batch: Any, first: int) -> Block:
    def rows() -> list[Row]:
        return [Row(first + i, first + i + 1, r) for i, r in enumerate(batch.to_pylist())]

    end = first + batch.num_rows
    columns = table_columns(batch)
    return Block(Place(first, first + 1), Place(end, end + 1), batch.num_rows, columns, rows)


def _json_blocks(source: JsonLines, start: Place) -> Iterator[Block]:
    with source.path.open("rb") as file:
        file.seek(start.key)
        while lines := file.readlines(_BLOCK_BYTES):
            end = Place(start.key + sum(map(len, lines)), start.number + len(lines))
            block = _json_block(lines, start, end)
            if block.num_rows:
                yield block
            start = end


def _json_block(lines: list[bytes], start: Place, end: Place) -> Block:
    def rows() -> list[Row]:
        found, offset = [], start.key
        for number, line in enumerate(lines, start.number):
            if line.strip():
                found.append(Row(offset, number, parsed_line(line)))
            offset += len(line)
        return found

    num_rows = sum(not line.isspace() for line in lines)
    return Block(start, end, num_rows, json_columns(lines), rows)

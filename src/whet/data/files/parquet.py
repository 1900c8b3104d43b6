"""Parquet files, read within limits: a few kilobytes of Parquet can expand to gigabytes of text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from whet import system
from whet.data.files.bad_rows import Rejected
from whet.data.files.cells import column_values, holds_json, refuse_twice, text_bytes
from whet.log import logger

if TYPE_CHECKING:
    import pyarrow
    from pyarrow.parquet import ParquetFile

_FEATURES = b"huggingface"
"""The key of a file's metadata under which `datasets` writes the types of columns, as JSON."""
_CELLS_PER_BYTE, _SPARE_CELLS = 20, 100_000
"""Bytes per row: rows differ in an id or a text, which do not compress further."""
_BYTES_PER_BYTE, _SPARE_BYTES = 200, 512 << 20
"""Bytes of expanded text for each byte of the file. Texts repeat, but not without limit."""
_ROOM_BYTES = 2 << 30
"""Memory beyond the size that the file declares for its pages."""


def parquet_columns(data: bytes, wanted: Sequence[str]) -> dict[str, list[Any]]:
    """Return every column's values by name; None for columns that are not wanted."""
    from pyarrow import ArrowException

    try:
        return _read(data, wanted)
    except MemoryError as error:
        raise _too_large(len(data), str(error) or "more than the memory allowed") from None
    except (ArrowException, OSError, ValueError, KeyError, OverflowError, TypeError) as error:
        raise Rejected(
            "the Parquet file cannot be read",
            got=str(error),
            why="it is damaged, cut off, or uses what this version of Arrow does not know",
            fix="write or copy it again",
        ) from None


def parquet_class_names(data: bytes) -> dict[str, tuple[str, ...]]:
    """Return the names of the classes of each column that `datasets` wrote as ClassLabel, or as lists of it.

    Of a file that `parquet_columns` has read.
    """
    from pyarrow import BufferReader, parquet

    try:
        with _limited_memory(_ROOM_BYTES):
            known = parquet.ParquetFile(BufferReader(data), pre_buffer=False).schema_arrow.metadata or {}
            features = json.loads(known.get(_FEATURES, b"{}"))["info"]["features"]
        return {name: names for name, feature in features.items() if (names := _names_in(feature))}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError):
        return {}  # another program's file, or one that somebody has tampered with


def _names_in(feature: Any) -> tuple[str, ...]:
    """Return the names of a ClassLabel, or of the one that a list has; () for any other feature."""
    if isinstance(feature, list) and len(feature) == 1:
        feature = feature[0]
    if isinstance(feature, dict) and isinstance(feature.get("feature"), dict):
        feature = feature["feature"]
    if not isinstance(feature, dict) or feature.get("_type") != "ClassLabel":
        return ()
    names = feature.get("names")
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


def _read(data: bytes, wanted: Sequence[str]) -> dict[str, list[Any]]:
    from pyarrow import BufferReader, parquet

    with _limited_memory(_ROOM_BYTES):
        source = BufferReader(data)
        file = parquet.ParquetFile(source, pre_buffer=False)
        refuse_twice(file.schema_arrow.names)
        n_bytes = _check_sizes(file, len(data))
    columns: dict[str, list[Any]] = {name: [] for name in file.schema_arrow.names}
    read = [name for name in columns if name in wanted]
    with _limited_memory(3 * n_bytes + _ROOM_BYTES):
        size = 0
        for group in range(file.num_row_groups):
            table = _row_group(source, group, read)
            size += sum(text_bytes(chunk) for column in table.columns for chunk in column.chunks)
            if size > len(data) * _BYTES_PER_BYTE + _SPARE_BYTES:
                raise _too_large(len(data), f"at least {size:,} bytes of text")
            for name in read:
                columns[name] += column_values(table.column(name))
    return columns


def _row_group(source: Any, group: int, read: Sequence[str]) -> pyarrow.Table:
    """Return these columns of a row group; texts come as dictionaries, each text once, if Arrow can do that.

    Columns of JSON texts come as they are: as dictionaries they would lose their type.
    """
    from pyarrow import ArrowNotImplementedError, parquet

    plain = parquet.ParquetFile(source, pre_buffer=False)
    columns, in_json = plain.schema, [one.name for one in plain.schema_arrow if holds_json(one.type)]
    texts = [columns.column(n).path for n in range(len(columns)) if columns.column(n).physical_type == "BYTE_ARRAY"]
    texts = [path for path in texts if not any(f"{path}.".startswith(f"{name}.") for name in in_json)]
    flat = [name for name in texts if name in read]
    for as_dictionary in (texts, flat):  # texts in lists: not if their encoding changes within the group
        try:
            file = parquet.ParquetFile(source, read_dictionary=as_dictionary, pre_buffer=False)
            return file.read_row_group(group, columns=read, use_threads=False)
        except ArrowNotImplementedError:
            if as_dictionary is flat:
                raise
    raise AssertionError("the second attempt returns or raises")


def _check_sizes(file: ParquetFile, n_bytes: int) -> int:
    """Refuse counts that are impossible for a file of this size; return the unpacked bytes of its pages."""
    metadata = file.metadata
    groups = [metadata.row_group(n) for n in range(metadata.num_row_groups)]
    columns = [group.column(n) for group in groups for n in range(group.num_columns)]
    n_cells = max([metadata.num_rows, sum(group.num_rows for group in groups), *(c.num_values for c in columns)])
    if n_cells > n_bytes * _CELLS_PER_BYTE + _SPARE_CELLS:
        raise _too_large(n_bytes, f"{n_cells:,} rows or list entries")
    unpacked = sum(column.total_uncompressed_size for column in columns)
    if unpacked > n_bytes * _BYTES_PER_BYTE + _SPARE_BYTES:
        raise _too_large(n_bytes, f"{unpacked:,} bytes when unpacked")
    return unpacked


def _too_large(n_bytes: int, what: str) -> Rejected:
    return Rejected(
        "the Parquet file holds far more than its size allows",
        got=f"{what}, in a file of {n_bytes:,} bytes",
        why="repeated values make it small on the disk, and would fill the memory here",
        fix="write the file again without repeated rows, or split it into several files",
    )


@contextmanager
def _limited_memory(n_bytes: int) -> Iterator[None]:
    """Limit this process to so many more bytes: the sizes that a file declares may be false."""
    with system.limited_addresses(n_bytes) as is_limited:
        if not is_limited:
            logger.info("%s does not limit a process: a damaged Parquet file may take all memory", sys.platform)
        yield

"""Tables of rows in files, rewritten in another order, so that rows that batches read together share pages.

A packed file is a `.safetensors` with two tensors: `rows`, and `order`, the id of each row. `Feature.from_file` reads
it by ids, as the plain file. The rows of a parquet file are written to a plain one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_direct.cache_folder import sync_folder, write_whole
from pyg_direct.errors import PARQUET, ArgumentError, FileError, needs_extra, whole_file
from pyg_direct.features.range_reader import RangeReader
from pyg_direct.features.row_files import PACKED, SAFETENSORS, RowFile, save_pieces
from pyg_direct.kernels.rows.file_rows import PAGE
from pyg_direct.ops.argument_checks import check_ids
from pyg_direct.progress import Bar
from pyg_direct.runtime.host.host_memory import parse_size

_NAMES = {dtype: name for name, dtype in SAFETENSORS.items()}
# Pieces for which a table is read once each: a piece then has the rows of every so many of its pages.
_FEW_PIECES = 4
# Bytes of a write, on average, by which rows are dealt out.
_LEAST_WRITE = 64 << 10
# Rows of a parquet file that are read at a time.
_MOST_READ = 1 << 16


def check_order(order: Tensor, num_rows: int) -> Tensor:
    """Return an order of rows as int64 `[N]` on the CPU. `order`: Id of each row, int32 or int64 `[N]`."""
    order = check_ids("order", order, num_rows).cpu().long()
    seen = torch.zeros(num_rows, dtype=torch.bool, device="cpu")
    seen[order] = True
    if len(order) != num_rows or not bool(seen.all()):
        raise ArgumentError(f"order must hold each of 0 to {num_rows - 1} once, got {len(order)} ids, "
                            f"{int(seen.sum())} of them different")  # fmt: skip
    return order


def invert(order: Tensor) -> Tensor:
    """Return the place of each id, int64 `[N]`, for the id of each place, int64 `[N]`."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device="cpu")
    return places


def pack_rows(source: str | os.PathLike[str], target: str | os.PathLike[str], order: Tensor | None = None, *,
              memory: int | str = "1G") -> Path:  # fmt: skip
    """Rewrite a table in another order of its rows, such as the hottest first; returns the path of the new file.

    `Feature.from_file` reads the new file by the same ids. The file appears whole or not at all. An interrupted call
    leaves `target.partial`, and the same call continues there.

    Args:
        source: `.npy` or `.safetensors` with the rows, as of `Feature.from_file`; it stays as it is. A `.parquet` has
            columns of numbers of one dtype, or one column of lists of one length.
        target: `.safetensors` to write.
        order: Id of each row of the new file, int32 or int64 `[N]`: each of 0 to N - 1 once. None keeps the order of a
            `.parquet`, whose rows are only read one after the other; pack its new file in another order then.
        memory: Host memory for rows that are moved at a time: bytes, or `"1G"`. Fewer pages are read twice with more.

    Raises:
        FileError: a file cannot be read or written, the disk is full, or `source` changes meanwhile.
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
        ModuleNotFoundError: pyarrow, of the extra `distributed`, is not installed, and `source` is a `.parquet`.

    Example:
        >>> path = save_rows("plain.npy", torch.arange(8.0).view(4, 2))
        >>> packed = pack_rows(path, "packed.safetensors", order=torch.tensor([2, 0, 3, 1]))
        >>> Feature(device="cpu").from_file(packed)[torch.tensor([3, 0])].tolist()
        [[6.0, 7.0], [0.0, 1.0]]
    """
    path = Path(target)
    if path.suffix.lower() != ".safetensors":
        raise ArgumentError(f"target must end in .safetensors, got {str(path)!r}")
    is_parquet = Path(source).suffix.lower() == ".parquet"
    if is_parquet and order is not None:
        raise ArgumentError(f"order must be None for a .parquet, got ids for {os.fspath(source)!r}: pack the "
                            ".safetensors that comes of it in this order")  # fmt: skip
    if not is_parquet and order is None:
        raise ArgumentError(f"order must hold the id of each row of {os.fspath(source)!r}, such as "
                            "order_by_reads(loader, feature) returns, got None")  # fmt: skip
    if order is None:
        return _save_columns(Path(source), path, parse_size(memory, name="memory"))
    file = RowFile(source)
    if path.exists() and path.samefile(file.path):
        raise ArgumentError(f"target must be another file than source, got {str(path)!r} for both")
    num_bytes = parse_size(memory, name="memory")
    if not hasattr(os, "pwrite"):
        raise FileError(f"target={str(path)!r} cannot be written: this system has no pwrite")
    shape, dtype = file.layout.shape, file.layout.dtype
    if dtype not in _NAMES:
        raise ArgumentError(f"source must have a dtype of safetensors, got {dtype}")
    order = check_order(order, shape[0])
    # The rows of a packed source lie in an order of their own.
    numbers = order if file.order is None else invert(check_order(file.order, shape[0]))[order]
    partial, journal = path.with_name(f"{path.name}.partial"), path.with_name(f"{path.name}.partial.json")
    header = _make_header(file, shape[0])
    size = len(header) + file.layout.num_bytes + order.numel() * 8
    facts = {"source": [str(file.path.resolve()), *file.stamp], "header": header.decode("latin-1"),
             "order": hashlib.sha256(order.numpy().tobytes()).hexdigest()}  # fmt: skip
    done, dealt = _find_done(journal, partial, facts, size)
    try:
        free = shutil.disk_usage(path.parent).free + (partial.stat().st_blocks * 512 if partial.exists() else 0)
        if size > free:
            raise FileError(f"target must lie where {size} bytes are free, {path.parent} has {free}")
        with partial.open("r+b" if done > 0 or dealt > 0 else "w+b", buffering=0) as out:
            out.truncate(size)
            os.pwrite(out.fileno(), header, 0)
            _move_rows(file, numbers.numpy(), out.fileno(), len(header), done, dealt, num_bytes, journal, facts)
            _write_at(out.fileno(), order.numpy().data.cast("B"), len(header) + file.layout.num_bytes)
            os.fsync(out.fileno())
        file.check()
        os.replace(partial, path)
        sync_folder(path.parent)
    except OSError as error:
        if isinstance(error, FileError):
            raise
        why = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        raise FileError(f"target={str(path)!r} could not be written: {why} ({size} bytes needed); the same call "
                        f"continues with {partial.name}") from error  # fmt: skip
    with contextlib.suppress(OSError):
        journal.unlink()
    return path


def _save_columns(source: Path, target: Path, num_bytes: int) -> Path:
    """Write the rows of a parquet file, in its order."""
    with needs_extra("a parquet file", "distributed"):
        from pyarrow.parquet import ParquetFile

    stamp = _look_at(source)
    with whole_file("source", PARQUET, source), ParquetFile(source) as file:
        schema, count = file.schema_arrow, file.metadata.num_rows
        has_lists = any(map(_is_list, schema))
        kinds = {field.type.value_type if _is_list(field) else field.type for field in schema}
        if len(kinds) != 1 or (has_lists and len(schema) != 1):
            shown = ", ".join(f"{field.name}: {field.type}" for field in schema)
            raise ArgumentError("source must have columns of numbers of one dtype, or one column of lists, got "
                                f"{shown} in {str(source)!r}")  # fmt: skip
        (kind,) = kinds
        try:
            dtype = np.dtype(kind.to_pandas_dtype())
        except NotImplementedError:
            dtype = np.dtype(object)
        if dtype.kind not in "biuf":
            raise ArgumentError(f"source must hold numbers, got {kind} in {str(source)!r}")
        width = len(schema)
        if has_lists:
            first = next(file.iter_batches(1), None)
            width = 0 if first is None else len(first.column(0).flatten())
        rows = torch.empty((count, width), dtype=torch.from_numpy(np.empty(0, dtype)).dtype, device="meta")
        # Columns, and rows that are made of them.
        step = max(1, min(_MOST_READ, num_bytes // max(1, 2 * width * dtype.itemsize)))
        save_pieces(target, rows, _read_pieces(file.iter_batches(step), width, dtype, source, stamp))
    return target


def _read_pieces(batches: Iterator[Any], width: int, dtype: np.dtype[Any], source: Path, stamp: tuple[int, int, int]
                 ) -> Iterator[Tensor]:  # fmt: skip
    """Read the rows of a parquet file, piece by piece."""
    while True:
        with whole_file("source", PARQUET, source):
            batch = next(batches, None)
        if stamp != _look_at(source):
            raise FileError(f"{source} changed while it was read")
        if batch is None:
            return
        yield _join_columns(batch, width, dtype, source)


def _is_list(field: Any) -> bool:
    """Report whether a column has lists, of a fixed length or not."""
    return hasattr(field.type, "value_field")


def _look_at(path: Path) -> tuple[int, int, int]:
    """Return size, time of change and number of a file."""
    try:
        found = path.stat()
    except OSError as error:
        raise FileError(f"source must name a file that can be read, got {str(path)!r}: {error.strerror}") from error
    return found.st_size, found.st_mtime_ns, found.st_ino


def _join_columns(batch: Any, width: int, dtype: np.dtype[Any], source: Path) -> Tensor:
    """Return the rows `[n, width]` of some columns, or of a column of lists."""
    columns, count = batch.columns, batch.num_rows
    if _is_list(batch.schema.field(0)):
        columns = [columns[0], columns[0].flatten()]
        if count > 0 and (set(columns[0].value_lengths().to_pylist()) != {width}):
            raise ArgumentError(f"source must have lists of {width} numbers, as in its first row, got others in "
                                f"{str(source)!r}")  # fmt: skip
    if any(column.null_count > 0 for column in columns):
        raise ArgumentError(f"source must have a number in each place, some are missing in {str(source)!r}")
    if len(columns) > len(batch.columns):
        rows = columns[-1].to_numpy(zero_copy_only=False).reshape(count, width)
    else:
        rows = np.stack([column.to_numpy(zero_copy_only=False) for column in columns], axis=1)
    # A view of a buffer of the file cannot be written, which torch warns about.
    return torch.from_numpy(np.array(rows, dtype))


def _make_header(file: RowFile, num_rows: int) -> bytes:
    """Return the header, whose length lets the rows begin at a page."""
    num_bytes = file.layout.num_bytes
    entries = {"__metadata__": {PACKED: "1"},
               "rows": {"dtype": _NAMES[file.layout.dtype], "shape": list(file.layout.shape),
                        "data_offsets": [0, num_bytes]},
               "order": {"dtype": "I64", "shape": [num_rows],
                         "data_offsets": [num_bytes, num_bytes + 8 * num_rows]}}  # fmt: skip
    text = json.dumps(entries).encode()
    text = text.ljust(-(-(8 + len(text)) // PAGE) * PAGE - 8)
    return struct.pack("<Q", len(text)) + text


def _find_done(journal: Path, partial: Path, facts: Mapping[str, Any], size: int) -> tuple[int, int]:
    """Return the number of rows that an interrupted call has written, and of rows of a piece if it had dealt them out.

    Both are 0 if there was no such call with these arguments.
    """
    try:
        known = json.loads(journal.read_text())
        if partial.stat().st_size == size and all(known[name] == value for name, value in facts.items()):
            return int(known["done"]), int(known["dealt"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return 0, 0


def _move_rows(file: RowFile, numbers: np.ndarray, handle: int, offset: int, done: int, dealt: int, num_bytes: int,
               journal: Path, facts: Mapping[str, Any]) -> None:  # fmt: skip
    """Write the rows that are not written yet, and after each piece the journal.

    Args:
        done, dealt: See `_find_done`.
    """
    count = len(numbers)
    row_bytes = file.layout.num_bytes // max(1, count)
    if row_bytes == 0:
        return
    reader, was_begun = RangeReader(file), dealt > 0
    step = dealt or min(count, max(1, num_bytes // row_bytes))
    # Rows of a piece are there twice while they are put in order.
    half = max(1, step // 2)
    num_pieces = -(-count // half)
    if done == dealt == 0 and num_pieces > 2 * _FEW_PIECES and half * row_bytes >= num_pieces * _LEAST_WRITE:
        step = dealt = half
        _deal_rows(reader, numbers, handle, offset, np.empty((step, row_bytes), np.uint8))
        os.fsync(handle)
        write_whole(journal, json.dumps({**facts, "done": 0, "dealt": dealt}))
    # A piece that an interrupted call has begun to write is read from the old file.
    rows = np.empty((step, row_bytes), np.uint8)
    piece = rows if dealt == 0 else np.empty_like(rows)
    first_dealt = count if dealt == 0 else done + (dealt if was_begun else 0)
    with Bar(count, f"packing {file.path.name}", "rows") as bar:
        bar.update(done)
        for begin in range(done, count, step):
            own = numbers[begin : begin + step]
            by_place = np.argsort(own)
            if begin >= first_dealt:
                _read_at(handle, rows[: len(own)].data.cast("B"), offset + begin * row_bytes)
                piece[by_place] = rows[: len(own)]
            else:
                reader.read(own[by_place], by_place, piece)
            _write_at(handle, piece[: len(own)].data.cast("B"), offset + begin * row_bytes)
            os.fsync(handle)
            write_whole(journal, json.dumps({**facts, "done": begin + len(own), "dealt": dealt}))
            bar.update(len(own))


def _deal_rows(reader: RangeReader, numbers: np.ndarray, handle: int, offset: int, rows: np.ndarray) -> None:
    """Write all rows to the pieces of the new file that they belong to, in the order of the old file within a piece.

    The old file is read once, in order. With the rows of each piece read from all over the file, a disk would serve as
    many requests as there are rows.

    Args:
        numbers: Row of the old file for each row of the new one, int64 `[N]`.
    """
    count, (step, row_bytes) = len(numbers), rows.shape
    piece_of_row = np.empty(count, np.int32)
    piece_of_row[numbers] = np.arange(count) // step
    filled = np.arange(0, count, step)
    with Bar(count, f"dealing out {reader.file.path.name}", "rows") as bar:
        for begin in range(0, count, step):
            own = np.arange(begin, min(begin + step, count))
            pieces = piece_of_row[own]
            by_piece = np.argsort(pieces, kind="stable")
            slots = np.empty_like(by_piece)
            slots[by_piece] = np.arange(len(own))
            reader.read(own, slots, rows)
            sizes = np.bincount(pieces, minlength=len(filled))
            ends = np.cumsum(sizes)
            for piece in np.flatnonzero(sizes):
                part = rows[ends[piece] - sizes[piece] : ends[piece]]
                _write_at(handle, part.data.cast("B"), offset + int(filled[piece]) * row_bytes)
            filled += sizes
            bar.update(len(own))


def _read_at(handle: int, target: memoryview, place: int) -> None:
    while len(target) > 0:
        count = os.preadv(handle, [target], place)
        if count == 0:
            raise OSError(errno.EIO, "the file ends before its rows")
        target, place = target[count:], place + count


def _write_at(handle: int, data: memoryview, place: int) -> None:
    while len(data) > 0:
        count = os.pwrite(handle, data, place)
        data, place = data[count:], place + count

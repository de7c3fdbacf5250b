"""Edge lists as streams: from tensors and arrays, `.npy` files and parquet files, chunk after chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, strided

from pyg_direct.errors import NPY, PARQUET, ArgumentError, ArgumentTypeError, needs_extra, whole_file

# Rows that a parquet file is read by.
_ROWS = 1 << 20


class EdgeSource:
    """Edges in the order of their ids.

    Args:
        edges: Integers `[2, E]` or `[E, 2]`, sources first: a tensor, an array or a `.npy` file (one of shape
            `[2, 2]` is read as `[2, E]`); (sources, targets), each `[E]`; or a parquet file, whose first two columns
            are the ends: integers, or strings.

    Raises:
        ArgumentError, ArgumentTypeError: something else.
    """

    def __init__(self, edges: Any) -> None:
        self._files: list[Any] = []
        # What the edges are read from: files or arrays.
        self.files: list[Any] = []
        if isinstance(edges, (str, PathLike)):
            path = Path(edges).resolve()
            if not path.exists():
                raise ArgumentError(f"edges must name a file, got {str(path)!r}, which is not there")
            if path.suffix == ".npy":
                self._ends = _split(load_array(path, "edges"))
            elif path.suffix == ".parquet" or path.is_dir():
                self._open_parquet(path)
                return
            else:
                raise ArgumentError(f"edges must be a .npy or a .parquet file, got {str(path)!r}")
        elif isinstance(edges, (tuple, list)) and len(edges) == 2:
            ends = [load_array(end, "edges") for end in edges]
            if ends[0].ndim != 1 or ends[0].shape != ends[1].shape:
                raise ArgumentError(f"edges must be two arrays of one length, got {ends[0].shape} and {ends[1].shape}")
            self._ends = (ends[0], ends[1])
        else:
            self._ends = _split(load_array(edges, "edges"))
        for end in self._ends:
            if end.dtype.kind not in "iu":
                raise ArgumentTypeError(f"edges must hold integers, got {end.dtype}")
        self.files = list(self._ends)
        self.num_edges, self.has_names = len(self._ends[0]), False

    def _open_parquet(self, path: Path) -> None:
        with needs_extra("a parquet file", "distributed"):
            from pyarrow.parquet import ParquetFile

        self.files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        self._files = [_read_parquet(partial(ParquetFile, file), file) for file in self.files]
        if not self._files:
            raise ArgumentError(f"edges must hold .parquet files, got {str(path)!r} without")
        schemas = [file.schema_arrow for file in self._files]
        if any(len(schema) < 2 for schema in schemas):
            raise ArgumentError(f"edges must have two columns, got {schemas[0].names} in {str(path)!r}")
        kinds = {str(schema.field(i).type) for schema in schemas for i in (0, 1)}
        self.has_names = all(kind in ("string", "large_string") for kind in kinds)
        if not self.has_names and not all(kind.removeprefix("u").startswith("int") for kind in kinds):
            raise ArgumentTypeError(f"edges must have two columns of integers or of strings, got {sorted(kinds)}")
        self.num_edges = sum(file.metadata.num_rows for file in self._files)

    def read(self, size: int, begin: int = 0) -> Iterator[tuple[int, Any, Any]]:
        """(id of the first edge, sources, targets) of up to `size` edges at a time, from edge `begin` on.

        Ends are arrays of integers, or of pyarrow where they are names.
        """
        if not self._files:
            for at in range(begin, self.num_edges, size):
                yield at, self._ends[0][at : at + size], self._ends[1][at : at + size]
            return
        at = 0
        for path, file in zip(self.files, self._files, strict=True):
            rows = file.metadata.num_rows
            if at + rows <= begin:
                at += rows
                continue
            batches = file.iter_batches(
                _ROWS if self.has_names else min(size, _ROWS), columns=file.schema_arrow.names[:2]
            )
            while (batch := _read_parquet(partial(next, batches, None), path)) is not None:
                if at + batch.num_rows > begin:
                    part = batch.slice(max(0, begin - at))
                    yield max(at, begin), *(self._column(part, i) for i in (0, 1))
                at += batch.num_rows

    def _column(self, batch: Any, index: int) -> Any:
        column = batch.column(index)
        if column.null_count:
            raise ArgumentError(f"edges must have two ends each, got {column.null_count} missing in column {index}")
        return column if self.has_names else column.to_numpy(zero_copy_only=False)

    def largest_ids(self, size: int) -> tuple[int, int]:
        """The largest source and target; -1 without edges."""
        high = [-1, -1]
        for _, *ends in self.read(size):
            high = [max(h, int(end.max())) if len(end) else h for h, end in zip(high, ends, strict=True)]
        return high[0], high[1]


class NamedSource:
    """Edges whose ends have names, as numbers: the place of a name among those of its type, by first appearance.

    Args:
        source: The edges.
        names: The names of the types at both ends; grows while edges are read.
    """

    def __init__(self, source: EdgeSource, names: Sequence[dict[str, int]]) -> None:
        self._source, self._names = source, names
        self.num_edges, self.files, self.has_names = source.num_edges, source.files, True

    def read(self, size: int, begin: int = 0) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """As `EdgeSource.read`."""
        for at, *ends in self._source.read(size, begin):
            yield at, _number(ends[0], self._names[0]), _number(ends[1], self._names[1])

    def largest_ids(self, size: int) -> tuple[int, int]:
        """The largest numbers at both ends."""
        for _ in self.read(size):
            pass
        return len(self._names[0]) - 1, len(self._names[1]) - 1


def _number(names: Any, known: dict[str, int]) -> np.ndarray:
    coded = names.dictionary_encode()
    numbers = [known.setdefault(name, len(known)) for name in coded.dictionary.to_pylist()]
    return np.array(numbers, dtype=np.int64)[coded.indices.to_numpy(zero_copy_only=False)]


def _read_parquet(read: Callable[[], Any], path: Path) -> Any:
    """What pyarrow reads of a file."""
    with whole_file("edges", PARQUET, path):
        return read()


def load_array(value: Any, name: str) -> np.ndarray:
    """A tensor, an array or a `.npy` file (mapped, not read) as an array.

    Args:
        value: It.
        name: Of the argument that it is.

    Raises:
        ArgumentError, ArgumentTypeError: something else.
    """
    if isinstance(value, (str, PathLike)):
        return _load(value, name)
    if isinstance(value, Tensor):
        if value.layout != strided or value.is_meta:
            kind = "without values" if value.is_meta else f"of layout {value.layout}"
            raise ArgumentTypeError(f"{name} must be dense where it is a tensor, got one {kind}")
        value = value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray):
        raise ArgumentTypeError(f"{name} must be a tensor, an array or a file, got {type(value).__name__}")
    return value


def _load(path: str | PathLike[str], name: str) -> np.ndarray:
    if not Path(path).exists():
        raise ArgumentError(f"{name} must name a file, got {str(path)!r}, which is not there")
    with whole_file(name, NPY, path):
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        array.close()
        raise ArgumentError(f"{path} must hold an array of numbers, got an archive")
    return array


def _split(edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if edges.ndim == 2 and edges.shape[0] == 2:
        return edges[0], edges[1]
    if edges.ndim == 2 and edges.shape[1] == 2:
        return edges[:, 0], edges[:, 1]
    raise ArgumentError(f"edges must have shape [2, E] or [E, 2], got {edges.shape}")

"""Checked inputs of a partition: edges, rows, times and weights by type, for graphs with and without types.

Edge lists are streams of chunks (`EdgeSource`), read from tensors, arrays, `.npy` files and parquet files.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, strided

from pyg_direct.errors import NPY, PARQUET, ArgumentError, ArgumentTypeError, needs_extra, whole_file
from pyg_direct.graph.hetero_topo import LINKS, NODES, EdgeType, as_weights

# Rows read from a parquet file at a time.
_ROWS = 1 << 20


class EdgeSource:
    """Edges in the order of their ids.

    Args:
        edges: Integers `[2, E]` or `[E, 2]`, sources first: a tensor, an array or a `.npy` file (one of shape `[2, 2]`
            is read as `[2, E]`); (sources, targets), each `[E]`; or a parquet file, whose first two columns are the
            ends, integers or strings.
    """

    def __init__(self, edges: Any) -> None:
        self._files: list[Any] = []
        # Sources of the edges: files or arrays.
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
        """Iterate over (id of the first edge, sources, targets) of up to `size` edges at a time, from edge `begin` on.

        Ends are arrays of integers, or pyarrow arrays of names.
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
        """Return the largest source and target; -1 without edges."""
        high = [-1, -1]
        for _, *ends in self.read(size):
            high = [max(h, int(end.max())) if len(end) else h for h, end in zip(high, ends, strict=True)]
        return high[0], high[1]


class NamedSource:
    """Edges whose ends have names; numbers count the names of a type by first appearance.

    Args:
        names: The names of the types at both ends; extended while edges are read.
    """

    def __init__(self, source: EdgeSource, names: Sequence[dict[str, int]]) -> None:
        self._source, self._names = source, names
        self.num_edges, self.files, self.has_names = source.num_edges, source.files, True

    def read(self, size: int, begin: int = 0) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Iterate as `EdgeSource.read`."""
        for at, *ends in self._source.read(size, begin):
            yield at, _number(ends[0], self._names[0]), _number(ends[1], self._names[1])

    def largest_ids(self, size: int) -> tuple[int, int]:
        """Return the largest numbers at both ends."""
        for _ in self.read(size):
            pass
        return len(self._names[0]) - 1, len(self._names[1]) - 1


def _number(names: Any, known: dict[str, int]) -> np.ndarray:
    coded = names.dictionary_encode()
    numbers = [known.setdefault(name, len(known)) for name in coded.dictionary.to_pylist()]
    return np.array(numbers, dtype=np.int64)[coded.indices.to_numpy(zero_copy_only=False)]


def _read_parquet(read: Callable[[], Any], path: Path) -> Any:
    """Call a reader of pyarrow, with errors that name the file."""
    with whole_file("edges", PARQUET, path):
        return read()


def load_array(value: Any, name: str) -> np.ndarray:
    """Convert a tensor, an array or a `.npy` file (mapped, not read) to an array."""
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


_SIZE = 1 << 20
# Names of attributes that batches always have, in addition to rows.
_TAKEN = ("adj_t", "batch", "batch_size", "e_id", "edge_index", "edge_label", "edge_label_index", "input_id", "n_id",
          "num_nodes", "num_sampled_edges", "num_sampled_nodes")  # fmt: skip


@dataclass
class Inputs:
    """Inputs of a partition, by type; arrays may be memory maps.

    Attributes:
        method: A name, or the part of each node by type.
        names: Numbers of names by type, if edges have names.
        weight_dtypes: float32, or float64 if float32 cannot represent every weight of a relation exactly.
    """

    is_homogeneous: bool
    num_nodes: dict[str, int]
    edges: dict[EdgeType, EdgeSource | NamedSource]
    node_rows: dict[str, dict[str, np.ndarray]]
    edge_rows: dict[EdgeType, dict[str, np.ndarray]]
    node_time: dict[str, np.ndarray]
    edge_time: dict[EdgeType, np.ndarray]
    edge_weight: dict[EdgeType, np.ndarray]
    method: str | dict[str, np.ndarray]
    names: dict[str, dict[str, int]]
    weight_dtypes: dict[EdgeType, Any]

    def identify(self) -> dict[str, Any]:
        """Identify the inputs by cheap facts: sizes, and files with their modification times."""
        return {
            "num_nodes": list(self.num_nodes.items()),
            "edges": [[*kind, source.num_edges, [_stamp(file) for file in source.files]]
                      for kind, source in self.edges.items()],
            "rows": [[str(kind), name, _stamp(array)] for part in (self.node_rows, self.edge_rows)
                     for kind, rows in part.items()  # type: ignore[attr-defined]
                     for name, array in rows.items()],
            "times": [[what, str(kind), _stamp(array)]
                      for what in ("node_time", "edge_time", "edge_weight")
                      for kind, array in getattr(self, what).items()],
            "method": self.method if isinstance(self.method, str) else [
                [kind, _stamp(array)] for kind, array in self.method.items()],
        }  # fmt: skip


def _stamp(value: Any) -> Any:
    """Identify a file or a mapped array by size, time and position; other arrays by a checksum."""
    file = getattr(value, "filename", None) or value
    if isinstance(file, (str, PathLike)):
        stat = Path(file).stat()
        return [str(file), stat.st_size, stat.st_mtime_ns, [] if file is value else _find_place(value)]
    return [list(value.shape), str(value.dtype), zlib.crc32(np.ascontiguousarray(value).view(np.uint8).data)]


def _find_place(array: Any) -> list[Any]:
    """Find the position of a mapped array within its file."""
    begin = array.ctypes.data - np.frombuffer(array._mmap, np.uint8).ctypes.data
    return [array.offset, begin, list(array.shape), list(array.strides), str(array.dtype)]


def read_inputs(edges: Any, num_nodes: Any, node_rows: Any, edge_rows: Any, node_time: Any, edge_time: Any,
                edge_weight: Any, method: Any) -> Inputs:  # fmt: skip
    """Check the arguments of `partition_graph`."""
    if node_time is not None and edge_time is not None:
        raise ArgumentError("give either node_time or edge_time, not both")
    is_homogeneous = not isinstance(edges, Mapping)
    if is_homogeneous:
        edges = {LINKS: edges}
        num_nodes = {NODES: num_nodes}
        node_rows, edge_rows = ({kind: {} if rows is None else rows}
                                for kind, rows in ((NODES, node_rows), (LINKS, edge_rows)))  # fmt: skip
        node_time, edge_time, edge_weight = (
            None if value is None else {kind: value}
            for kind, value in ((NODES, node_time), (LINKS, edge_time), (LINKS, edge_weight))
        )
        method = method if isinstance(method, str) else {NODES: method}
    if num_nodes is not None and not isinstance(num_nodes, Mapping):
        raise ArgumentTypeError(f"num_nodes must map types to their numbers, got {num_nodes!r}")
    sources = {_check_relation(kind): EdgeSource(value) for kind, value in edges.items()}
    num_nodes = dict.fromkeys(dict.fromkeys(kind[end] for kind in sources for end in (0, 2))) | dict(num_nodes or {})
    names: dict[str, dict[str, int]] = {}
    read: dict[EdgeType, EdgeSource | NamedSource] = {}
    for edge_type, source in sources.items():
        read[edge_type] = source
        if source.has_names:
            read[edge_type] = NamedSource(source, [names.setdefault(edge_type[end], {}) for end in (0, 2)])
        elif edge_type[0] in names or edge_type[2] in names:
            raise ArgumentError(f"edges must have names or numbers for all relations of a type, got numbers for "
                                f"{edge_type}")  # fmt: skip
    if is_homogeneous:
        _check_apart(node_rows, edge_rows)
    _find_sizes(num_nodes, read)
    types, relations = list(num_nodes), list(read)
    counts = {kind: source.num_edges for kind, source in read.items()}
    weights = {kind: _weights(f"edge_weight[{kind}]", value, counts[kind])
               for kind, value in _by_kind("edge_weight", edge_weight, relations).items()}  # fmt: skip
    return Inputs(
        is_homogeneous, num_nodes, read,
        {kind: {name: _rows(f"node_rows[{kind!r}][{name!r}]", rows, num_nodes[kind]) for name, rows in part.items()}
         for kind, part in _rows_by_kind("node_rows", node_rows, types)},
        {kind: {name: _rows(f"edge_rows[{kind}][{name!r}]", rows, counts[kind]) for name, rows in part.items()}
         for kind, part in _rows_by_kind("edge_rows", edge_rows, relations)},
        {kind: _times(f"node_time[{kind!r}]", value, num_nodes[kind])
         for kind, value in _by_kind("node_time", node_time, types).items()},
        {kind: _times(f"edge_time[{kind}]", value, counts[kind])
         for kind, value in _by_kind("edge_time", edge_time, relations).items()},
        {kind: array for kind, (array, _) in weights.items()},
        method if isinstance(method, str) else _parts(method, num_nodes),
        names,
        {kind: dtype for kind, (_, dtype) in weights.items()},
    )  # fmt: skip


def _check_relation(kind: Any) -> EdgeType:
    if not isinstance(kind, tuple) or len(kind) != 3 or not all(isinstance(name, str) for name in kind):
        raise ArgumentTypeError(f"edges must map (source type, name, target type) to edges, got the key {kind!r}")
    return kind


def _check_apart(node_rows: Any, edge_rows: Any) -> None:
    """Refuse equal names of rows of nodes and of edges: without types, a batch keeps them in one store."""
    nodes, edges = node_rows[NODES], edge_rows[LINKS]
    twice = sorted(set(nodes) & set(edges)) if isinstance(nodes, Mapping) and isinstance(edges, Mapping) else []
    if twice:
        raise ArgumentError(f"edge_rows must have other names than node_rows, got {twice[0]!r} in both")


def _find_sizes(num_nodes: dict[str, Any], edges: Mapping[EdgeType, EdgeSource | NamedSource]) -> None:
    """Compute missing numbers of nodes, and check given ones."""
    highest = dict.fromkeys(num_nodes, -1)
    for edge_type, source in edges.items():
        ends = (edge_type[0], edge_type[2])
        # Names get their numbers in this pass.
        if source.has_names or any(num_nodes[end] is None for end in ends):
            for end, high in zip(ends, source.largest_ids(_SIZE), strict=True):
                highest[end] = max(highest[end], high)
    for kind, size in num_nodes.items():
        if size is None:
            num_nodes[kind] = highest[kind] + 1
        elif isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 0:
            raise ArgumentError(f"num_nodes must hold integers of at least 0, got {size!r} for {kind!r}")
        else:
            num_nodes[kind] = int(size)


def _by_kind(name: str, parts: Any, known: list[Any]) -> dict[Any, Any]:
    if parts is None:
        return {}
    if not isinstance(parts, Mapping):
        raise ArgumentTypeError(f"{name} must map types to their arrays, got {type(parts).__name__}")
    for kind in parts:
        if kind not in known:
            raise ArgumentError(f"{name} must name known types, got {kind!r} of {known}")
    return dict(parts)


def _rows(name: str, value: Any, count: int) -> np.ndarray:
    if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
        raise ArgumentTypeError(f"{name} must have a dtype that NumPy knows, got {value.dtype}")
    array = load_array(value, name)
    if array.ndim == 0 or len(array) != count:
        raise ArgumentError(f"{name} must have {count} rows, got shape {array.shape}")
    if array.dtype.kind not in "biuf":
        raise ArgumentTypeError(f"{name} must hold numbers, got {array.dtype}")
    try:
        torch.from_numpy(np.empty(0, array.dtype.newbyteorder("=")))
    except TypeError as error:
        raise ArgumentTypeError(f"{name} must have a dtype that torch knows, got {array.dtype}") from error
    return array


def _times(name: str, value: Any, count: int) -> np.ndarray:
    array = _rows(name, value, count)
    if array.ndim != 1:
        raise ArgumentError(f"{name} must have shape ({count},), got {array.shape}")
    if array.dtype.kind not in "iu":
        raise ArgumentTypeError(f"{name} must hold integers, got {array.dtype}")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and len(array) and int(array.max()) >= 2**63:
        raise ArgumentError(f"{name} must be below 2**63, got {array.max()}")
    return array


def _parts(method: Any, num_nodes: Mapping[str, int]) -> dict[str, np.ndarray]:
    given = _by_kind("method", method, list(num_nodes))
    for kind, size in num_nodes.items():
        if size and kind not in given:
            raise ArgumentError(f"method must have the part of each node of all types, got none for {kind!r}")
    return {kind: _times(f"method[{kind!r}]", value, num_nodes[kind]) for kind, value in given.items()}


def _rows_by_kind(name: str, parts: Any, known: list[Any]) -> list[tuple[Any, Mapping[str, Any]]]:
    found = _by_kind(name, parts, known)
    for kind, part in found.items():
        if not isinstance(part, Mapping) or not all(isinstance(attribute, str) for attribute in part):
            raise ArgumentTypeError(f"{name}[{kind!r}] must map names of attributes to rows, got {type(part).__name__}")
        for attribute in part:
            if not attribute:
                raise ArgumentError(f"{name}[{kind!r}] must have names of at least one letter, got {attribute!r}")
            if attribute in _TAKEN:
                raise ArgumentError(f"{name}[{kind!r}] must have other names than what batches hold beside rows, got "
                                    f"{attribute!r}")  # fmt: skip
    return list(found.items())


def _weights(name: str, value: Any, count: int) -> tuple[np.ndarray, np.dtype[Any]]:
    """Return (weights, their dtype on disk)."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
        value = value.float()
    array, dtype = _rows(name, value, count), np.dtype(np.float32)
    if array.ndim != 1:
        raise ArgumentError(f"{name} must have shape ({count},), got {array.shape}")
    for begin in range(0, count, _SIZE):
        part = as_weights(torch.from_numpy(array[begin : begin + _SIZE].astype(np.float64))).numpy()
        wrong = ~((part >= 0) & (part < np.inf))
        if wrong.any():
            raise ArgumentError(f"{name} must be finite and not negative, got {float(part[wrong][0])}")
        dtype = np.promote_types(dtype, part.dtype)
    return array, dtype

"""`partition_graph`: partitions a graph out of core, in bounded memory; continues after a crash.

Completed steps and pieces are not repeated. The edges of a relation are first distributed over buckets on disk, one for
each part (`EdgeBuckets`). Each bucket then becomes the rows of its part.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pyg_direct.cache_folder import sync_folder
from pyg_direct.distributed.partitioning.files import (
    ArrayFile,
    Journal,
    OpenFiles,
    closing_all,
    create_map,
    write_array,
)
from pyg_direct.distributed.partitioning.inputs import Inputs, read_inputs
from pyg_direct.distributed.partitioning.manifest import (
    Book,
    EdgeEntry,
    Manifest,
    NodeEntry,
    check_num_parts,
    part_folder,
    table_dtype,
)
from pyg_direct.errors import ArgumentError, IdError, needs_extra
from pyg_direct.graph.hetero_topo import EdgeType
from pyg_direct.graph.metis import Stream, assign_by_metis, is_even
from pyg_direct.kernels.local_ids.csr import count_rows_cpu
from pyg_direct.kernels.sampling.remote_edges import cluster_edges_cpu, count_ties_cpu, group_buckets_cpu
from pyg_direct.ops.argument_checks import check_flag
from pyg_direct.ops.local_ids.build_csr import order_rows
from pyg_direct.ops.run_kernel import cpu_chunks, run_cpu
from pyg_direct.progress import Bar, announce
from pyg_direct.runtime.host.host_memory import parse_size
from pyg_direct.sampling.random_key import check_seed

_LEAST_MEMORY = 1 << 24


def partition_graph(
    out: str | PathLike[str],
    edges: Any,
    num_parts: int,
    *,
    num_nodes: int | Mapping[str, int | None] | None = None,
    method: str | Any = "hash",
    direction: str = "in",
    node_rows: Mapping[str, Any] | None = None,
    edge_rows: Mapping[Any, Any] | None = None,
    node_time: Any = None,
    edge_time: Any = None,
    edge_weight: Any = None,
    memory: int | str = "1G",
    seed: int = 0,
    progress: bool = False,
) -> Manifest:
    """Write a graph in `num_parts` parts into the folder `out`, in the format specified in `FORMAT.md`.

    A node belongs to one part, with its rows and its edges (the in-edges with `direction="in"`). Edges are read as a
    stream. Memory in addition to the given arrays is `memory`, 4 bytes a node mapped from disk, and the memory of the
    method. The folder is published whole, by a rename; until then its name ends with `.partial`. A call with the same
    arguments continues an interrupted one.

    Args:
        out: A folder that does not exist yet.
        edges: An input of `EdgeSource`; with types, one per relation (source type, name, target type).
        num_parts: Number of parts P.
        num_nodes: N, by type with types; by default one more than the largest id.
        method: `hash` (of the id), `range` (of ids), `metis` or `streaming`; or the part of each node, integers `[N]`
            (by type). `metis` cuts the fewest edges, by pymetis, with the edges in memory. `streaming` cuts few edges,
            in passes over the edges, with 32 bytes a node and up to 1 GiB (after 2PS, Mayer et al., ICDE 2022).
        direction: `in` or `out`: edges of its nodes that a part holds; samplers of PyG's loaders need `in`.
        node_rows: Rows of nodes by attribute name: tensors, arrays or `.npy` files `[N, ...]`; by type with types.
            Names of attributes that every batch has, such as `n_id`, are refused; so are names in `edge_rows` without
            types.
        edge_rows: Rows of edges by attribute name, by edge id, `[E, ...]`; by relation with types.
        node_time, edge_time: Times, integers `[N]` or `[E]`, by type or relation with types; not both.
        edge_weight: Weights, `[E]`, by relation with types.
        memory: Bytes, or `"1G"`: memory for pieces in work.
        seed: Seed of METIS.
        progress: Show progress bars.

    Returns:
        The manifest of the partition.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.

    Example:
        >>> ring = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
        >>> manifest = partition_graph("ring", ring, num_parts=2, method="range", node_rows={"x": torch.eye(4)})
        >>> manifest.part_nodes, manifest.num_cut  # nodes of each part, and edges between parts
        ([[2], [2]], 2)
    """
    num_parts = check_num_parts(num_parts)
    if isinstance(method, str) and method not in METHODS:
        raise ArgumentError(f"method must be one of {', '.join(METHODS)}, or the part of each node, got {method!r}")
    if direction not in ("in", "out"):
        raise ArgumentError(f"direction must be 'in' or 'out', got {direction!r}")
    check_flag("progress", progress)
    check_seed(seed)
    piece = parse_size(memory, None, "memory")
    if piece < _LEAST_MEMORY:
        raise ArgumentError(f"memory must be at least {_LEAST_MEMORY}, got {memory!r}")
    folder = Path(out)
    if folder.exists():
        raise ArgumentError(f"out must not exist yet, got {str(folder)!r}")
    inputs = read_inputs(edges, num_nodes, node_rows, edge_rows, node_time, edge_time, edge_weight, method)
    partial = folder.with_name(folder.name + ".partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    with _writing(folder, partial):
        partial.mkdir(exist_ok=True)
        journal = Journal(partial, {**inputs.identify(), "num_parts": num_parts, "direction": direction, "seed": seed})
        if journal.begun == "same":
            announce(f"{partial} holds work of an earlier run: going on from there")
        elif journal.begun == "other":
            announce(f"{partial} was begun with other arguments or cannot be gone on with: it is begun anew")
        manifest = Builder(partial, journal, inputs, num_parts, direction, piece, seed, progress).build()
        sync_folder(partial)
        os.rename(partial, folder)
        # After the rename: a crash in between would leave a `.partial` folder without a journal, which no run could
        # continue.
        Journal.remove(folder)
        sync_folder(folder.parent)
    return manifest


@contextlib.contextmanager
def _writing(folder: Path, partial: Path) -> Iterator[None]:
    """Keep other processes from writing the same partition, if the file system supports locks."""
    from filelock import FileLock, Timeout

    path = partial.with_name(partial.name + ".lock")
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ArgumentError(f"out must not be written by anybody else meanwhile, got {str(folder)!r}") from error
    except (OSError, NotImplementedError):
        # This file system has no locks.
        pass
    try:
        # Another process may have just written it.
        if folder.exists():
            raise ArgumentError(f"out must not exist yet, got {str(folder)!r}")
        yield
    finally:
        if folder.exists():
            path.unlink(missing_ok=True)
        lock.release()


METHODS = ("hash", "range", "metis", "streaming")
# Communities of at most this share of a part's edge ends can be packed into equal parts.
_COMMUNITIES_A_PART = 8
# Passes over the edges that move whole communities to the part with most of their ties, and bytes for the ties.
_REFINEMENTS = 3
_TIES_BYTES = 1 << 30
# Communities processed at a time.
_COMMUNITIES_AT_ONCE = 1 << 20


def assign_by_stream(stream: Stream, num_nodes: int, num_edges: int, num_parts: int) -> np.ndarray:
    """Assign a part to each node, int64 `[N]`: communities found in one pass, packed into parts of equal numbers of
    nodes.

    After the two phases of 2PS (Mayer et al., ICDE 2022): streaming clustering, then clusters to parts, here also by
    their ties. Degrees count only the edges seen so far. If early edges make a community too large, the pass is
    repeated with all degrees, as in 2PS; communities that are still too large are cut. Memory is 32 bytes a node, and
    up to 1 GiB for ties.
    """
    if num_parts == 1 or num_nodes == 0:
        return np.zeros(num_nodes, np.int64)
    degree = np.zeros(num_nodes, np.int64)
    largest = max(1, 2 * num_edges // (num_parts * _COMMUNITIES_A_PART))
    labels, sizes = _cluster(stream, degree, largest)
    parts = _pack(sizes, num_parts)
    if not is_even(parts, sizes, num_parts):
        del labels, sizes, parts
        # Each edge is counted twice in the second pass.
        labels, sizes = _cluster(stream, degree, 2 * largest)
        parts = _pack(sizes, num_parts)
    del degree
    if not is_even(parts, sizes, num_parts):
        sizes = _cut(labels, sizes, -(-num_nodes // (num_parts * _COMMUNITIES_A_PART)))
        parts = _pack(sizes, num_parts)
    # In addition to the ties, up to four words of each community that moves.
    if len(sizes) * (num_parts + 4) * 8 <= _TIES_BYTES:
        for _ in range(_REFINEMENTS):
            ties = np.zeros((len(sizes), num_parts), np.int64)
            table = parts[labels]
            for sources, targets in stream():
                run_cpu(count_ties_cpu, sources, targets, table, labels, cpu_chunks(), ties)
            del table
            _move(parts, sizes, ties)
    return parts[labels]


def _cluster(stream: Stream, degree: np.ndarray, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (number of each node's community, their sizes); `degree` has the counts so far, and is increased."""
    volume, community = degree.copy(), np.arange(len(degree))
    for sources, targets in stream():
        run_cpu(cluster_edges_cpu, sources, targets, degree, community, volume, largest)
    del volume
    return _number(community)


def _cut(labels: np.ndarray, sizes: np.ndarray, most: int) -> np.ndarray:
    """Cut communities of more than `most` nodes into pieces of consecutive nodes, in place; return their sizes."""
    order, place = np.argsort(labels, kind="stable"), np.arange(len(labels))
    place -= np.repeat(np.cumsum(sizes) - sizes, sizes)
    place //= most
    pieces = -(-sizes // most)
    place += np.repeat(np.cumsum(pieces) - pieces, sizes)
    labels[order] = place
    return np.bincount(labels)


def _number(community: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (number of each node's community among the non-empty ones, in place; their sizes)."""
    counts = np.bincount(community, minlength=len(community))
    sizes = counts[counts > 0]
    # `np.unique` would sort, with five times the memory; communities are named by nodes.
    numbers = np.cumsum(counts > 0, out=counts)
    numbers -= 1
    return np.take(numbers, community, out=community, mode="clip"), sizes


def _pack(sizes: np.ndarray, num_parts: int) -> np.ndarray:
    """Return the part of each community: the largest first, to the part with the fewest nodes."""
    parts, loads = np.zeros(len(sizes), np.int64), np.zeros(num_parts, np.int64)
    several = np.flatnonzero(sizes > 1)
    for item in several[np.argsort(-sizes[several], kind="stable")]:
        part = int(loads.argmin())
        parts[item] = part
        loads[part] += sizes[item]
    single, at = np.flatnonzero(sizes == 1), 0
    # Single nodes fill up the parts to equal loads.
    for part, room in enumerate(np.maximum(-(-sizes.sum() // num_parts) - loads, 0).tolist()):
        parts[single[at : at + room]] = part
        at += room
    return parts


def _move(parts: np.ndarray, sizes: np.ndarray, ties: np.ndarray) -> None:
    """Move communities to the part with most of their ties, as far as it has room; the largest gains first."""
    num_parts = ties.shape[1]
    loads = np.bincount(parts, weights=sizes, minlength=num_parts).astype(np.int64)
    capacity = int(1.03 * sizes.sum() / num_parts) + 1
    found = [
        _find_gains(parts[at : at + _COMMUNITIES_AT_ONCE], ties[at : at + _COMMUNITIES_AT_ONCE], at)
        for at in range(0, len(parts), _COMMUNITIES_AT_ONCE)
    ]
    candidates, gains, best = map(np.concatenate, zip(*found, strict=True))
    for at in torch.from_numpy(gains).argsort(descending=True, stable=True).tolist():
        item, part = candidates[at], best[at]
        if loads[part] + sizes[item] <= capacity:
            loads[parts[item]] -= sizes[item]
            loads[part] += sizes[item]
            parts[item] = part


def _find_gains(parts: np.ndarray, ties: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find (communities with most ties to another part, counted from `first`; their gain in ties; the part)."""
    gains = ties.max(1) - np.take_along_axis(ties, parts[:, None], 1)[:, 0]
    items = np.flatnonzero(gains > 0)
    return items + first, gains[items], ties[items].argmax(1)


def group(buckets: np.ndarray, num_buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """Group items by bucket, stable: (positions of items by bucket, first position of each bucket and the end)."""
    counts, order = np.zeros((cpu_chunks(), num_buckets), np.int64), np.empty(len(buckets), np.int32)
    run_cpu(group_buckets_cpu, buckets, counts, order)
    return order, np.concatenate([[0], counts[-1]])


class EdgeBuckets:
    """Files of edges by part, and their conversion to rows."""

    def __init__(self, work: Path, number: int, num_parts: int, inputs: Inputs, edge_type: EdgeType,
                 reached: str) -> None:  # fmt: skip
        self._work, self._number, self._num_parts = work, number, num_parts
        self._weight, self._time = inputs.edge_weight.get(edge_type), inputs.edge_time.get(edge_type)
        self._node_time = inputs.node_time.get(reached)
        self._rows = list(inputs.edge_rows.get(edge_type, {}).values())
        node_dtype = np.int32 if inputs.num_nodes[reached] < 2**31 else np.int64
        edge_dtype = np.int32 if inputs.edges[edge_type].num_edges < 2**31 else np.int64
        self._columns: dict[str, Any] = {"row": np.int64, "indices": node_dtype, "ids": edge_dtype}
        if max(inputs.num_nodes.values()) < 2**31:
            self._columns["row"] = np.int32
        if self._weight is not None:
            self._columns["weight"] = inputs.weight_dtypes[edge_type]
        if self._time is not None or self._node_time is not None:
            self._columns["time"] = np.int64
        self._files: dict[str, list[ArrayFile]] = {}
        self.lengths = [0] * num_parts

    def _path(self, name: str, part: int) -> Path:
        return self._work / f"bucket-{self._number}-{part}.{name}"

    def open(self, lengths: list[int]) -> None:
        """Continue after the edges that the buckets hold."""
        self.lengths, opened = list(lengths), OpenFiles()
        self._files = {name: [ArrayFile(self._path(name, part), dtype, None, had, opened)
                              for part, had in enumerate(lengths)]
                       for name, dtype in self._columns.items()}  # fmt: skip

    def append(self, begin: int, owners: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> None:
        """Distribute edges begin, begin + 1, ...: their parts, rows within these, and neighbors."""
        end = begin + len(owners)
        order, ends = group(owners, self._num_parts)
        values = {"row": rows, "indices": columns}
        if self._weight is not None:
            values["weight"] = np.asarray(self._weight[begin:end], self._columns["weight"])
        if self._time is not None:
            values["time"] = np.asarray(self._time[begin:end], np.int64)
        elif self._node_time is not None:
            values["time"] = np.asarray(self._node_time[columns], np.int64)
        for part, (low, high) in enumerate(itertools.pairwise(ends)):
            chosen = order[low:high]
            self._files["ids"][part].append(begin + chosen.astype(np.int64))
            for name, value in values.items():
                self._files[name][part].append(value[chosen])
            self.lengths[part] += len(chosen)

    def flush(self) -> None:
        """Flush all files to disk."""
        for file in (file for parts in self._files.values() for file in parts):
            file.flush()

    def __enter__(self) -> EdgeBuckets:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (file for parts in self._files.values() for file in parts):
            file.close()
        self._files = {}

    def compress(self, folder: Path, part: int, count: int, num_rows: int, most: int) -> None:
        """Write the rows of a part, `most` edges at a time."""
        bucket = {name: self._map(name, part, count) for name in self._columns}
        indptr = np.zeros(num_rows + 1, np.int64)
        for begin in range(0, count, most):
            run_cpu(count_rows_cpu, np.asarray(bucket["row"][begin : begin + most]), cpu_chunks(), indptr[1:])
        np.cumsum(indptr, out=indptr)
        stem = f"edge-{self._number}"
        write_array(folder / f"{stem}.indptr.npy", indptr)
        files = {name: ArrayFile(folder / f"{stem}.{name}.npy", dtype, (count,))
                 for name, dtype in self._columns.items() if name != "row"}  # fmt: skip
        low = 0
        with closing_all(files.values()):
            while low < num_rows:
                # As many rows as `most` edges fill, and at least one.
                high = max(low + 1, int(np.searchsorted(indptr, indptr[low] + most, "right")) - 1)
                self._write_rows(bucket, files, low, high, num_rows, most)
                low = high
        self._write_attributes(folder, part, count, most)

    def _map(self, name: str, part: int, count: int) -> np.ndarray:
        """Map a column of a bucket from its file."""
        dtype = self._columns[name]
        return np.memmap(self._path(name, part), dtype, "r", shape=(count,)) if count else np.empty(0, dtype)

    def drop(self, part: int) -> None:
        """Remove the bucket of a part."""
        for name in self._columns:
            self._path(name, part).unlink(missing_ok=True)

    def _write_rows(self, bucket: dict[str, np.ndarray], files: dict[str, ArrayFile], low: int, high: int,
                    num_rows: int, most: int) -> None:  # fmt: skip
        """Append rows low, ..., high - 1 of a bucket."""
        if low == 0 and high == num_rows:
            taken = {name: np.array(column) for name, column in bucket.items()}
        else:
            chosen = np.concatenate([begin + np.flatnonzero((piece >= low) & (piece < high))
                                     for begin in range(0, len(bucket["row"]), most)
                                     for piece in (np.asarray(bucket["row"][begin : begin + most]),)])  # fmt: skip
            taken = {name: np.asarray(column[chosen]) for name, column in bucket.items()}
        rows = taken.pop("row") - low
        by_time = None
        if "time" in taken:
            by_time = np.argsort(taken["time"], kind="stable")
            rows = rows[by_time]
        order = order_rows(torch.from_numpy(np.ascontiguousarray(rows)), high - low)[1].numpy()
        order = order if by_time is None else by_time[order]
        for name, column in taken.items():
            files[name].append(column[order])

    def _write_attributes(self, folder: Path, part: int, count: int, most: int) -> None:
        """Write rows of edges by ascending edge id, which is the order of the bucket."""
        if not self._rows:
            return
        stem, ids = f"edge-{self._number}", self._map("ids", part, count)
        files = [ArrayFile(folder / f"{stem}.sorted.npy", np.int64, (count,)),
                 *(ArrayFile(folder / f"{stem}.rows-{place}.npy", rows.dtype, (count, *rows.shape[1:]))
                   for place, rows in enumerate(self._rows))]  # fmt: skip
        with closing_all(files):
            for begin in range(0, count, most):
                taken = np.asarray(ids[begin : begin + most])
                files[0].append(taken)
                for file, rows in zip(files[1:], self._rows, strict=True):
                    file.append(rows[taken])


# Bytes per node or edge of a piece in work, in addition to its rows.
_NODE_BYTES, _EDGE_BYTES = 64, 160
_MOST_PIECE = 1 << 23
# Pieces between two notes of progress in the journal.
_NOTE_EVERY = 8


class Builder:
    """Writer of a partition.

    Args:
        folder, journal: The folder, and the journal of completed steps.
        num_parts, direction, seed: See `partition_graph`.
        memory: Bytes for pieces.
    """

    def __init__(self, folder: Path, journal: Journal, inputs: Inputs, num_parts: int, direction: str, memory: int,
                 seed: int, progress: bool) -> None:  # fmt: skip
        self._folder, self._journal, self._inputs, self._num_parts = folder, journal, inputs, num_parts
        self._direction, self._memory, self._seed, self._progress = direction, memory, seed, progress
        self._types, self._relations = list(inputs.num_nodes), list(inputs.edges)
        self._work = folder / "work"

    def build(self) -> Manifest:
        """Run all steps that are not completed, and return the manifest."""
        self._work.mkdir(exist_ok=True)
        for part in range(self._num_parts):
            (self._folder / part_folder(part)).mkdir(exist_ok=True)
        books = self._make_books()
        part_nodes = np.stack([self._write_nodes(number, books[kind]) for number, kind in enumerate(self._types)],
                              axis=1) if self._types else np.zeros((self._num_parts, 0), np.int64)  # fmt: skip
        written = [self._write_edges(number, books) for number in range(len(self._relations))]
        self._write_names()
        manifest = self._describe(books, part_nodes.tolist(), written)
        for file in self._work.iterdir():
            file.unlink()
        self._work.rmdir()
        manifest.write(self._folder, progress=self._progress)
        return manifest

    def _bar(self, what: str, total: int, done: int) -> Bar:
        return Bar(total, f"partition: {what}", done=done, is_shown=self._progress)

    def _make_books(self) -> dict[str, Book]:
        sizes, method, books = self._inputs.num_nodes, self._inputs.method, {}
        if method == "hash":
            return {kind: Book(size, self._num_parts) for kind, size in sizes.items()}
        if method == "range":
            return {kind: Book.by_range(size, self._num_parts) for kind, size in sizes.items()}
        if isinstance(method, str) and self._journal.get("books") is None:
            starts = self._starts()
            num_edges = sum(source.num_edges for source in self._inputs.edges.values())
            turns = itertools.count(1)

            def stream() -> Iterator[tuple[np.ndarray, np.ndarray]]:
                with self._bar(f"{method}, pass {next(turns)} over edges", num_edges, 0) as bar:
                    for ends in self._stream():
                        yield ends
                        bar.update(len(ends[0]))

            if method == "metis":
                tables = assign_by_metis(stream, int(starts[-1]), self._num_parts, self._seed, progress=self._progress)
            else:
                tables = assign_by_stream(stream, int(starts[-1]), num_edges, self._num_parts)
            given = {kind: tables[starts[i] : starts[i + 1]] for i, kind in enumerate(self._types)}
        else:
            given = method if isinstance(method, dict) else {}
        for number, kind in enumerate(self._types):
            file = self._folder / f"book-{number}.npy"
            if self._journal.get("books") is None:
                assigned = given.get(kind, np.zeros(sizes[kind], np.int64))
                books[kind] = Book.by_table(_checked(assigned, self._num_parts), self._num_parts)
                write_array(file, books[kind].table.numpy())  # type: ignore[union-attr]
            else:
                table = torch.from_numpy(np.load(file)).to(table_dtype(self._num_parts))
                books[kind] = Book(sizes[kind], self._num_parts, table=table)
        self._journal.note("books", True)
        return books

    def _starts(self) -> np.ndarray:
        """First id of each type in one id space of all types."""
        return np.concatenate([[0], np.cumsum([self._inputs.num_nodes[kind] for kind in self._types])])

    def _stream(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Iterate over all edges, in the one id space."""
        starts = dict(zip(self._types, self._starts().tolist(), strict=False))
        for edge_type, source in self._inputs.edges.items():
            sizes = [self._inputs.num_nodes[edge_type[end]] for end in (0, 2)]
            for _, *ends in source.read(self._piece(_EDGE_BYTES)):
                _check_ends(edge_type, ends, sizes)
                yield (np.asarray(ends[0], np.int64) + starts[edge_type[0]],
                       np.asarray(ends[1], np.int64) + starts[edge_type[2]])  # fmt: skip

    def _piece(self, item_bytes: int) -> int:
        return max(1, min(_MOST_PIECE, self._memory // item_bytes))

    def _write_nodes(self, number: int, book: Book) -> np.ndarray:
        """Write ids, rows and times of a node type; return the number of nodes of each part."""
        kind, size = self._types[number], self._inputs.num_nodes[self._types[number]]
        arrays = dict(self._node_files(number))
        row_bytes = sum(array[:1].nbytes if len(array) else 0 for array in arrays.values())
        piece = self._piece(_NODE_BYTES + 2 * row_bytes)
        counts = np.zeros(self._num_parts, np.int64)
        for begin in range(0, size, _MOST_PIECE):
            owners = book.owners_between(begin, min(begin + _MOST_PIECE, size))
            counts += np.bincount(owners, minlength=self._num_parts)
        step = f"nodes {number}"
        done, lengths = self._journal.get(step, [0, [0] * self._num_parts])
        if done == size and step in self._journal:
            return counts
        path, place_dtype = self._work / f"places-{number}.npy", np.int32 if counts.max(initial=0) < 2**31 else np.int64
        places = np.lib.format.open_memmap(path, "r+") if done else create_map(path, place_dtype, (size,))
        opened = OpenFiles()
        files = {name: [ArrayFile(self._folder / part_folder(part) / name, dtype, (int(counts[part]), *shape), had,
                                  opened) for part, had in enumerate(lengths)]
                 for name, dtype, shape in self._list_columns(number, arrays)}  # fmt: skip
        written = np.array(lengths)
        with closing_all(file for parts in files.values() for file in parts), \
                self._bar("nodes" if self._inputs.is_homogeneous else f"nodes {kind}", size, done) as bar:  # fmt: skip
            for turn, begin in enumerate(range(done, size, piece), 1):
                end = min(begin + piece, size)
                order, ends = group(book.owners_between(begin, end), self._num_parts)
                own = {f"node-{number}.ids.npy": np.arange(begin, end)}
                own |= {name: np.asarray(array[begin:end]) for name, array in arrays.items()}
                for part, (low, high) in enumerate(itertools.pairwise(ends)):
                    for name, rows in own.items():
                        files[name][part].append(rows[order[low:high]])
                    places[begin + order[low:high]] = written[part] + np.arange(high - low)
                written += np.diff(ends)
                bar.update(end - begin)
                if turn % _NOTE_EVERY == 0 and end < size:
                    places.flush()
                    for file in (file for parts in files.values() for file in parts):
                        file.flush()
                    self._journal.note(step, [end, written.tolist()])
        places.flush()
        self._journal.note(step, [size, written.tolist()])
        return counts

    def _list_columns(self, number: int, arrays: dict[str, np.ndarray]) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
        """List (name, dtype, shape of a row) of the files of a node type."""
        yield f"node-{number}.ids.npy", np.int64, ()
        for name, array in arrays.items():
            # Given times may have fewer bits.
            yield name, np.int64 if name == f"node-{number}.time.npy" else array.dtype, array.shape[1:]

    def _node_files(self, number: int) -> Iterator[tuple[str, np.ndarray]]:
        kind = self._types[number]
        for place, rows in enumerate(self._inputs.node_rows.get(kind, {}).values()):
            yield f"node-{number}.rows-{place}.npy", rows
        if kind in self._inputs.node_time:
            yield f"node-{number}.time.npy", self._inputs.node_time[kind]

    def _write_edges(self, number: int, books: dict[str, Book]) -> tuple[list[int], int]:
        """Write the edges of a relation; return (edges of each part, number of cut edges)."""
        edge_type = self._relations[number]
        target, source = (2, 0) if self._direction == "in" else (0, 2)
        buckets = EdgeBuckets(self._work, number, self._num_parts, self._inputs, edge_type,
                              edge_type[source])  # fmt: skip
        step = f"edges {number}"
        done, lengths, cut = self._journal.get(step, [0, [0] * self._num_parts, 0])
        count = self._inputs.edges[edge_type].num_edges
        sizes = [self._inputs.num_nodes[edge_type[end]] for end in (0, 2)]
        if not (done == count and step in self._journal):
            places = np.load(self._work / f"places-{self._types.index(edge_type[target])}.npy", mmap_mode="r")
            buckets.open(lengths)
            name = "edges" if self._inputs.is_homogeneous else "edges " + " ".join(edge_type)
            with buckets, self._bar(name, count, done) as bar:
                stream = self._inputs.edges[edge_type].read(self._piece(_EDGE_BYTES), done)
                for turn, (begin, *ends) in enumerate(stream, 1):
                    _check_ends(edge_type, ends, sizes)
                    rows, columns = (torch.from_numpy(np.array(ends[at], np.int64)) for at in
                                     ((1, 0) if self._direction == "in" else (0, 1)))  # fmt: skip
                    owners = books[edge_type[target]].owners(rows)
                    cut += int((owners != books[edge_type[source]].owners(columns)).sum())
                    buckets.append(begin, owners.numpy(), np.asarray(places[rows.numpy()]), columns.numpy())
                    bar.update(len(rows))
                    if turn % _NOTE_EVERY == 0:
                        buckets.flush()
                        self._journal.note(step, [begin + len(rows), buckets.lengths, cut])
            lengths = buckets.lengths
            self._journal.note(step, [count, lengths, cut])
        name = "rows" if self._inputs.is_homogeneous else "rows " + " ".join(edge_type)
        with self._bar(name, count, 0) as bar:
            for part in range(self._num_parts):
                if self._journal.get(f"rows {number} {part}") is None:
                    num_rows = self._count_nodes(part, edge_type[target])
                    buckets.compress(self._folder / part_folder(part), part, lengths[part], num_rows,
                                     max(1, self._memory // _EDGE_BYTES))  # fmt: skip
                    self._journal.note(f"rows {number} {part}", True)
                buckets.drop(part)
                bar.update(lengths[part])
        return lengths, cut

    def _count_nodes(self, part: int, kind: str) -> int:
        return int(self._journal.get(f"nodes {self._types.index(kind)}")[1][part])

    def _write_names(self) -> None:
        """Write the names of nodes by id, if edges have names."""
        if not self._inputs.names:
            return
        with needs_extra("a parquet file", "distributed"):
            import pyarrow
            from pyarrow import parquet

        for kind, known in self._inputs.names.items():
            table = pyarrow.table({"name": pyarrow.array(list(known), pyarrow.string())})
            parquet.write_table(table, self._folder / f"names-{self._types.index(kind)}.parquet")

    def _describe(self, books: dict[str, Book], part_nodes: list[list[int]],
                  written: list[tuple[list[int], int]]) -> Manifest:  # fmt: skip
        inputs, nodes, edges = self._inputs, [], []
        for number, (kind, size) in enumerate(inputs.num_nodes.items()):
            book: dict[str, Any] = {"kind": books[kind].kind}
            if books[kind].bounds is not None:
                book["bounds"] = books[kind].bounds.tolist()  # type: ignore[union-attr]
            if books[kind].table is not None:
                book["file"] = f"book-{number}.npy"
            rows = {
                name: f"node-{number}.rows-{place}.npy" for place, name in enumerate(inputs.node_rows.get(kind, {}))
            }
            time = f"node-{number}.time.npy" if kind in inputs.node_time else None
            nodes.append(NodeEntry(kind, size, book, rows, time))
        for number, (edge_type, source) in enumerate(inputs.edges.items()):
            rows = {name: f"edge-{number}.rows-{place}.npy"
                    for place, name in enumerate(inputs.edge_rows.get(edge_type, {}))}  # fmt: skip
            reached = edge_type[0 if self._direction == "in" else 2]
            time = "edge" if edge_type in inputs.edge_time else "node" if reached in inputs.node_time else None
            edges.append(EdgeEntry(edge_type, source.num_edges, edge_type in inputs.edge_weight, time, rows))
        method = inputs.method if isinstance(inputs.method, str) else "given"
        part_edges = [[lengths[part] for lengths, _ in written] for part in range(self._num_parts)]
        return Manifest(self._num_parts, method, self._direction, inputs.is_homogeneous, nodes, edges, part_nodes,
                        part_edges, sum(cut for _, cut in written))  # fmt: skip


def _checked(table: np.ndarray, num_parts: int) -> np.ndarray:
    if len(table) and not 0 <= table.min() <= table.max() < num_parts:
        raise IdError(f"method must hold parts in [0, {num_parts}), got {table.min()} to {table.max()}")
    return np.asarray(table, np.int64)


def _check_ends(edge_type: EdgeType, ends: Any, sizes: list[int]) -> None:
    for end, size in zip(ends, sizes, strict=True):
        if len(end) and not 0 <= int(end.min()) <= int(end.max()) < size:
            raise IdError(f"edges[{edge_type}] must hold ids in [0, {size}), got {end.min()} to {end.max()}")

"""The edges of a relation, dealt out to a bucket of each part on disk, then made into its rows."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pyg_direct.distributed.files import ArrayFile, OpenFiles, closing_all, write_array
from pyg_direct.distributed.inputs import Inputs
from pyg_direct.graph.relation import EdgeType
from pyg_direct.kernels.compress import count_rows_cpu
from pyg_direct.kernels.partition import group_buckets_cpu
from pyg_direct.ops.compress import order_rows
from pyg_direct.ops.launch import cpu_chunks, run_cpu


def group(buckets: np.ndarray, num_buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """(positions of items, bucket after bucket, where each bucket begins and the last ends), stable."""
    counts, order = np.zeros((cpu_chunks(), num_buckets), np.int64), np.empty(len(buckets), np.int32)
    run_cpu(group_buckets_cpu, buckets, counts, order)
    return order, np.concatenate([[0], counts[-1]])


class EdgeBuckets:
    """Files of edges by part, and the rows that they become.

    Args:
        work: Folder of the buckets.
        number: Of the relation.
        num_parts: P.
        inputs: What the partition is made from.
        edge_type: The relation.
        reached: The node type of the neighbors.
    """

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
        """Go on behind the edges that the buckets hold."""
        self.lengths, opened = list(lengths), OpenFiles()
        self._files = {name: [ArrayFile(self._path(name, part), dtype, None, had, opened)
                              for part, had in enumerate(lengths)]
                       for name, dtype in self._columns.items()}  # fmt: skip

    def append(self, begin: int, owners: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> None:
        """Deal out edges begin, begin + 1, ...: their parts, rows within these and neighbors."""
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
        """Have everything on the disk."""
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
                # Rows whose edges fit, and at least one.
                high = max(low + 1, int(np.searchsorted(indptr, indptr[low] + most, "right")) - 1)
                self._write_rows(bucket, files, low, high, num_rows, most)
                low = high
        self._write_attributes(folder, part, count, most)

    def _map(self, name: str, part: int, count: int) -> np.ndarray:
        """A column of a bucket, left in its file."""
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

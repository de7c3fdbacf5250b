"""Partitions for tests, read back in plain NumPy."""

import json
from pathlib import Path

import numpy as np

NODES, EDGES = 60, 400


def read_manifest(folder):
    return json.loads((Path(folder) / "manifest.json").read_text())


def read_part(folder, part, relation=0, kind=0):
    """(expanded nodes, offsets, neighbors, edge ids) of a part."""
    base = Path(folder) / f"part-{part:05d}"
    names = [f"node-{kind}.ids", *(f"edge-{relation}.{name}" for name in ("indptr", "indices", "ids"))]
    return [np.load(base / f"{name}.npy") for name in names]


def collect_rows(folder, num_rows, relation=0, kind=0):
    """(neighbors, edge ids) of every row of the whole graph."""
    rows = [None] * num_rows
    for part in range(read_manifest(folder)["num_parts"]):
        nodes, indptr, indices, ids = read_part(folder, part, relation, kind)
        for node, low, high in zip(nodes.tolist(), indptr[:-1], indptr[1:], strict=True):
            assert rows[node] is None
            rows[node] = (indices[low:high].tolist(), ids[low:high].tolist())
    return rows


def list_rows(sources, targets, num_rows, time=None):
    """The same from the list of edges: in-neighbors by edge id, or by time and then edge id."""
    rows = [([], []) for _ in range(num_rows)]
    order = range(len(sources)) if time is None else np.argsort(time, kind="stable").tolist()
    for edge in order:
        rows[targets[edge]][0].append(int(sources[edge]))
        rows[targets[edge]][1].append(edge)
    return rows

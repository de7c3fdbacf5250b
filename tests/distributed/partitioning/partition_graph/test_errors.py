"""What a partition cannot be made from is named, with what is wrong with it."""

import numpy as np
import pytest
import torch

from pyg_direct.distributed.partitioning.manifest import Manifest
from pyg_direct.distributed.partitioning.partition_graph import partition_graph
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from tests.distributed.partitions import EDGES, NODES


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ({"num_parts": 0}, ArgumentError, "num_parts must be an integer"),
    ({"method": "best"}, ArgumentError, "method must be one of"),
    ({"method": [0] * 60}, ArgumentTypeError, "must be a tensor, an array or a file"),
    ({"method": np.full(60, 2)}, IdError, "parts in"),
    ({"direction": "up"}, ArgumentError, "direction must be"),
    ({"memory": 5}, ArgumentError, "memory must be at least"),
    ({"num_nodes": 10}, IdError, r"ids in \[0, 10\)"),
    ({"num_nodes": -1}, ArgumentError, "num_nodes must hold"),
    ({"edges": np.ones((2, 3))}, ArgumentTypeError, "must hold integers"),
    ({"edges": np.ones((3, 3), np.int64)}, ArgumentError, "must have shape"),
    ({"edges": "nowhere.npy"}, ArgumentError, "is not there"),
    ({"node_rows": {"x": np.ones(3)}}, ArgumentError, "must have 60 rows"),
    ({"edge_weight": -np.ones(EDGES)}, ArgumentError, "finite and not negative"),
    ({"edge_time": np.ones(EDGES)}, ArgumentTypeError, "must hold integers"),
    ({"node_time": np.full(NODES, 2**63, np.uint64)}, ArgumentError, "must be below 2"),
    ({"node_rows": {"x": np.ones(NODES, np.longdouble)}}, ArgumentTypeError, "must have a dtype that torch knows"),
    ({"node_rows": {"x": torch.eye(NODES).to_sparse()}}, ArgumentTypeError, "must be dense .* of layout torch.sp"),
    ({"node_rows": {"x": torch.empty(NODES, 2, device="meta")}}, ArgumentTypeError, "must be dense .* without values"),
    ({"node_rows": {"x": [1] * NODES}}, ArgumentTypeError, r"node_rows\['nodes'\]\['x'\] must be a tensor, an array"),
    ({"node_rows": np.ones(NODES)}, ArgumentTypeError, "must map names of attributes to rows, got ndarray"),
    ({"edge_rows": {1: np.ones(EDGES)}}, ArgumentTypeError, "must map names of attributes to rows"),
    ({"node_rows": {"": np.ones(NODES)}}, ArgumentError, "must have names of at least one letter, got ''"),
    ({"node_rows": {"n_id": np.ones(NODES)}}, ArgumentError, "other names than what batches hold .* got 'n_id'"),
    ({"node_rows": {"x": np.ones(NODES)}, "edge_rows": {"x": np.ones(EDGES)}}, ArgumentError,
     "edge_rows must have other names than node_rows, got 'x' in both"),
    ({"node_rows": {"x": "{}/archive.npy"}}, ArgumentError, "must hold an array of numbers, got an archive"),
    ({"edges": "{}/empty.npy"}, ArgumentError, "edges must be a whole NumPy array .*/empty.npy', which says: No data"),
    ({"edges": "{}/empty.parquet"}, ArgumentError, r"edges must be a whole parquet file"),
    ({"edge_time": np.ones(EDGES, int), "node_time": np.ones(NODES, int)}, ArgumentError, "not both"),
])  # fmt: skip
def test_bad_arguments_are_named(tmp_path, edges, arguments, error, words):
    for name in ("empty.npy", "empty.parquet"):
        (tmp_path / name).touch()
    np.savez(tmp_path / "archive", x=np.ones(NODES))
    (tmp_path / "archive.npz").rename(tmp_path / "archive.npy")

    with pytest.raises(error, match=words):
        partition_graph(tmp_path / "p", **{"edges": edges, "num_parts": 2, **_fill(arguments, tmp_path)})
    assert not (tmp_path / "p").exists()


def _fill(value, folder):
    if isinstance(value, dict):
        return {key: _fill(item, folder) for key, item in value.items()}
    return value.format(folder) if isinstance(value, str) else value


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ({"method": {"a": np.zeros(NODES, int)}}, ArgumentError, "the part of each node of all types, got none for 'b'"),
    ({"num_nodes": NODES}, ArgumentTypeError, "num_nodes must map types to their numbers, got 60"),
    ({"node_rows": {"a": np.ones(NODES)}}, ArgumentTypeError, r"node_rows\['a'\] must map names of attributes"),
    ({"node_rows": {"a": {"edge_index": np.ones(NODES)}}}, ArgumentError, "got 'edge_index'"),
])  # fmt: skip
def test_bad_arguments_of_types_are_named(tmp_path, edges, arguments, error, words):
    sizes = {"a": NODES, "b": NODES}

    with pytest.raises(error, match=words):
        partition_graph(tmp_path / "p", {("a", "r", "b"): edges}, 2, **{"num_nodes": sizes, **arguments})


def test_counts_may_be_numbers_of_numpy(tmp_path, edges):
    manifest = partition_graph(tmp_path / "p", edges, np.int32(2), num_nodes=edges.max() + 1)

    assert manifest == Manifest.read(tmp_path / "p")
    assert (manifest.num_parts, manifest.nodes[0].num_nodes) == (2, NODES)

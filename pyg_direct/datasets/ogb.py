"""Graphs of the Open Graph Benchmark, through the package `ogb`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike, fspath

import numpy as np
import torch
from torch import Tensor

from pyg_direct.datasets.dataset import NodeDataset
from pyg_direct.datasets.synthetic import add_reverse_edges
from pyg_direct.errors import ArgumentError, needs_extra

OGB_NAMES = ("ogbn-products", "ogbn-arxiv", "ogbn-papers100M")
# torch's own switch to the behavior of `torch.load` before 2.6, when OGB was written
TRUST = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def load_ogb(
    name: str = "ogbn-products",
    root: str | PathLike[str] = "dataset",
    *,
    undirected: bool = False,
) -> NodeDataset:
    """Load a node-classification graph with the package `ogb`, which downloads it once into `root`.

    For a download of more than 1 GB (ogbn-products, ogbn-papers100M) the package asks on the terminal first.
    It keeps pickles in `root`, and reading a pickle can run code: `root` must be a folder you trust.

    Args:
        name: "ogbn-products" (both directions stored), "ogbn-arxiv" or "ogbn-papers100M" (one direction).
        root: Folder that the package keeps its datasets in.
        undirected: Add the reverse of every edge and keep each edge once.

    Returns:
        The graph on the CPU, with its official split; int64 edges, float32 features, `y` -1 for unknown classes.

    Raises:
        ArgumentError: `name` is not one of the three.
        ModuleNotFoundError: The `ogb` package is not installed.
    """
    if name not in OGB_NAMES:
        raise ArgumentError(f"name must be one of {', '.join(OGB_NAMES)}, got {name!r}")
    with needs_extra("load_ogb", "ogb"):
        from ogb.nodeproppred import NodePropPredDataset
    with trust_pickles():
        # the class without a graph library: its cache survives versions of PyG
        dataset = NodePropPredDataset(name=name, root=fspath(root))
        split = dataset.get_idx_split()
    graph, labels = dataset[0]
    num_nodes = int(graph["num_nodes"])
    edge_index = make_tensor(graph["edge_index"], np.int64)
    if undirected:
        edge_index = add_reverse_edges(edge_index, num_nodes)
    return NodeDataset(
        name,
        num_nodes,
        int(dataset.num_classes),
        edge_index,
        make_tensor(graph["node_feat"], np.float32),
        # OGB marks a node without a class by nan
        make_tensor(np.nan_to_num(labels.reshape(-1), nan=-1), np.int64),
        *(make_tensor(split[part], np.int64) for part in ("train", "valid", "test")),
    )


def make_tensor(array: np.ndarray, dtype: type[np.generic]) -> Tensor:
    """Make a tensor on the memory of `array`; a copy if it has another dtype or may not be written."""
    return torch.from_numpy(np.require(array, dtype, "W"))


@contextmanager
def trust_pickles() -> Iterator[None]:
    """Let `torch.load` read OGB's caches; their pickles use opcodes that `weights_only=True` cannot read."""
    before = os.environ.get(TRUST)
    os.environ[TRUST] = "1"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=f".*{TRUST}")
            yield
    finally:
        if before is None:
            del os.environ[TRUST]
        else:
            os.environ[TRUST] = before

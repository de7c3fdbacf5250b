"""Graphs of the Open Graph Benchmark, through its own package."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from os import PathLike, fspath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_direct.datasets.dataset import NodeDataset
from pyg_direct.datasets.edges import add_reverse_edges
from pyg_direct.errors import ArgumentError

OGB_NAMES = ("ogbn-products", "ogbn-arxiv", "ogbn-papers100M")


def load_ogb(
    name: str = "ogbn-products", root: str | PathLike = "dataset", *, undirected: bool = False
) -> NodeDataset:
    """Load a node-classification graph with the package `ogb`, which downloads it once into `root`.

    For a download of more than 1 GB (ogbn-products, ogbn-papers100M) the package asks on the terminal first.

    Args:
        name: "ogbn-products" (both directions stored), "ogbn-arxiv" or "ogbn-papers100M" (one direction).
        root: Folder that the package keeps its datasets in.
        undirected: Add the reverse of every edge and keep each edge once.

    Returns:
        The graph on the CPU, with its official split; int64 edges, float32 features, `y` -1 where the class
        is unknown.

    Raises:
        ArgumentError: `name` is not one of the three.
        ModuleNotFoundError: The `ogb` package is not installed.
    """
    if name not in OGB_NAMES:
        raise ArgumentError(f"name must be one of {', '.join(OGB_NAMES)}, got {name!r}")
    try:
        ogb = importlib.import_module("ogb.nodeproppred")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"load_ogb needs the package ogb (pip install ogb), got: {error}", name=error.name
        ) from error
    # the library-agnostic class: its cache holds NumPy arrays only
    with allow_numpy_pickles():
        dataset = ogb.NodePropPredDataset(name=name, root=fspath(root))
        split = dataset.get_idx_split()
    graph, labels = dataset[0]
    num_nodes = int(graph["num_nodes"])
    edge_index = torch.as_tensor(graph["edge_index"]).long()
    if undirected:
        edge_index = add_reverse_edges(edge_index, num_nodes)
    train_idx, val_idx, test_idx = (
        torch.as_tensor(split[part]).long() for part in ("train", "valid", "test")
    )
    return NodeDataset(
        name,
        num_nodes,
        int(dataset.num_classes),
        edge_index,
        torch.as_tensor(graph["node_feat"]),
        read_labels(labels),
        train_idx,
        val_idx,
        test_idx,
    )


def read_labels(labels: np.ndarray) -> Tensor:
    """Classes, int64 `[N]`, from OGB's `[N, 1]`, where nan marks a node without one."""
    return torch.from_numpy(np.nan_to_num(labels.reshape(-1), nan=-1).astype(np.int64))


def allow_numpy_pickles() -> AbstractContextManager[Any]:
    """Let `torch.load` read the NumPy arrays of OGB's caches, which torch refuses by default from 2.6 on."""
    if not hasattr(torch.serialization, "safe_globals"):
        return nullcontext()
    core = np._core if hasattr(np, "_core") else np.core
    parts = [np.ndarray, np.dtype, *(type(np.dtype(kind)) for kind in ("i4", "i8", "f4", "f8", "?"))]
    for function in (core.multiarray._reconstruct, core.multiarray.scalar):
        # the module has another name in files that the other major version of NumPy wrote
        parts += [
            (function, f"numpy.{core_name}.multiarray.{function.__name__}") for core_name in ("core", "_core")
        ]
    return torch.serialization.safe_globals(parts)

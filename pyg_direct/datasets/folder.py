"""Graphs kept as NumPy archives in a local folder, and graphs of the Open Graph Benchmark through the package `ogb`.

An error about an archive that is damaged or lacks an array names the archive.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_direct.datasets.dataset import NodeDataset, check_float_dtype
from pyg_direct.datasets.synthetic import add_reverse_edges
from pyg_direct.errors import NPZ, ArgumentError, needs_extra, whole_file
from pyg_direct.ops.argument_checks import check_choice


@contextmanager
def open_archive(file: Path) -> Iterator[Any]:
    """Open an archive; its arrays are found by name, and each is read when it is requested."""
    # Opened here, as NumPy leaves one that it cannot read open.
    with whole_file(file.name, NPZ, file), open(file, "rb") as opened:
        archive = np.load(opened, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise ArgumentError(f"{file} must be a NumPy archive (.npz), got a single array")
        yield archive


def read_arrays(file: Path, names: Sequence[str], kinds: str = "iu") -> list[np.ndarray]:
    """Read the arrays `names` of an archive.

    Args:
        kinds: NumPy's letters of the kinds of numbers that they may be; "iu" for integers.
    """
    with open_archive(file) as archive:
        missing = [name for name in names if name not in archive]
        if missing:
            raise ArgumentError(f"{file.name} must hold {', '.join(names)}, got no {', '.join(missing)}")
        arrays = [archive[name] for name in names]
    for name, array in zip(names, arrays, strict=True):
        # NumPy makes an empty array float64 unless a dtype is given.
        if array.size and array.dtype.kind not in kinds:
            what = "integers" if kinds == "iu" else "real numbers"
            raise ArgumentError(f"{file.name} must hold {what} as {name}, got {array.dtype}")
    return arrays


GRAPH_FILE = "graph.npz"
GRAPH_ARRAYS = ("edge_index", "y", "train", "valid", "test")
FEATURE_ARRAYS = ("q", "scale")


def load_folder(
    path: str | PathLike[str],
    *,
    undirected: bool = True,
    features: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> NodeDataset:
    """Read a graph from a folder of NumPy archives; the dataset is named after the folder that holds it.

    `graph.npz` holds `edge_index` (integers `[2, E]`), `y` (integers `[N]`, -1 for unknown classes) and the nodes
    `train`, `valid` and `test` (integers). A second archive holds features as `q` (int8 `[N, F]`) times `scale`
    (float32 `[F]`).

    Args:
        path: The folder, or one of which a single folder holds `graph.npz`.
        undirected: Add the reverse of every edge and keep each edge once, as is usual for citation graphs; otherwise
            the edges come as stored.
        features: File name of the features. None takes the only archive in the folder that holds `q` and `scale`, or
            leaves `x` None if there is no such archive.
        dtype: Dtype of the features.

    Returns:
        The graph on the CPU, with int64 edges and as many classes as `y` names.

    Raises:
        ArgumentError: The folder or an array is missing, an archive is damaged, or arrays have other kinds or do not
            fit each other.
        ArgumentTypeError: `dtype` is no dtype.

    Example:
        >>> import numpy as np
        >>> np.savez("graph.npz", edge_index=[[0, 1], [1, 2]], y=[0, 1, 0], train=[0], valid=[1], test=[2])
        >>> graph = load_folder(".")
        >>> graph.edge_index.tolist(), graph.num_classes  # each edge in both directions
        ([[0, 1, 1, 2], [1, 0, 2, 1]], 2)
    """
    check_float_dtype("dtype", dtype)
    folder = find_graph(Path(path))
    edge_index, y, *split = (
        torch.from_numpy(array.astype(np.int64)) for array in read_arrays(folder / GRAPH_FILE, GRAPH_ARRAYS)
    )
    check_ids(edge_index, y, split)
    feature_file = find_features(folder) if features is None else folder / features
    x = None if feature_file is None else read_features(feature_file, len(y), dtype)
    if undirected:
        edge_index = add_reverse_edges(edge_index, len(y))
    num_classes = int(y.max()) + 1 if len(y) else 0
    return NodeDataset(folder.resolve().name, len(y), num_classes, edge_index, x, y, *split)


def find_graph(path: Path) -> Path:
    """Return `path`, or the one folder in it that holds a graph."""
    found = [path] if (path / GRAPH_FILE).is_file() else sorted(file.parent for file in path.glob(f"*/{GRAPH_FILE}"))
    if not found:
        raise ArgumentError(f"path must be a folder that holds {GRAPH_FILE}, got {str(path)!r}")
    if len(found) > 1:
        names = ", ".join(folder.name for folder in found)
        raise ArgumentError(f"path must name one of the folders that hold {GRAPH_FILE}, got {str(path)!r} with {names}")
    return found[0]


def check_ids(edge_index: Tensor, y: Tensor, split: list[Tensor]) -> None:
    """Raise unless edges `[2, E]` and split name nodes that `y` `[N]` has."""
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ArgumentError(f"edge_index must be [2, E], got {list(edge_index.shape)}")
    if y.dim() != 1:
        raise ArgumentError(f"y must be [N], got {list(y.shape)}")
    if y.numel() and int(y.min()) < -1:
        raise ArgumentError(f"y must hold classes, or -1 where one is unknown, got {int(y.min())}")
    for name, ids in zip(("edge_index", "train", "valid", "test"), (edge_index, *split), strict=True):
        if name != "edge_index" and ids.dim() != 1:
            raise ArgumentError(f"{name} must be a list of ids, got the shape {list(ids.shape)}")
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(y):
            low, high = int(ids.min()), int(ids.max())
            raise ArgumentError(f"{name} must hold ids in [0, {len(y)}), got {low} to {high}")


def find_features(folder: Path) -> Path | None:
    """Return the one archive of `folder` that holds features, or None."""
    found = []
    for file in sorted(folder.glob("*.npz")):
        with open_archive(file) as archive:
            if all(name in archive for name in FEATURE_ARRAYS):
                found.append(file)
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ArgumentError(f"features must say which file to read, got None with {names}")
    return found[0] if found else None


def read_features(file: Path, num_nodes: int, dtype: torch.dtype) -> Tensor:
    """Read features `q * scale` of the archive `file`, `[N, F]`."""
    if not file.is_file():
        raise ArgumentError(f"features must name a file of the folder, got {file.name!r}")
    q, scale = (torch.from_numpy(array.astype(np.float32)) for array in read_arrays(file, FEATURE_ARRAYS, "iuf"))
    if q.dim() != 2 or len(q) != num_nodes or scale.shape != q.shape[1:]:
        shapes = f"{list(q.shape)} and {list(scale.shape)}"
        raise ArgumentError(f"{file.name} must hold q [{num_nodes}, F] and scale [F], got {shapes}")
    return q.mul_(scale).to(dtype)


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
    check_choice("name", name, OGB_NAMES)
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

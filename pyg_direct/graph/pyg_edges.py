"""The door to PyG's and torch's graph containers: whatever holds edges becomes rows or a list of edges."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.ops.argument_checks import check_edge_list
from pyg_direct.runtime.host.tensor_views import ordinary_tensors, version_of

# Objects made of tensors, by name and tensor ids; an entry goes when one of its tensors does.
_DERIVED: dict[tuple[Any, ...], tuple[list[weakref.ref[Any]], list[int], Any]] = {}


class EdgeList(NamedTuple):
    """Edges as PyG lists them: `edge_index` int64 or int32 `[2, E]`, row 0 the sources; N when the container knows."""

    edge_index: Tensor
    num_nodes: int | None


class Rows(NamedTuple):
    """Compressed rows taken as they are; `edge_ids` None when the position of an edge is its id."""

    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor | None


def read_edges(graph: Any, name: str = "edge_index") -> EdgeList | Rows:
    """Read the edges of an `edge_index`, an `EdgeIndex`, a `Data`, a `SparseTensor` or a torch sparse tensor; `name` is
    the argument that messages name.

    Rows of compressed containers are the nodes that are sampled from, as in PyG's `adj_t`.
    """
    graph = read_array(graph)
    if hasattr(graph, "edge_stores") or (hasattr(graph, "edge_index") and not isinstance(graph, Tensor)):
        return _read_data(graph)
    if type(graph).__name__ == "SparseTensor" and hasattr(graph, "csr"):
        _check_square(graph.sparse_sizes())
        indptr, indices, _ = graph.csr()
        return Rows(indptr, indices, None)
    if not isinstance(graph, Tensor):
        raise ArgumentTypeError(
            f"{name} must be a tensor [2, E], an EdgeIndex, a Data, a SparseTensor or a sparse CSR / CSC tensor, "
            f"got {type(graph).__name__}"
        )
    if graph.layout in (torch.sparse_csr, torch.sparse_csc):
        _check_square(graph.shape)
        if graph.layout == torch.sparse_csr:
            return Rows(graph.crow_indices().long(), graph.col_indices(), None)
        return Rows(graph.ccol_indices().long(), graph.row_indices(), None)
    num_nodes = None
    if hasattr(graph, "sparse_size") and hasattr(graph, "as_tensor"):
        sizes = [s for s in graph.sparse_size() if s is not None]
        num_nodes = max(sizes) if sizes else None
        graph = graph.as_tensor()
    check_edge_list(name, graph)
    return EdgeList(graph, num_nodes)


def read_array(array: Any) -> Any:
    """Return a NumPy array as a tensor, over the same memory if torch allows that; return any other object as it is.

    Torch cannot hold foreign byte orders, nor read-only memory.
    """
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
        return array
    return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), requirements=["C", "W"]))


def _read_data(data: Any) -> EdgeList | Rows:
    if len(getattr(data, "node_types", ())) > 0:
        raise NotImplementedError("data must have one node type and one relation; loaders take a HeteroData")
    if getattr(data, "adj_t", None) is not None:
        adj_t = data.adj_t if getattr(data, "edge_index", None) is None else as_rows(data.adj_t)
        check_adjacency(adj_t)
        return read_edges(adj_t)
    if getattr(data, "edge_index", None) is None:
        raise ArgumentError("data must hold edge_index or adj_t, got neither")
    edges = read_edges(data.edge_index)
    return EdgeList(edges.edge_index, int(data.num_nodes)) if isinstance(edges, EdgeList) else edges


def derive(name: str, make: Callable[..., Any], *sources: Any) -> Any:
    """Return the object that a function of this name makes of tensors, cached until a tensor is gone or written to."""
    key = name, *map(id, sources)
    versions = [version_of(source) for source in sources]
    refs, known, made = _DERIVED.get(key, ([], [], None))
    if known == versions and all(ref() is source for ref, source in zip(refs, sources, strict=True)):
        return made
    with ordinary_tensors():
        made = make(*sources)
    # Bound to the table: as the interpreter ends, names of this module are gone before tensors are.
    refs = [weakref.ref(source, partial(_DERIVED.pop, key)) for source in sources]
    _DERIVED[key] = refs, versions, made
    return made


def find_edges(store: Any) -> Any:
    """Return the sampled edges of a `Data` or relation: `adj_t`, as in PyG, otherwise `edge_index`, or None."""
    adj_t = store.adj_t if "adj_t" in store else None
    if adj_t is None:
        return getattr(store, "edge_index", None)
    return adj_t if "edge_index" not in store or store["edge_index"] is None else as_rows(adj_t)


def as_rows(adj_t: Any) -> Any:
    """Return an adjacency compressed by row, from a torch sparse tensor of any layout."""
    is_other = isinstance(adj_t, Tensor) and adj_t.layout in (torch.sparse_coo, torch.sparse_csc)
    return derive("rows", Tensor.to_sparse_csr, adj_t) if is_other else adj_t


def check_adjacency(adj_t: Any, name: str = "data.adj_t") -> None:
    """Refuse an `adj_t` that is a sparse tensor of torch of another layout than CSR."""
    # CSC would compress the sources.
    if isinstance(adj_t, Tensor) and adj_t.layout in (torch.sparse_csc, torch.sparse_coo):
        kind = "CSC" if adj_t.layout == torch.sparse_csc else "COO"
        raise ArgumentError(f"{name} must be compressed by row; call to_sparse_csr() on this {kind} tensor")


def _check_square(sizes: Any) -> None:
    shape = [int(s) for s in sizes]
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ArgumentError(f"a sparse adjacency must be square, got {' x '.join(map(str, shape))}")

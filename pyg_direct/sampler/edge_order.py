"""That the edges of batches are sorted by target: told to what aggregates them (`nn/sorted_edges.py`), or to PyG."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import HeteroSamplerOutput

from pyg_direct.errors import ArgumentTypeError
from pyg_direct.nn.sorted_edges import find_batch, register_found, register_relations, register_sorted
from pyg_direct.sampler.output import PackedOutput


def note_order(batch: Any, out: Any, is_checked: bool = True) -> None:
    """Tell of the edges of a batch.

    Args:
        batch: The `Data` or `HeteroData` of a sample.
        out: The sample, or PyG's output of our sampler, whose edges lead from new nodes to known ones hop after hop;
            subgraphs, which have no hops, are not told of.
        is_checked: Whether the sample is as ours was made. What a class made that a program derives from it may be in
            any order, and nothing is told of edges that are in another.
    """
    nodes, edges = out.num_sampled_nodes, out.num_sampled_edges
    if nodes is None or edges is None:
        return
    if not is_checked:
        _note_found(batch, nodes, edges)
        return
    max_degree = getattr(out, "max_degree", None)
    if not isinstance(out, HeteroSamplerOutput):
        note_hops(batch, nodes, edges, max_degree)
        return
    packed = out.packed if isinstance(out, PackedOutput) else None
    if packed is not None:
        register_relations(packed.edge_index, nodes, edges, max_degree)
        return
    for kind, counts in edges.items():
        edge_index = batch._edge_store_dict[kind]._mapping.get("edge_index") if kind in out.row else None
        if type(edge_index) is Tensor:
            register_sorted(edge_index, nodes[kind[0]], counts, max_degree, nodes[kind[-1]])


def _note_found(batch: Any, nodes: Any, edges: Any) -> None:
    """Tell of edges that are in order after all, by the counts that a program's sampler gave; a GPU is waited for."""
    if isinstance(nodes, Mapping) and isinstance(edges, Mapping) and isinstance(batch, HeteroData):
        for kind, store in batch._edge_store_dict.items():
            edge_index = store._mapping.get("edge_index")
            if type(edge_index) is Tensor and kind in edges:
                register_found(edge_index, nodes.get(kind[0]), edges[kind], nodes.get(kind[-1]))
    elif isinstance(batch, Data):
        edge_index = batch._store._mapping.get("edge_index")
        if type(edge_index) is Tensor:
            register_found(edge_index, nodes, edges, nodes)


def note_hops(batch: Any, num_sampled_nodes: list[int], num_sampled_edges: list[int], max_degree: int | None) -> None:
    """`note_order` of a `Data` whose new nodes and edges of each hop are counted."""
    edge_index = batch._store._mapping.get("edge_index")
    if type(edge_index) is Tensor:
        register_sorted(edge_index, num_sampled_nodes, num_sampled_edges, max_degree)


def to_edge_index(batch: Any) -> Any:
    """Give a batch PyG's `EdgeIndex` for each `edge_index`, sorted by target where it is known to be; for `transform=`.

    `EdgeIndex` lets PyG pick kernels for sorted edges, at a price on the host for each convolution. Accelerated models
    do not need it, and leave such edges to PyG.

    Args:
        batch: `Data` or `HeteroData`, changed in place. Edges that are not known to be sorted get no `sort_order`.

    Raises:
        ArgumentTypeError: `batch` is neither.
    """
    if not isinstance(batch, (Data, HeteroData)):
        raise ArgumentTypeError(f"batch must be a Data or a HeteroData, got {type(batch).__name__}")
    sizes = None if isinstance(batch, Data) else {kind: batch[kind].num_nodes for kind in batch.node_types}
    for store in batch.edge_stores:
        edge_index = store._mapping.get("edge_index")
        if type(edge_index) is Tensor:
            size = (batch.num_nodes,) * 2 if sizes is None else (sizes[store._key[0]], sizes[store._key[-1]])
            order = None if find_batch(edge_index) is None else "col"
            store.edge_index = EdgeIndex(edge_index, sparse_size=size, sort_order=order)
    return batch

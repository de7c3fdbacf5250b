"""Tells what aggregates batches (`nn/sorted.py`) that their edges are sorted by target."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput

from pyg_direct.nn.sorted import register_sorted


def largest_fanout(fanouts: Iterable[Iterable[int]]) -> int | None:
    """Upper bound of the edges of a target, from fanouts of hops or relations; None where one takes all neighbors."""
    flat = [fanout for part in fanouts for fanout in part]
    return None if any(fanout < 0 for fanout in flat) else max(flat, default=0)


def note_order(batch: Any, out: Any, max_degree: int | None) -> None:
    """Tell of the edges of a batch.

    Args:
        batch: The `Data` or `HeteroData` of a sample.
        out: The sample, or PyG's output of our sampler, whose edges lead from new nodes to known ones hop after hop;
            subgraphs, which have no hops, are not told of.
        max_degree: Upper bound of the edges of a target of one relation.
    """
    nodes, edges = out.num_sampled_nodes, out.num_sampled_edges
    if nodes is None or edges is None:
        return
    if not isinstance(out, HeteroSamplerOutput):
        edge_index = batch._store._mapping.get("edge_index")
        if type(edge_index) is Tensor:
            register_sorted(edge_index, nodes, edges, max_degree)
        return
    for kind, counts in edges.items():
        edge_index = batch._edge_store_dict[kind]._mapping.get("edge_index") if kind in out.row else None
        if type(edge_index) is Tensor:
            register_sorted(edge_index, nodes[kind[0]], counts, max_degree, nodes[kind[-1]])

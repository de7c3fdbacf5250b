"""Data with rows that identify their nodes, and checks of every batch drawn from it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from tests.graphs import Graph, make_random_graph


def make_data(graph: Graph | None = None, **attributes: Any) -> Data:
    """A graph with node features `x` (node in front of the point), edge features and classes."""
    graph = make_random_graph(70, 600) if graph is None else graph
    nodes, edges = torch.arange(graph.num_nodes), torch.arange(graph.edge_index.shape[1])
    x = nodes.view(-1, 1) + torch.arange(5) / 8
    edge_attr = edges.view(-1, 1) + torch.arange(3) / 4
    parts = {"x": x, "edge_attr": edge_attr, "y": nodes % 7, **attributes}
    return Data(edge_index=graph.edge_index, num_nodes=graph.num_nodes, **parts)


def check_contract(data: Data, batch: Data, seeds: Sequence[int], fanouts: Sequence[int],
                   replace: bool = False) -> None:  # fmt: skip
    """Check the promises of PyG's documentation and `trim_to_layer` for a batch around `seeds`."""
    edge_index, n_id, e_id = data.edge_index.cpu().long(), batch.n_id.cpu(), batch.e_id.cpu()
    source, target = batch.edge_index.cpu()
    nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
    degree = torch.bincount(edge_index[1], minlength=data.num_nodes)

    assert (n_id.dtype, e_id.dtype, source.dtype) == (torch.int64,) * 3
    assert (len(nodes), len(edges)) == (len(fanouts) + 1, len(fanouts))
    assert (sum(nodes), sum(edges)) == (len(n_id), len(e_id)) == (batch.num_nodes, source.numel())
    assert batch.batch_size == nodes[0] == len(seeds)
    # Seeds first, in the order given; every other node once, and none of them a seed.
    assert n_id[: nodes[0]].tolist() == list(seeds)
    others = n_id[nodes[0] :].tolist()
    assert len(set(others)) == len(others)
    assert set(others).isdisjoint(seeds)
    # Every edge is one of the graph's.
    assert torch.equal(edge_index[:, e_id], torch.stack([n_id[source], n_id[target]]))

    begin_node = begin_edge = 0
    for hop, fanout in enumerate(fanouts):
        frontier = range(begin_node, begin_node + nodes[hop])
        part = slice(begin_edge, begin_edge + edges[hop])
        picks = degree[n_id[frontier.start : frontier.stop]]
        if fanout >= 0:
            picks = (picks > 0) * fanout if replace else picks.clamp(max=fanout)
        # A hop expands the nodes that are new in the hop before, and them alone.
        assert torch.bincount(target[part], minlength=len(n_id))[frontier.start : frontier.stop].tolist() == (
            picks.tolist()
        )
        assert int(picks.sum()) == edges[hop]
        if not replace:
            drawn = torch.stack([target[part], e_id[part]])
            assert drawn.unique(dim=1).shape == drawn.shape
        # It meets its new nodes, and no node of a later hop.
        met = set(source[part].tolist())
        assert met.issuperset(range(frontier.stop, frontier.stop + nodes[hop + 1]))
        assert all(node < frontier.stop + nodes[hop + 1] for node in met)
        begin_node, begin_edge = frontier.stop, part.stop


def assert_equal_batches(batch: Data, other: Data) -> None:
    """Equal in every attribute, dtype and bit."""
    assert set(batch.keys()) == set(other.keys())
    for key, value in batch.to_dict().items():
        if isinstance(value, Tensor):
            assert value.dtype == other[key].dtype, key
            assert torch.equal(value.cpu(), other[key].cpu()), key
        else:
            assert value == other[key], key


def assert_equal_epochs(batches: Iterable[Data], others: Iterable[Data]) -> None:
    """As many batches, equal one by one."""
    for batch, other in zip(batches, others, strict=True):
        assert_equal_batches(batch, other)


def hash_batches(batches: Iterable[Data]) -> str:
    """sha256 over names, dtypes, shapes and bytes of everything in the batches, wherever it lies."""
    digest = hashlib.sha256()
    for batch in batches:
        for key, value in sorted(batch.to_dict().items()):
            if isinstance(value, Tensor):
                digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
                digest.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            else:
                digest.update(f"{key} {value}".encode())
    return digest.hexdigest()

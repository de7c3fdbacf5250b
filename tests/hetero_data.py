"""`HeteroData` with rows that identify their nodes."""

from __future__ import annotations

import torch
from torch_geometric.data import HeteroData

from tests.hetero_graphs import make_parts
from tests.reference.general import Parts


def make_hetero(graph: Parts | None = None) -> HeteroData:
    """Make three types with features, one without; a relation without edges; times and weights if the graph has
    them.
    """
    graph = make_parts() if graph is None else graph
    data = HeteroData()
    for number, (kind, size) in enumerate(graph.num_nodes.items()):
        if kind == "nobody":
            data[kind].num_nodes = size
        else:
            data[kind].x = 1000 * number + torch.arange(size).view(-1, 1) + torch.arange(3) / 4
        if kind in graph.node_time:
            data[kind].time = torch.tensor(graph.node_time[kind])
    for number, (edge_type, pairs) in enumerate(graph.edges.items()):
        data[edge_type].edge_index = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t().contiguous()
        data[edge_type].edge_attr = 1000 * number + torch.arange(len(pairs))
        if edge_type in graph.edge_time:
            data[edge_type].time = torch.tensor(graph.edge_time[edge_type])
        if edge_type in graph.edge_weight:
            data[edge_type].weight = torch.tensor(graph.edge_weight[edge_type])
    return data


def check_rows(data: HeteroData, batch: HeteroData) -> None:
    """Check that every row of a batch belongs to its node or edge, and every edge to the graph."""
    for kind in data.node_types:
        ids = batch[kind].n_id.cpu()
        assert batch[kind].num_nodes == ids.numel()
        if "x" in data[kind]:
            assert torch.equal(batch[kind].x.cpu(), data[kind].x[ids])
    for edge_type in data.edge_types:
        ids = batch[edge_type].e_id.cpu()
        source, target = batch[edge_type].edge_index.cpu()
        ends = torch.stack([batch[edge_type[0]].n_id.cpu()[source], batch[edge_type[2]].n_id.cpu()[target]])
        assert torch.equal(ends, data[edge_type].edge_index[:, ids])
        assert torch.equal(batch[edge_type].edge_attr.cpu(), data[edge_type].edge_attr[ids])


def name_edges(batch: HeteroData) -> dict:
    """Sorted global ends of the edges of each relation."""
    named = {}
    for edge_type in batch.edge_types:
        source, target = batch[edge_type].edge_index.cpu()
        ends = batch[edge_type[0]].n_id.cpu()[source], batch[edge_type[2]].n_id.cpu()[target]
        named[edge_type] = sorted(zip(*(end.tolist() for end in ends), strict=True))
    return named

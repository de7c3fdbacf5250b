"""PyG's interface to edges over a topology."""

import pickle

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.sampler import NodeSamplerInput

from pyg_direct import CSRTopo, FeatureStore, GraphStore, NeighborLoader
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.sampler import NeighborSampler

NODES = 60
EDGES = torch.randint(NODES, (2, 500), generator=torch.Generator().manual_seed(0))


def open_store():
    store = FeatureStore(device="cpu")
    store[None, "x", None] = torch.arange(NODES)
    store[None, "edge_attr", None] = torch.arange(500) * 3
    return store


@pytest.mark.parametrize("direction", ["in", "out"])
def test_batches_name_the_edges_of_the_topology(real_device, direction):
    graph = GraphStore(CSRTopo(EDGES, num_nodes=NODES, direction=direction))

    for batch in NeighborLoader((open_store(), graph), [4, -1], torch.arange(NODES), batch_size=16, device=real_device):
        assert torch.equal(batch.n_id[batch.edge_index].cpu(), EDGES[:, batch.e_id.cpu()])
        assert torch.equal(batch.edge_attr.cpu(), 3 * batch.e_id.cpu())
        assert batch.num_edges > 0


def test_ids_that_are_no_positions_are_refused_in_the_other_direction(real_device):
    topology = CSRTopo(indptr=torch.tensor([0, 1, 2]), indices=torch.tensor([1, 0]), eid=torch.tensor([5, 5]))

    with pytest.raises(ArgumentError, match="eid of a CSRTopo must hold each of 0 to E - 1 once"):
        NeighborSampler((FeatureStore(device=real_device), GraphStore(topology)), [1], sample_direction="backward",
                        device=real_device).sample_from_nodes(NodeSamplerInput(None, torch.arange(2)))  # fmt: skip


def test_pyg_reads_the_same_edges():
    graph = GraphStore(CSRTopo(EDGES, num_nodes=NODES))

    row, col, _ = graph.coo()

    assert sorted(zip(row.tolist(), col.tolist(), strict=True)) == sorted(zip(*EDGES.tolist(), strict=True))
    (attr,) = graph.get_all_edge_attrs()
    assert (attr.layout.value, attr.size) == ("csc", (NODES, NODES))
    assert graph[attr][0] is graph.topology.indices
    with pytest.raises(KeyError, match="not found"):
        graph.get_edge_index(edge_type=None, layout="csr")


def test_stores_travel(real_device):
    graph = GraphStore(CSRTopo(EDGES, num_nodes=NODES))
    other = pickle.loads(pickle.dumps(graph))

    assert torch.equal(other.topology.indices, graph.topology.indices)
    assert repr(other) == "GraphStore(CSRTopo(60 nodes, 500 edges))"


def test_edges_are_not_put_or_removed():
    graph = GraphStore(CSRTopo(EDGES, num_nodes=NODES))

    with pytest.raises(ArgumentError, match="cannot be put: make a GraphStore over another CSRTopo"):
        graph.put_edge_index(tuple(EDGES), edge_type=None, layout="coo", size=(NODES, NODES))
    with pytest.raises(ArgumentError, match="cannot be removed"):
        graph.remove_edge_index(edge_type=None, layout="csc")


def test_other_objects_are_refused():
    with pytest.raises(ArgumentTypeError, match="topology must be a CSRTopo, got Data"):
        GraphStore(Data())

"""Graphs that are batches already, of several graphs or of a loader: what a batch of them says of trees is its own."""

import pytest
import torch
from torch_geometric.data import Batch
from torch_geometric.loader import LinkNeighborLoader as PygLinkNeighborLoader, NeighborLoader as PygNeighborLoader

from pyg_direct import LinkNeighborLoader, NeighborLoader
from tests.batches import make_data
from tests.hetero_data import make_hetero

# torch_sparse, unlike pyg-lib, does not count.
COUNTS = {"num_sampled_nodes", "num_sampled_edges"}


def make_batch():
    parts = [make_data(seed_time=torch.arange(70)) for _ in range(2)]
    return Batch.from_data_list(parts, follow_batch=["y"])


@pytest.mark.sparse
@pytest.mark.parametrize(("ours", "theirs", "options"), [
    (NeighborLoader, PygNeighborLoader, {"input_nodes": torch.arange(60, 80)}),
    (NeighborLoader, PygNeighborLoader, {"input_nodes": torch.arange(60, 80), "subgraph_type": "induced"}),
    (LinkNeighborLoader, PygLinkNeighborLoader, {"edge_label_index": torch.tensor([[0, 100], [1, 90]])}),
    (LinkNeighborLoader, PygLinkNeighborLoader, {"edge_label_index": torch.tensor([[0, 100], [1, 90]]),
                                                 "neg_sampling": "triplet"}),
])  # fmt: skip
def test_a_batch_has_what_that_of_pyg_has(real_device, ours, theirs, options):
    data = make_batch()

    got = next(iter(ours(data, [-1, -1], batch_size=20, device=real_device, **options)))
    expected = next(iter(theirs(data, [-1, -1], batch_size=20, **options)))

    assert type(got) is type(expected)
    assert {*got.keys()} - COUNTS == {*expected.keys()}
    assert got.batch is None
    assert got.ptr.tolist() == expected.ptr.tolist() == [0, 70, 140]
    assert got.num_graphs == expected.num_graphs == 2
    assert torch.equal(got.y_batch.cpu(), got.n_id.cpu() // 70)


@pytest.mark.parametrize("options", [{}, {"subgraph_type": "induced"}], ids=str)
def test_trees_of_the_graph_are_none_of_the_batch(real_device, options):
    data = make_data(batch=torch.arange(70) % 3, seed_time=torch.arange(70))

    batch = next(iter(NeighborLoader(data, [2], batch_size=8, device=real_device, **options)))

    assert not {"batch", "seed_time"} & {*batch.keys()}
    assert {"batch", "seed_time"} < {*data.keys()}


def test_trees_are_those_of_the_batch(real_device):
    loader = NeighborLoader(make_batch(), [2], torch.arange(80), disjoint=True, batch_size=8, device=real_device)

    batch = next(iter(loader))

    assert batch.batch[:8].tolist() == list(range(8))
    assert len(batch.batch) == batch.num_nodes


def test_with_types_each_keeps_its_graphs(real_device):
    data = Batch.from_data_list([make_hetero(), make_hetero()])
    kind = data.node_types[0]
    size = data[kind].num_nodes // 2

    batch = next(iter(NeighborLoader(data, [2], kind, batch_size=300, shuffle=True, device=real_device)))

    assert torch.equal(batch[kind].batch.cpu(), batch[kind].n_id.cpu() // size)

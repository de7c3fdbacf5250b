"""One hop at a time, after Quiver: neighbors of nodes, and local ids for them."""

import pytest
import torch

from pyg_direct.errors import ArgumentError
from pyg_direct.sampling.random_key import call_key
from tests.reference.sample import sample
from tests.sage import GRAPH, SEEDS, make_sampler


def test_sample_layer_gives_neighbors_node_after_node(device):
    sampler = make_sampler(device)
    expected = sample(GRAPH.in_rows(), SEEDS, [4], call_key(7, 0))

    neighbors, counts = sampler.sample_layer(torch.tensor(SEEDS), 4)

    assert counts.tolist() == [expected.edge_index[1].count(row) for row in range(4)]
    assert neighbors.tolist() == GRAPH.edge_index[0, expected.e_id].tolist()


def test_reindex_numbers_a_layer(device):
    sampler = make_sampler(device)
    inputs, outputs, counts = torch.tensor([9, 4, 9]), torch.tensor([2, 9, 7, 2, 4]), torch.tensor([2, 1, 2])

    n_id, targets, sources = sampler.reindex(inputs, outputs, counts)

    assert n_id.tolist() == [9, 4, 9, 2, 7]
    assert targets.tolist() == [0, 0, 1, 2, 2]
    assert sources.tolist() == [3, 0, 4, 3, 1]


def test_layer_by_layer_gives_the_batch(device):
    sampler = make_sampler(device, (4,))

    neighbors, counts = sampler.sample_layer(torch.tensor(SEEDS), 4, key=5)
    n_id, targets, sources = sampler.reindex(torch.tensor(SEEDS), neighbors, counts)

    whole, _, (adj,) = sampler.sample(SEEDS, key=5)
    assert torch.equal(n_id, whole)
    assert torch.equal(torch.stack([sources, targets]), adj.edge_index)


@pytest.mark.parametrize(("counts", "words"), [([5, 1], "add up to the 2 outputs, got 6"),
                                               ([2], r"shape \(2,\), one for each of inputs, got \(1,\)")])  # fmt: skip
def test_reindex_refuses_counts_of_other_edges(device, counts, words):
    sampler = make_sampler(device)

    with pytest.raises(ArgumentError, match=f"counts must .*{words}"):
        sampler.reindex(torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor(counts))

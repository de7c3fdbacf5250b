"""`sampling="labor"` through the loader."""

import pytest
import torch
from torch_geometric.sampler import NodeSamplerInput

from pyg_direct import LinkNeighborLoader, NodeLoader
from pyg_direct.errors import ArgumentError
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.sampler import NeighborSampler
from pyg_direct.sampling.random_key import batch_key
from tests.batches import check_contract, make_data
from tests.reference.sample import sample


@pytest.mark.parametrize("layer_dependency", [False, True])
def test_batches_are_those_of_the_reference(device, layer_dependency):
    data = make_data()
    graph = (*_rows_of(data),)
    loader = NeighborLoader(data, [3, 2], batch_size=16, seed=3, device=device, sampling="labor",
                            layer_dependency=layer_dependency)  # fmt: skip

    for number, batch in enumerate(loader):
        seeds = list(range(70))[16 * number : 16 * number + 16]
        expected = sample(graph, seeds, [3, 2], batch_key(3, 0, number), sampling="labor",
                          layer_dependency=layer_dependency)  # fmt: skip
        assert batch.n_id.tolist() == expected.n_id
        assert batch.edge_index.tolist() == expected.edge_index
        check_contract(data, batch, seeds, [3, 2])


@pytest.mark.parametrize("layer_dependency", [False, True])
def test_a_given_sampler_draws_as_the_loaders_own(device, layer_dependency):
    data, options = make_data(), {"sampling": "labor", "layer_dependency": layer_dependency, "device": device}
    own = {"batch_size": 16, "seed": 3}

    got = list(NodeLoader(data, NeighborSampler(data, [3, 2], **options), **own))

    for batch, other in zip(got, NeighborLoader(data, [3, 2], **options, **own), strict=True):
        assert [*batch.to_dict()] == [*other.to_dict()]
        assert torch.equal(batch.n_id, other.n_id)
        assert torch.equal(batch.e_id, other.e_id)


def test_a_sampler_whose_options_need_another_plan_refuses_labor(device):
    sampler = NeighborSampler(make_data(), [3, 2], sampling="labor", device=device)

    sampler.disjoint = True

    with pytest.raises(ArgumentError, match="sampling='labor' needs a Data that is sampled uniformly"):
        sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([3])))


def test_links_are_sampled_by_labor_too(device):
    data = make_data()
    samplers = [NeighborSampler(data, [3, 3], sampling=way, device=device) for way in ("labor", "uniform")]

    sizes = [sum(batch.num_nodes for batch in LinkNeighborLoader(
        data, [3, 3], data.edge_index[:, :64], neighbor_sampler=sampler, batch_size=16, seed=1))
        for sampler in samplers]  # fmt: skip

    assert sizes[0] < sizes[1]


def _rows_of(data):
    from tests.graphs import Graph

    return Graph(data.edge_index, data.num_nodes).in_rows()


def test_batches_have_fewer_nodes_than_uniform_ones(device):
    data = make_data()
    options = {"num_neighbors": [4, 4], "batch_size": 8, "seed": 1, "device": device}

    sizes = {
        (sampling, dependent): sum(batch.num_nodes for batch in NeighborLoader(
            data, **options, sampling=sampling, layer_dependency=dependent))
        for sampling, dependent in [("uniform", False), ("labor", False), ("labor", True)]
    }  # fmt: skip

    assert sizes["labor", True] < sizes["labor", False] < sizes["uniform", False]


@pytest.mark.parametrize(("options", "words"), [
    ({"sampling": "ladies"}, "sampling must be one of uniform, labor, got 'ladies'"),
    ({"sampling": "labor", "replace": True}, "replace must be False with sampling='labor', got True"),
    ({"layer_dependency": True}, "layer_dependency must be False with sampling='uniform', got True"),
])  # fmt: skip
def test_options_that_do_not_go_together_are_refused(options, words):
    with pytest.raises(ArgumentError, match=words):
        NeighborLoader(make_data(), [2], device="cpu", **options)

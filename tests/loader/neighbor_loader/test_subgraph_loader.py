import pytest
import torch
from torch_geometric.utils import subgraph

from pyg_direct import SubGraphLoader
from pyg_direct.errors import ArgumentError
from pyg_direct.sampler import NeighborSampler
from tests.hetero_data import check_rows, make_hetero
from tests.loader.induced_loader.test_shadow_loader import make_data


@pytest.mark.parametrize("num_neighbors", [None, [3, 2], [-1]])
def test_batches_hold_all_edges_among_their_nodes(device, num_neighbors):
    data = make_data()

    loader = SubGraphLoader(data, torch.tensor([5, 8, 30]), num_neighbors, batch_size=3, device=device, seed=0)
    batch = next(iter(loader))

    assert batch.n_id[batch.mapping].tolist() == [5, 8, 30]
    _, wanted = subgraph(batch.n_id.cpu(), data.edge_index, torch.arange(data.num_edges))
    assert sorted(batch.e_id.tolist()) == sorted(wanted.tolist())
    assert torch.equal(batch.n_id[batch.edge_index].cpu(), data.edge_index[:, batch.e_id.cpu()])
    assert torch.equal(batch.edge_attr, batch.e_id)


def test_types_have_a_mapping_of_the_seeds(device):
    data = make_hetero()

    batch = next(iter(SubGraphLoader(data, ("paper", torch.tensor([3, 3, 7])), [2], batch_size=3, device=device)))

    check_rows(data, batch)
    assert batch["paper"].n_id[batch["paper"].mapping].tolist() == [3, 3, 7]


def test_batches_of_a_given_sampler_have_a_mapping_too(device):
    data = make_data()
    sampler = NeighborSampler(data, [2], device=device)

    batch = next(iter(SubGraphLoader(data, torch.tensor([5, 8, 30]), neighbor_sampler=sampler, batch_size=3)))

    assert batch.n_id[batch.mapping].tolist() == [5, 8, 30]


def test_another_type_of_subgraph_is_refused():
    with pytest.raises(ArgumentError, match="subgraph_type must be 'induced'"):
        SubGraphLoader(make_data(), num_neighbors=[1], subgraph_type="directional", device="cpu")

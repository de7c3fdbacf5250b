"""A loader that is called gives the batch around positions, masks and lists of them; PyG's hooks build batches too."""

import pytest
import torch
from torch_geometric.sampler import NodeSamplerInput

from pyg_direct import NeighborLoader
from pyg_direct.errors import ArgumentError
from tests.batches import make_data
from tests.hetero_data import check_rows, make_hetero

MASK = [i in (2, 5) for i in range(9)]
POSITIONS = [[2, 5], torch.tensor([2, 5]), torch.tensor(MASK), MASK]
FORMS = ["list", "tensor", "mask", "list of booleans"]


@pytest.mark.parametrize("index", POSITIONS, ids=FORMS)
@pytest.mark.parametrize("options", [{}, {"disjoint": True}], ids=["plan", "general"])
def test_positions_may_come_in_any_form(real_device, index, options):
    loader = NeighborLoader(make_data(), [3], torch.arange(20, 29), device=real_device, **options)

    batch = loader(index)

    assert batch.n_id[: batch.batch_size].tolist() == [22, 25]
    assert batch.input_id.tolist() == [2, 5]


@pytest.mark.parametrize("options", [{}, {"disjoint": True}], ids=["plan", "general"])
def test_no_positions_give_a_batch_of_nothing(real_device, options):
    batch = NeighborLoader(make_data(), [3], torch.arange(20, 29), device=real_device, **options)([])

    assert (batch.batch_size, batch.num_nodes, batch.num_edges) == (0, 0, 0)


@pytest.mark.parametrize("options", [{}, {"disjoint": True}], ids=["plan", "general"])
def test_positions_outside_are_refused(options):
    loader = NeighborLoader(make_data(), [3], torch.arange(20, 29), device="cpu", **options)

    with pytest.raises(ArgumentError, match=r"index must lie in \[0, 9\)"):
        loader([9])


def test_pygs_hook_builds_the_batch_of_a_sample(real_device):
    data = make_hetero()
    loader = NeighborLoader(data, [2, 2], "paper", device=real_device, transform=lambda batch: (batch,))
    out = loader.node_sampler.sample_from_nodes(NodeSamplerInput(torch.arange(2), torch.tensor([3, 7]), None, "paper"))

    (batch,) = loader.filter_fn(out)

    assert batch["paper"].n_id[:2].tolist() == [3, 7]
    check_rows(data, batch)


def test_what_a_sampler_returns_must_be_a_sample():
    loader = NeighborLoader(make_hetero(), [2], "paper", device="cpu", transform_sampler_output=lambda out: "nothing")

    with pytest.raises(TypeError, match="must return a SamplerOutput or a HeteroSamplerOutput, got <class 'str'>"):
        next(iter(loader))

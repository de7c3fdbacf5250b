"""`sampling="labor"` through the loader."""

import pytest

from pyg_direct.errors import ArgumentError
from pyg_direct.loader.neighbor_loader import NeighborLoader
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

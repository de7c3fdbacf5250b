"""Common parts of the tests of plans: placed graphs, seeds, and the batch that the reference expects."""

import pytest
import torch

from pyg_direct.graph.csr_topo import CSRTopo
from tests.reference.sample import sample

KEY = 2**63 + 11
# The plan on a GPU and its twin in the simulator.
ON_GPU_PLANS = pytest.mark.parametrize(
    "device",
    [
        pytest.param(torch.device("cpu"), id="sim", marks=pytest.mark.sim),
        pytest.param(torch.device("cuda"), id="cuda", marks=pytest.mark.gpu),
    ],
)


def place(graph, device, placement="auto"):
    topo = CSRTopo(graph.edge_index, num_nodes=graph.num_nodes)
    return topo.place(placement, device)


def choose_seeds(num_nodes):
    """The last node, the first twice, and two from between."""
    return [num_nodes - 1, 0, num_nodes // 2, 0, num_nodes // 3] if num_nodes else []


def make_seeds(nodes, device):
    return torch.tensor(nodes, dtype=torch.int64, device=device)


def expect_batch(graph, seeds, recipe, key=KEY):
    return sample(graph.in_rows(), seeds, recipe.fanouts, key, recipe.replace, recipe.expand_all, recipe.sampling,
                  recipe.layer_dependency)  # fmt: skip


def assert_equal(got, expected):
    assert got.node_counts == expected.node_counts
    assert got.edge_counts == expected.edge_counts
    assert got.n_id.tolist() == expected.n_id
    assert got.edge_index.tolist() == expected.edge_index
    assert got.e_id.tolist() == expected.e_id
    assert {got.n_id.dtype, got.edge_index.dtype, got.e_id.dtype} == {torch.int64}

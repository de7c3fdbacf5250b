"""What peers are asked to do is what we do: with fanouts above every degree both find the same edges."""

import pytest
import torch

from benchmarks.loader.peers import PEERS, open_peers, rows_of
from pyg_direct import CSRTopo
from pyg_direct.sampling.sampling_options import Recipe
from pyg_direct.sampling.uniform_plan import open_plan

pytestmark = pytest.mark.sparse


@pytest.fixture
def topology() -> CSRTopo:
    return CSRTopo(torch.randint(200, (2, 900)), num_nodes=200)


def test_torch_sparse_samples_the_same_edges(topology):
    seeds, fanouts = torch.tensor([3, 17, 150]), (900, 900)
    plan = open_plan(topology.place("cpu", "cpu"), Recipe(fanouts))

    found = {peer.title: sample(seeds) for peer, sample in open_peers(rows_of(topology), "cpu", fanouts,
                                                                      expand_all=False)}  # fmt: skip

    assert found["torch-sparse"] == plan.sample(seeds, 0).edge_counts[-1] > 0
    assert len(set(found.values())) == 1


def test_a_peer_is_named_with_its_version():
    by_title = {peer.title: peer for peer in PEERS}

    assert by_title["torch-sparse"].name.startswith("torch-sparse 0.")


def test_no_peer_on_the_cpu_expands_all_nodes(topology):
    assert list(open_peers(rows_of(topology), "cpu", (2,), expand_all=True)) == []

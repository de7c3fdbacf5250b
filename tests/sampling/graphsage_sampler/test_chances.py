"""The chance of each node to be met, by which Quiver ranks its caches."""

import pytest
import torch

from pyg_direct.errors import ArgumentError
from pyg_direct.sampling.random_key import call_key
from tests.graphs import make_graph
from tests.sage import make_sampler


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2,), (2, 1)])
def test_chances_agree_with_counting(device, sizes):
    # A tree towards node 0 (each node is listed by one row only), where the estimate is exact for two layers.
    sampler = make_sampler(device, sizes, make_graph(40, [(node, (node - 1) // 3) for node in range(1, 40)]))
    seeds, rounds = torch.tensor([0, 1]), 1000
    met = torch.zeros(40)
    for key in range(rounds):
        met[sampler.sample(seeds, key=call_key(1, key))[0].cpu().unique()] += 1

    prob = sampler.sample_prob(seeds, 40)

    assert (prob.dtype, prob.shape, prob.device) == (torch.float32, (40,), sampler.device)
    deviation = (prob.cpu() * (1 - prob.cpu()) / rounds).sqrt()
    assert bool(((met / rounds - prob.cpu()).abs() <= 4 * deviation + 1e-6).all())
    assert int(((prob > 0.01) & (prob < 0.99)).sum()) >= 5


def test_chances_of_full_layers_are_certain(device):
    reached = make_sampler(device, (-1, -1)).sample([66, 3])[0]

    prob = make_sampler(device, (-1, -1)).sample_prob(torch.tensor([66, 3]), 70)

    assert torch.equal((prob > 0.999).nonzero().view(-1), reached.sort().values)
    assert float(prob[prob <= 0.999].sum()) == 0


def test_chances_need_the_number_of_nodes():
    with pytest.raises(ArgumentError, match="total_node_count must be the number of nodes 70, got 71"):
        make_sampler().sample_prob(torch.tensor([0]), 71)

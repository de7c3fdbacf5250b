"""Evaluating in `torch.inference_mode`, which makes tensors that training cannot use, leaves nothing of them behind."""

import copy

import pytest
import torch

from pyg_direct import CSRTopo, Feature, GraphSageSampler, LinkNeighborLoader, NeighborLoader
from tests.batches import make_data
from tests.hetero_data import make_hetero

LINKS = ("author", "writes", "paper")
MAKERS = {
    "plain": lambda **options: NeighborLoader(make_data(), [3, 2], **options),
    "disjoint": lambda **options: NeighborLoader(make_data(), [3, 2], disjoint=True, **options),
    "types": lambda **options: NeighborLoader(make_hetero(), [3, 2], "paper", **options),
    "links": lambda **options: LinkNeighborLoader(make_hetero(), [3, 2], LINKS, neg_sampling="binary", **options),
}


def rows_of(batch):
    return batch.x if "x" in batch.to_dict() else batch["paper"].x


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_loader_that_was_evaluated_first_trains(real_device, name, prefetch):
    with torch.inference_mode():
        loader = MAKERS[name](batch_size=16, shuffle=True, device=real_device, prefetch=prefetch)
        evaluated = sum(1 for _ in loader)
        loader(torch.tensor([3]))
    weight = torch.ones((), device=real_device, requires_grad=True)

    batches = list(loader)
    for batch in batches:
        (rows_of(batch) * weight).sum().backward()

    assert len(batches) == evaluated
    assert not any(rows_of(batch).is_inference() for batch in batches)
    assert weight.grad is not None


def test_samplers_and_features_that_were_used_first_go_on(real_device):
    seeds = torch.tensor([3, 4], device=real_device)
    with torch.inference_mode():
        sampler = GraphSageSampler(CSRTopo(make_data().edge_index), [3, 2], real_device, seed=1)
        feature = Feature(device=real_device).from_cpu_tensor(make_data().x)
        feature[sampler.sample(seeds)[0]]
    weight = torch.ones((), device=real_device, requires_grad=True)

    (feature[sampler.sample(seeds)[0]] * weight).sum().backward()

    assert weight.grad is not None


@pytest.mark.parametrize("make", [make_data, make_hetero])
def test_a_graph_made_in_inference_mode_is_taken(real_device, make):
    with torch.inference_mode():
        data = make()
    inputs = "paper" if make is make_hetero else None

    batches = list(NeighborLoader(copy.copy(data), [3], inputs, batch_size=16, seed=1, device=real_device))
    expected = list(NeighborLoader(make(), [3], inputs, batch_size=16, seed=1, device=real_device))

    for batch, other in zip(batches, expected, strict=True):
        assert torch.equal(rows_of(batch), rows_of(other))

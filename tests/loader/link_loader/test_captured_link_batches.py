"""Batches of links that a plan on a GPU draws and places are those that are made step by step."""

import pytest
import torch
from torch_geometric.sampler import NegativeSampling

from pyg_direct import LinkLoader, LinkNeighborLoader
from pyg_direct.nn.sorted_edges import find_batch
from pyg_direct.sampler import NeighborSampler
from tests.batches import make_data
from tests.loader.prefetch.batch_groups.test_together import list_parts
from tests.plans import ON_GPU_PLANS
from tests.sampler.test_link_seeds import make_links

LABELS = torch.arange(23) % 4
OPTIONS = {
    "no negatives": {},
    "binary": {"neg_sampling": "binary"},
    "more": {"neg_sampling_ratio": 2.5},
    "labels": {"neg_sampling_ratio": 0.5, "edge_label": LABELS},
    "rows of labels": {"edge_label": LABELS.view(23, 1).repeat(1, 2)},
    "triplets": {"neg_sampling": NegativeSampling("triplet", 1)},
    "more triplets": {"neg_sampling": NegativeSampling("triplet", 3)},
    "ids": {"neg_sampling": "binary", "input_id": torch.arange(23) + 100},
    "all neighbors": {"neg_sampling": "binary", "num_neighbors": [-1, 2], "replace": True},
    "now": {"neg_sampling": "binary", "prefetch": 0},
}
# What a plan does not do.
STEPS = {
    "strict": {"neg_sampling": "binary", "strict_negatives": True},
    "weights": {"neg_sampling": NegativeSampling("binary", dst_weight=torch.arange(70) % 3)},
    "taken out": {"exclude_target_edges": True},
    "disjoint": {"disjoint": True},
    "output": {"transform_sampler_output": lambda out: out},
}


def make_loader(device, **options):
    data = make_data(edge_label_time=5, seed_time=torch.ones(3), src_index="of the user")
    common = {"num_neighbors": [3, 2], "edge_label_index": make_links(), "batch_size": 10, "shuffle": True, "seed": 3}
    return LinkNeighborLoader(data, device=device, **common | options)


def list_epoch(loader):
    batches = list(loader)
    assert not any("_memory" in batch.__dict__ for batch in batches)
    return [(list(batch.to_dict()), list_parts(batch)) for batch in batches]


@pytest.mark.gpu
@pytest.mark.parametrize("option", OPTIONS)
def test_batches_are_those_of_a_cpu(option, monkeypatch):
    made = []
    build = LinkLoader._build_sample
    monkeypatch.setattr(LinkLoader, "_build_sample", lambda *args: made.append(1) or build(*args))

    got = list_epoch(make_loader("cuda", **OPTIONS[option]))

    assert len(made) == len(got) == 3
    assert got == list_epoch(make_loader("cpu", **OPTIONS[option]))


@ON_GPU_PLANS
def test_batches_are_those_made_step_by_step(device):
    options = {"edge_label_index": make_links(5), "batch_size": 5, "num_neighbors": [2], "neg_sampling": "binary"}

    got = list_epoch(make_loader(device, **options))

    assert got == list_epoch(make_loader(device, **options, transform_sampler_output=lambda out: out))


@pytest.mark.gpu
@pytest.mark.parametrize("option", STEPS)
def test_other_options_are_left_to_steps(option, monkeypatch):
    monkeypatch.delattr(LinkLoader, "_build_sample")

    got = list_epoch(make_loader("cuda", **STEPS[option]))

    assert got == list_epoch(make_loader("cpu", **STEPS[option]))


@pytest.mark.gpu
def test_a_sampler_of_another_class_is_asked():
    class Own(NeighborSampler):
        def submit_from_edges(self, index, neg_sampling=None, *, key=None):
            return super().submit_from_edges(index, neg_sampling, key=key + 1)

    data = make_data()
    samplers = [kind(data, [3, 2], device="cuda") for kind in (NeighborSampler, Own)]

    first, other = (list_epoch(make_loader("cuda", neighbor_sampler=sampler)) for sampler in samplers)

    assert first != other


@pytest.mark.gpu
def test_edges_are_known_to_be_sorted():
    assert all(find_batch(batch.edge_index) is not None for batch in make_loader("cuda", neg_sampling="binary"))

"""Loaders say what they are, before and after an epoch, cheaply and whatever state they are in."""

import pytest
import torch
from torch_geometric.data import HeteroData

import pyg_direct as ours
from pyg_direct import loader as loaders
from pyg_direct.sampler import HGTSampler, NeighborSampler
from tests.batches import make_data


def make_typed():
    pairs = torch.arange(40).view(2, 20) % 9
    data = HeteroData()
    data["a"].x, data["b"].x = torch.rand(9, 6), torch.rand(9, 6)
    data["a", "to", "b"].edge_index, data["b", "to", "a"].edge_index = pairs, pairs.flip(0)
    return data


ARGUMENTS = {"batch_size": 16, "device": "cpu"}
MAKERS = {
    "NeighborLoader": lambda: ours.NeighborLoader(make_data(), [3, 2], **ARGUMENTS),
    "typed": lambda: ours.NeighborLoader(make_typed(), [3], ("a", torch.arange(5)), **ARGUMENTS),
    "LinkNeighborLoader": lambda: ours.LinkNeighborLoader(make_data(), [3], **ARGUMENTS),
    "HGTLoader": lambda: ours.HGTLoader(make_typed(), [4], "a", **ARGUMENTS),
    "PPRLoader": lambda: ours.PPRLoader(make_data(), 8, num_walks=4, **ARGUMENTS),
    "ShaDowKHopSampler": lambda: ours.ShaDowKHopSampler(make_data(), 2, 3, **ARGUMENTS),
    "RandomNodeLoader": lambda: ours.RandomNodeLoader(make_data(), 4, device="cpu"),
    "GraphSAINTNodeSampler": lambda: ours.GraphSAINTNodeSampler(make_data(), 16, 3, log=False, device="cpu"),
    "DataListLoader": lambda: ours.DataListLoader([make_data()] * 5, 2),
    "NeighborSampler": lambda: loaders.NeighborSampler(make_data().edge_index, [3], num_nodes=70, **ARGUMENTS),
}
WORDS = {
    "NeighborLoader": "NeighborLoader(70 seeds, [3, 2], batch_size=16, 5 batches, cpu; ",
    "typed": "NeighborLoader(5 a seeds, [3], batch_size=16, 1 batch, cpu; ",
    "LinkNeighborLoader": "LinkNeighborLoader(",
    "HGTLoader": "HGTLoader(9 a seeds, [4] of 2 types, batch_size=16, 1 batch, cpu; ",
    "PPRLoader": "PPRLoader(70 seeds, 8 neighbors, alpha=0.2, batch_size=16, 5 batches, cpu; ",
    "ShaDowKHopSampler": "ShaDowKHopSampler(70 seeds, [3, 3], batch_size=16, 5 batches, cpu; ",
    "RandomNodeLoader": "RandomNodeLoader(70 nodes, num_parts=4, batch_size=18, 4 batches, cpu; ",
    "GraphSAINTNodeSampler": "GraphSAINTNodeSampler(3 steps, batch_size=16, 3 batches, cpu; ",
    "DataListLoader": "DataListLoader(5 graphs, batch_size=2, 3 batches, cpu",
    "NeighborSampler": "NeighborSampler(70 seeds, [3], batch_size=16, 5 batches, cpu",
}


@pytest.mark.parametrize("name", MAKERS)
def test_use_changes_only_where_things_lie(name):
    loader = MAKERS[name]()
    before = repr(loader)

    list(loader)

    after = repr(loader)
    assert before.startswith(WORDS[name])
    assert after.startswith(WORDS[name])
    assert before.partition(";")[0] == after.partition(";")[0]
    assert "\n" not in after


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_is_placed_or_drawn_for_the_text(name, monkeypatch):
    loader = MAKERS[name]()
    state = torch.get_rng_state()
    monkeypatch.setattr(type(loader), "_prepare", lambda self: pytest.fail("the text placed something"))

    text, table = repr(loader), loader._repr_html_()

    assert "..." not in text
    assert table.startswith("<table>")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", [ours.NeighborLoader, ours.LinkNeighborLoader, ours.DataLoader, ours.Feature,
                                  ours.FeatureStore, ours.Producers, NeighborSampler, HGTSampler, ours.GraphedStep,
                                  ours.CSRTopo, ours.RandomNegativeSampler, ours.MixedGraphSageSampler])  # fmt: skip
def test_an_object_whose_constructor_failed_has_a_text(kind):
    assert repr(kind.__new__(kind)).startswith(f"{kind.__name__}(")


def test_rows_are_told_after_an_epoch():
    loader = MAKERS["NeighborLoader"]()

    list(loader)

    assert "; topology " in repr(loader)
    assert ", x " in repr(loader)
    assert "on cpu" in loader._repr_html_()


def test_a_sampler_without_a_length_is_no_obstacle():
    class Endless(torch.utils.data.Sampler):
        def __iter__(self):
            return iter(range(20))

    loader = ours.NeighborLoader(make_data(), [3], sampler=Endless(), **ARGUMENTS)

    assert repr(loader) == "NeighborLoader(70 seeds, [3], batch_size=16, cpu; not placed yet)"


def test_producers_tell_the_loader_and_their_devices():
    producers = ours.Producers(MAKERS["NeighborLoader"](), ["cpu", "cpu"], device="cpu")

    assert repr(producers) == (f"Producers({producers.loader!r}, made by 2 on cpu, ahead=2, cpu)")


def test_features_and_stores_tell_their_rows():
    feature, store = ours.Feature(device="cpu").from_cpu_tensor(torch.rand(40, 3)), ours.FeatureStore("cpu")
    store["paper", "x", None] = torch.rand(10, 2)

    assert repr(feature) == "Feature([40, 3] of torch.float32, 480 B, cpu)"
    assert repr(store) == "FeatureStore(1 table, cpu, x of 'paper': [10, 2] cpu)"


def test_samplers_tell_their_options():
    data = make_data()

    assert repr(NeighborSampler(data, [3], replace=True, seed=4, device="cpu")) == (
        "NeighborSampler([3], replace=True, seed=4, cpu)")  # fmt: skip
    assert repr(HGTSampler(make_typed(), [3], device="cpu")) == "HGTSampler([3] of 2 types, cpu)"


def test_plans_tell_the_topology_and_not_its_arrays():
    loader = MAKERS["NeighborLoader"]()
    list(loader)

    edges = make_data().num_edges
    assert repr(loader._plan) == f"CpuPlan([3, 2], PlacedTopology(70 nodes, {edges:,} edges, cpu))"


def test_the_placement_is_logged_once_on_a_cpu_too(caplog, monkeypatch):
    monkeypatch.setattr("pyg_direct.progress._SAID", set())
    loader = MAKERS["NeighborLoader"]()

    with caplog.at_level("INFO", "pyg_direct"):
        for _ in range(3):
            list(loader)

    (line,) = [record.message for record in caplog.records if record.message.startswith("topology ")]
    assert " on cpu, x " in line

"""Graphs that change under a loader: between epochs, within one, and to fewer nodes than it was made for."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NodeSamplerInput

from pyg_direct import (
    CSRTopo,
    FeatureStore,
    GraphSageSampler,
    HGTLoader,
    LinkNeighborLoader,
    NeighborLoader,
    Producers,
    ShaDowKHopSampler,
    SubGraphLoader,
)
from pyg_direct.errors import IdError, LoaderWarning
from tests.graphs import make_random_graph

NUM_NODES, LEFT = 60, 20
RELATIONS = [("a", "to", "b"), ("b", "to", "a")]


def make_data(num_nodes=NUM_NODES, num_edges=300):
    edges = make_random_graph(num_nodes, num_edges).edge_index
    return Data(x=torch.zeros(num_nodes, 8), y=torch.zeros(num_nodes), edge_index=edges,
                edge_attr=torch.zeros(num_edges, 2), time=torch.zeros(num_nodes).long(),
                weight=torch.ones(num_edges))  # fmt: skip


def make_typed(num_nodes=NUM_NODES, num_edges=300):
    data = HeteroData()
    for kind in "ab":
        data[kind].x = torch.zeros(num_nodes, 8)
    for relation in RELATIONS:
        data[relation].edge_index = make_random_graph(num_nodes, num_edges).edge_index
        data[relation].edge_attr = torch.zeros(num_edges, 2)
    return data


LOADERS = {
    "plain": lambda **options: NeighborLoader(make_data(), [3, 2], **options),
    "half": lambda **options: NeighborLoader(make_data(), [3, 2], store_dtype=torch.float16, **options),
    "trees": lambda **options: NeighborLoader(make_data(), [3, 2], disjoint=True, super_batch=3, **options),
    "times": lambda **options: NeighborLoader(make_data(), [3, 2], time_attr="time", **options),
    "weights": lambda **options: NeighborLoader(make_data(), [3, 2], weight_attr="weight", **options),
    "induced": lambda **options: SubGraphLoader(make_data(), None, [3, 2], **options),
    "shadow": lambda **options: ShaDowKHopSampler(make_data(), 2, 3, **options),
    "links": lambda **options: LinkNeighborLoader(make_data(), [3, 2], neg_sampling="binary", **options),
    "triplets": lambda **options: LinkNeighborLoader(make_data(), [3], neg_sampling="triplet", **options),
    "types": lambda **options: NeighborLoader(make_typed(), [3, 2], "a", **options),
    "hgt": lambda **options: HGTLoader(make_typed(), [8, 8], "a", **options),
    "typed links": lambda **options: LinkNeighborLoader(make_typed(), [3], RELATIONS[0], **options),
}
each_loader = pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)


def shrink(data):
    """Leave the first nodes, and edges among them."""
    for store in data.stores:
        if "edge_index" in store:
            kept = (store.edge_index < LEFT).all(0)
            for key in ("edge_attr", "weight"):
                if key in store:
                    store[key] = store[key][kept]
            store.edge_index = store.edge_index[:, kept]
        for key in ("x", "y", "time"):
            if key in store:
                store[key] = store[key][:LEFT]


class TestFewerNodes:
    """No id that the graph has not any more reaches memory."""

    @each_loader
    def test_seeds_that_are_gone_are_refused_before_a_batch(self, real_device, make):
        loader = make(batch_size=16, device=real_device)
        list(loader)

        shrink(loader.data)

        with pytest.raises(IdError, match=r"must lie in .0, 20.*fewer nodes than when the loader was made"):
            list(loader)
        with pytest.raises(IdError):
            loader([len(loader.dataset) - 1])

    @each_loader
    def test_another_graph_is_sampled_or_refused(self, real_device, make):
        loader = make(batch_size=16, device=real_device)
        list(loader)

        loader.data = make_typed(5, 10) if isinstance(loader.data, HeteroData) else make_data(5, 10)

        with pytest.raises(IdError):
            list(loader)

    @pytest.mark.parametrize("make", [LOADERS["plain"], LOADERS["trees"]])
    def test_another_graph_of_more_nodes_gives_its_neighbors(self, real_device, make):
        loader, other = make(batch_size=16, device=real_device), make_data(NUM_NODES + 5, 400)
        list(loader)

        loader.data = other

        for batch in loader:
            ends = batch.n_id[batch.edge_index]
            assert torch.equal(ends.cpu(), other.edge_index[:, batch.e_id.cpu()])

    def test_seeds_written_later_are_refused(self, real_device):
        seeds = torch.arange(10)
        loader = NeighborLoader(make_data(), [3], seeds, batch_size=5, device=real_device)

        seeds.numpy()[7] = 10**6

        with pytest.raises(IdError, match=r"must lie in .0, 60.*1000000"):
            list(loader)

    def test_seeds_of_a_graph_that_grew_wait_for_the_next_epoch(self, real_device):
        loader = LOADERS["plain"](batch_size=16, device=real_device)
        list(loader)

        loader.data = make_data(NUM_NODES + 9)

        with pytest.raises(IdError, match=r"must lie in .0, 60.*got 62"):
            loader.node_sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([62])))

    def test_tables_of_fewer_rows_are_refused(self, real_device):
        store, graph = FeatureStore(device=real_device), Data(edge_index=make_data().edge_index, num_nodes=NUM_NODES)
        store[None, "x", None] = torch.zeros(NUM_NODES, 4)
        loader = NeighborLoader((store, graph), [3], torch.arange(9), batch_size=5, device=real_device)
        list(loader)

        store.update_tensor(torch.zeros(LEFT, 4), None, "x", None)

        with pytest.raises(ValueError, match=r"'x'.* must have a row for each of the 60 nodes"):
            list(loader)

    @pytest.mark.parametrize("write", [lambda a: a.__setitem__(0, 10**6), lambda a: a.numpy().__setitem__(0, 10**6)])
    def test_neighbors_written_beyond_the_graph_are_refused(self, write):
        indices = torch.arange(5, dtype=torch.int32)
        topology = CSRTopo(indptr=torch.arange(6), indices=indices)
        sampler = GraphSageSampler(topology, [2], device="cpu")

        write(indices)

        with pytest.raises(IdError, match="1000000"):
            sampler.sample([0])

    def test_offsets_written_beyond_the_edges_are_refused(self):
        indptr = torch.arange(6)
        sampler = GraphSageSampler(CSRTopo(indptr=indptr, indices=torch.arange(5)), [2], device="cpu")

        indptr[1] = 10**9

        with pytest.raises(ValueError, match="indptr must not decrease"):
            sampler.sample([0])


def add_to_rows(batch, data):
    """Compare a batch's rows with the graph's, then write to those of the graph, one attribute in its place anew."""
    for kind in data.node_types if isinstance(data, HeteroData) else [None]:
        own, whole = (batch, data) if kind is None else (batch[kind], data[kind])
        ids = own.n_id.cpu()
        assert torch.equal(own.x.cpu(), whole.x[ids])
        whole.x[ids] += 1
        if kind is None:
            assert torch.equal(own.y.cpu(), whole.y[ids[own.root_n_id.cpu()] if "root_n_id" in own else ids])
            whole.y = whole.y + 1
    for own, whole in zip(batch.edge_stores, data.edge_stores, strict=True):
        if "e_id" in own:
            assert torch.equal(own.edge_attr.cpu(), whole.edge_attr[own.e_id.cpu()])
            whole.edge_attr += 1


def train(loader, step=add_to_rows):
    """Go over an epoch with a step that writes to the graph."""
    for batch in loader:
        step(batch, loader.data)


class TestRowsWrittenBack:
    """Batches have the rows of the moment they are handed out, as those of PyG's loader without workers."""

    @each_loader
    def test_later_batches_have_them_and_a_warning_says_so_once(self, real_device, make):
        loader = make(batch_size=16, device=real_device)

        with pytest.warns(LoaderWarning, match="prefetch=0") as told:
            train(loader)
        with warnings.catch_warnings():
            warnings.simplefilter("error", LoaderWarning)
            train(loader)

        assert len([one for one in told if one.category is LoaderWarning]) == 1

    @pytest.mark.parametrize("make", [LOADERS["plain"], LOADERS["half"], LOADERS["types"]])
    def test_nothing_is_told_where_nothing_is_made_ahead(self, real_device, make):
        loader = make(batch_size=16, device=real_device, prefetch=0)

        with warnings.catch_warnings():
            warnings.simplefilter("error", LoaderWarning)
            train(loader)

    def test_batches_are_those_that_come_without_writes(self, real_device):
        make = LOADERS["plain"]
        written, untouched = (make(batch_size=16, device=real_device, seed=3) for _ in range(2))

        others = iter(untouched)

        def step(batch, data):
            other = next(others)
            assert torch.equal(batch.n_id, other.n_id)
            assert torch.equal(batch.edge_index, other.edge_index)
            data.x += 1

        with pytest.warns(LoaderWarning):
            train(written, step)

    @pytest.mark.parametrize("option", ["transform", "transform_sampler_output"])
    def test_functions_of_the_program_see_them(self, real_device, option):
        calls = []
        loader = LOADERS["plain"](batch_size=16, device=real_device, **{option: lambda one: calls.append(1) or one})

        with pytest.warns(LoaderWarning):
            train(loader)

        assert len(calls) >= len(loader)

    def test_updates_of_a_store_are_seen(self, real_device):
        store, graph = FeatureStore(device=real_device), Data(edge_index=make_data().edge_index, num_nodes=NUM_NODES)
        store[None, "x", None] = torch.zeros(NUM_NODES, 4)
        loader = NeighborLoader((store, graph), [3], torch.arange(40), batch_size=8, device=real_device)
        feature = store.find(store.get_all_tensor_attrs()[0])

        def step(batch, _):
            assert torch.equal(batch.x, feature[batch.n_id])
            feature.update_(batch.n_id, batch.x + 1)

        with pytest.warns(LoaderWarning, match="prefetch=0"):
            train(loader, step)

    def test_producers_cannot_see_them_and_say_so(self, monkeypatch):
        loader = LOADERS["plain"](batch_size=16, device="cpu")
        sent = iter([*((0, batch) for batch in loader), (1, None)])
        # Without processes, which take seconds to start.
        monkeypatch.setattr(Producers, "_start", lambda producers: None)
        monkeypatch.setattr(Producers, "_receive", lambda producers, lane, turn: next(sent))
        producers = Producers(loader, ["cpu"], device="cpu")

        def write():
            for _ in producers:
                loader.data.x += 1

        with pytest.warns(LoaderWarning, match="batches of other processes") as told:
            write()

        assert len(told) == 1


# Torch counts none of these.
HIDDEN = [lambda tensor: tensor.numpy(), lambda tensor: tensor.data]
hidden = pytest.mark.parametrize("open_up", HIDDEN, ids=["numpy", "data"])


class TestHiddenWrites:
    """Writes through NumPy and `.data`, which torch does not count, take effect in the next epoch."""

    @pytest.mark.parametrize("options", [{}, {"disjoint": True}, {"subgraph_type": "bidirectional"}],
                             ids=["plain", "disjoint", "both ways"])  # fmt: skip
    @hidden
    def test_edges_are_seen(self, real_device, options, open_up):
        data = Data(edge_index=torch.tensor([[1, 2], [0, 0]]), num_nodes=4)
        loader = NeighborLoader(data, [-1], torch.tensor([0]), device=real_device, **options)
        (before,) = loader

        open_up(data.edge_index)[0] = 3

        (after,) = loader
        assert before.n_id.tolist()[:3] == [0, 1, 2]
        assert set(after.n_id.tolist()) == {0, 3}
        assert set(loader([0]).n_id.tolist()) == {0, 3}

    @hidden
    def test_edges_between_types_are_seen(self, real_device, open_up):
        data = make_typed(4, 1)
        loaders = [NeighborLoader(data, [-1], ("a", [0]), device=real_device),
                   HGTLoader(data, [4], ("a", [0]), device=real_device)]  # fmt: skip
        for loader in loaders:
            list(loader)

        open_up(data["b", "to", "a"].edge_index)[:] = torch.tensor([[3], [0]])

        for (batch,) in loaders:
            assert batch["b"].n_id.tolist() == [3]

    @hidden
    def test_times_are_seen(self, real_device, open_up):
        data = Data(edge_index=torch.tensor([[1, 2], [0, 0]]), num_nodes=3, time=torch.tensor([5, 1, 9]))
        loader = NeighborLoader(data, [-1], torch.tensor([0]), time_attr="time", device=real_device)
        list(loader)

        open_up(data.time)[1:] = torch.tensor([9, 1])

        (batch,) = loader
        assert batch.n_id.tolist() == [0, 2]

    @hidden
    def test_weights_are_seen(self, real_device, open_up):
        data = Data(edge_index=torch.tensor([[1, 2], [0, 0]]), num_nodes=3, weight=torch.tensor([1.0, 0.0]))
        loader = NeighborLoader(data, [1], torch.tensor([0]), weight_attr="weight", device=real_device)
        list(loader)

        open_up(data.weight)[:] = torch.tensor([0.0, 1.0])

        (batch,) = loader
        assert batch.n_id.tolist() == [0, 2]

    @pytest.mark.parametrize("store_dtype", [None, torch.bfloat16])
    @pytest.mark.parametrize("make_rows", [lambda: np.zeros((NUM_NODES, 8), "f4"), lambda: torch.zeros(NUM_NODES, 8),
                                           lambda: torch.zeros(8, NUM_NODES).t()],
                             ids=["array", "tensor", "turned"])  # fmt: skip
    def test_rows_are_seen_where_they_are_copied_too(self, real_device, store_dtype, make_rows):
        data = make_data()
        data.x = make_rows()
        loader = NeighborLoader(data, [3], batch_size=16, store_dtype=store_dtype, device=real_device)
        list(loader)

        (data.x if isinstance(data.x, np.ndarray) else data.x.data)[:] = 7

        assert all(bool((batch.x == 7).all()) for batch in loader)

    def test_an_epoch_without_writes_places_nothing_again(self, real_device):
        loader = LOADERS["half"](batch_size=16, device=real_device)
        list(loader)
        before = loader._placed, loader._attributes.describe()

        list(loader)

        assert (loader._placed, loader._attributes.describe()) == before

"""Graphs that change under a loader: between epochs, within one, and to fewer nodes than it was made for."""

from __future__ import annotations

import gc
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NegativeSampling, NodeSamplerInput
from torch_geometric.testing import MyFeatureStore, MyGraphStore

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
from pyg_direct.sampler.link_seeds import NegativeSource
from pyg_direct.sampling.sampling_options import Recipe
from pyg_direct.sampling.uniform_plan import open_plan
from tests.graphs import make_random_graph
from tests.processes import quick_starts, run_ranks

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
    def test_seeds_that_are_gone_are_refused_where_an_epoch_is_resumed(self, make):
        loader = make(batch_size=16, device="cpu", seed=1)
        next(iter(loader))
        state = loader.state_dict()

        shrink(loader.data)
        other = make(batch_size=16, device="cpu", seed=1)
        shrink(other.data)

        for resumed in (loader, other):
            resumed.load_state_dict(state)
            with pytest.raises(IdError, match=r"must lie in .0, 20.*fewer nodes than when the loader was made"):
                list(resumed)

    def test_producers_refuse_seeds_that_are_gone_and_know_other_rows_and_edges(self):
        loader = LOADERS["trees"](batch_size=16, device="cpu", seed=1)
        with quick_starts():
            producers = Producers(loader, ["cpu"], device="cpu")
            list(producers)

            loader.data.x = torch.full((NUM_NODES, 8), 5.0)
            assert all(bool((batch.x == 5).all()) for batch in producers)
            loader.data.edge_index.numpy()[:] = 3
            assert {*torch.cat([batch.n_id[batch.edge_index[0]] for batch in producers]).tolist()} == {3}

            shrink(loader.data)
            with pytest.raises(IdError, match=r"must lie in .0, 20"):
                list(producers)

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

    @pytest.mark.parametrize("fanout", [-1, 2])
    def test_offsets_that_are_written_after_their_check_are_refused(self, monkeypatch, fanout):
        indptr = torch.arange(0, 33, 8)
        topology = CSRTopo(indptr=indptr, indices=torch.arange(32, dtype=torch.int32) % 4)
        placed = topology.place("cpu", "cpu")
        plan, check = open_plan(placed, Recipe((fanout,))), type(placed).check_rows

        def write_late(self, nodes):
            check(self, nodes)
            indptr.numpy()[2] = 10**9

        monkeypatch.setattr(type(placed), "check_rows", write_late)
        with pytest.raises(ValueError, match="indptr must not decrease from 0 to the number of edges 32, got"):
            plan.sample(torch.arange(4), 1)

    @pytest.mark.parametrize(("row", "value"), [(1, 10**9), (2, -3), (4, 1)])
    def test_offsets_that_are_written_unseen_are_refused(self, row, value):
        indptr = torch.arange(6)
        topology = CSRTopo(indptr=indptr, indices=torch.arange(5, dtype=torch.int32))
        plan = open_plan(topology.place("cpu", "cpu"), Recipe((2,)))

        indptr.numpy()[row] = value

        with pytest.raises(ValueError, match="indptr must not decrease from 0 to the number of edges 5, got"):
            plan.sample(torch.arange(5), 1)


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

    @pytest.mark.parametrize("make", [LOADERS["plain"], LOADERS["half"], LOADERS["types"]])
    @pytest.mark.parametrize("open_up", [lambda rows: rows.data, lambda rows: rows.numpy()], ids=["data", "numpy"])
    def test_writes_to_all_rows_that_torch_does_not_count_are_seen_on_a_cpu(self, make, open_up):
        loader = make(batch_size=16, device="cpu")

        def step(batch, data):
            for own, whole in zip(batch.node_stores, data.node_stores, strict=True):
                assert torch.equal(own.x, whole.x[own.n_id])
                open_up(whole.x)[:] += 1

        with pytest.warns(LoaderWarning, match="prefetch=0"):
            train(loader, step)
        with warnings.catch_warnings():
            warnings.simplefilter("error", LoaderWarning)
            train(loader, step)

    def test_writes_to_rows_of_inference_mode_are_seen_on_a_cpu(self):
        with torch.inference_mode():
            data = make_data()
        loader = NeighborLoader(data, [3], batch_size=16, device="cpu")

        @torch.inference_mode()
        def step(batch, data):
            assert torch.equal(batch.x, data.x[batch.n_id])
            data.x += 1

        with pytest.warns(LoaderWarning, match="prefetch=0"):
            train(loader, step)

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

    @pytest.mark.parametrize("has_types", [False, True])
    def test_those_of_a_store_of_others_are_seen_where_it_keeps_tensors(self, real_device, has_types):
        store, graph, kind = MyFeatureStore(), MyGraphStore(), "a" if has_types else None
        edge_type = ("a", "to", "a") if has_types else None
        store.put_tensor(torch.zeros(NUM_NODES, 4), group_name=kind, attr_name="x", index=None)
        graph.put_edge_index(make_random_graph(NUM_NODES, 300).edge_index, edge_type=edge_type, layout="coo",
                             size=(NUM_NODES, NUM_NODES))  # fmt: skip
        seeds = torch.arange(40) if kind is None else (kind, torch.arange(40))
        loader = NeighborLoader((store, graph), [3], seeds, batch_size=8, device=real_device)
        rows = store.get_tensor(group_name=kind, attr_name="x", index=None)

        def step(batch, _):
            own = batch if kind is None else batch[kind]
            assert torch.equal(own.x.cpu(), rows[own.n_id.cpu()])
            rows[own.n_id.cpu()] += 1

        with pytest.warns(LoaderWarning, match="rows of data were written") as told:
            train(loader, step)
        with warnings.catch_warnings():
            warnings.simplefilter("error", LoaderWarning)
            train(loader, step)

        assert len([one for one in told if one.category is LoaderWarning]) == 1

    def test_a_store_of_others_may_note_what_it_likes(self):
        class Noting(MyFeatureStore):
            def _get_tensor(self, attr):
                self.calls, self.last = getattr(self, "calls", 0) + 1, super()._get_tensor(attr)
                return self.last

        store, graph = Noting(), Data(edge_index=make_data().edge_index, num_nodes=NUM_NODES)
        store.put_tensor(torch.zeros(NUM_NODES, 4), group_name=None, attr_name="x", index=None)
        loader = NeighborLoader((store, graph), [3], torch.arange(40), batch_size=8, device="cpu")

        with warnings.catch_warnings():
            warnings.simplefilter("error", LoaderWarning)
            train(loader, lambda batch, _: None)

    def test_attributes_removed_and_added_beside_shared_rows_are_followed(self):
        data = make_typed()
        data[RELATIONS[0]].w = torch.ones(300)
        loader = NeighborLoader(data, [3, 2], "a", batch_size=8, device="cpu", prefetch=0,
                                cache_policy="device_replicate")  # fmt: skip
        batches = iter(loader)
        first = next(batches)
        del data[RELATIONS[0]].w
        data[RELATIONS[1]].note = 5
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LoaderWarning)
            batch = next(batches)

        assert "w" in first[RELATIONS[0]]
        assert "w" not in batch[RELATIONS[0]]
        assert batch[RELATIONS[1]].note == 5

    def test_rows_stay_noted_as_memory_of_their_batch_after_an_attribute_was_removed(self):
        data = make_data()
        loader = NeighborLoader(data, [3, 2], batch_size=8, device="cpu", prefetch=0, cache_policy="device_replicate")
        build, noted = loader._build_sample, []

        def build_as_on_a_gpu(sample, positions, shared, _):
            sample.memory, memory = [sample.n_id], []
            noted.append(memory)
            return build(sample, positions, shared, memory)

        loader._build_sample = build_as_on_a_gpu
        batches = iter(loader)
        first = next(batches)
        del data.y
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LoaderWarning)
            batch = next(batches)

        assert "y" in first
        assert "y" not in batch
        for made, memory in zip((first, batch), noted, strict=True):
            owners = {value.untyped_storage().data_ptr() for value in memory}
            assert {value.untyped_storage().data_ptr() for value in (made.x, made.edge_attr)} <= owners

    # In one memory a write of the other process is found when an epoch begins, as one that torch does not count is.
    @pytest.mark.parametrize(("cold", "of_others"), [("unified", 1), ("shard", 0)])
    def test_those_that_processes_share_are_told_once(self, cold, of_others):
        assert run_ranks(write_shared, 2, cold) == [[0, 1, 1], [0, of_others, 1]]


def write_shared(rank, cold):
    """How often writes to shared rows have been told: before any, after one by process 0, and by both in an epoch."""
    data, counts = make_data(), []
    data.x = torch.zeros(NUM_NODES, 32)
    loader = NeighborLoader(data, [3, 2], batch_size=8, device="cpu", ranks="auto", cache_policy="device_replicate",
                            cold_policy=cold, seed=1)  # fmt: skip
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", LoaderWarning)
        list(loader)
        counts.append(len(told))
        dist.barrier()
        if rank == 0:
            data.x[:] = 3
        dist.barrier()
        list(loader)
        counts.append(len(told))
        for _ in loader:
            data.x[:] = rank
        counts.append(len(told))
    assert all("cache_policy" in str(one.message) for one in told)
    # All of them may give others.
    data.x = torch.full_like(data.x, 9)
    dist.barrier()
    assert all(bool((batch.x == 9).all()) for batch in loader)
    dist.barrier()
    return counts


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

    @pytest.mark.parametrize("mode", ["binary", "triplet"])
    @hidden
    @pytest.mark.full
    def test_weights_of_negatives_are_seen(self, real_device, mode, open_up):
        weights = [torch.eye(NUM_NODES)[node].clone() for node in (1, 2)]
        negatives = NegativeSampling(mode, 2, src_weight=weights[0], dst_weight=weights[1])
        data = make_data()
        loader = LinkNeighborLoader(data, [2], data.edge_index[:, :9], batch_size=5, neg_sampling=negatives,
                                    device=real_device)  # fmt: skip
        assert list_negatives(loader, mode) == {(1, 2)}

        for node, weight in zip((7, 8), weights, strict=True):
            open_up(weight)[:] = torch.eye(NUM_NODES)[node]

        assert list_negatives(loader, mode) == {(7, 8)}
        gc.collect()
        kept = [made for made in gc.get_objects() if type(made) is NegativeSource and made.weights[0] is weights[0]]
        assert len(kept) == 1

    @hidden
    def test_wrong_weights_of_negatives_are_refused(self, open_up):
        weight, data = torch.ones(NUM_NODES), make_data()
        loader = LinkNeighborLoader(
            data, [2], neg_sampling=NegativeSampling("triplet", dst_weight=weight), device="cpu"
        )
        next(iter(loader))

        open_up(weight)[3] = -1

        with pytest.raises(ValueError, match="neg_sampling must have finite weights of at least 0, got -1"):
            next(iter(loader))

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
        before = loader._plan.topology, loader._general.describe()

        list(loader)

        assert (loader._plan.topology, loader._general.describe()) == before


def list_negatives(loader, mode):
    """The (source, target) of negative links that batches have; of triplets, whose sources are given, (1 or 7, ..)."""
    found = set()
    for batch in loader:
        if mode == "binary":
            ends = batch.n_id[batch.edge_label_index[:, batch.edge_label == 0]]
            found |= set(map(tuple, ends.t().tolist()))
        else:
            targets = batch.n_id[batch.dst_neg_index].unique().tolist()
            found |= {(target - 1, target) for target in targets}
    return found


def make_rows_of_edges(dtype):
    """Offsets and neighbors of a graph of `NUM_NODES` nodes with five edges each."""
    neighbors = torch.randint(NUM_NODES, (5 * NUM_NODES,), generator=torch.Generator().manual_seed(0))
    return torch.arange(0, 5 * NUM_NODES + 1, 5, dtype=dtype), neighbors.to(dtype)


def open_rows(form, arrays, **options):
    """A loader over edges that are kept by row, in arrays that the program has."""
    indptr, indices = arrays
    options = {"batch_size": 8, "device": "cpu", **options}
    if form == "adj_t":
        adj_t = torch.sparse_csr_tensor(indptr, indices, torch.ones(indices.numel()), (NUM_NODES, NUM_NODES))
        # Torch may have made others of them.
        arrays[:] = adj_t.crow_indices(), adj_t.col_indices()
        return NeighborLoader(Data(adj_t=adj_t, x=torch.zeros(NUM_NODES, 4)), [3, 2], **options)
    store, graph, kind = FeatureStore(device="cpu"), MyGraphStore(), "a" if form == "types" else None
    store[kind, "x", None] = torch.zeros(NUM_NODES, 4)
    graph.put_edge_index((indices, indptr), edge_type=("a", "to", "a") if kind else None, layout="csc",
                         size=(NUM_NODES, NUM_NODES))  # fmt: skip
    seeds = torch.arange(NUM_NODES) if kind is None else (kind, torch.arange(NUM_NODES))
    return NeighborLoader((store, graph), [3, 2], seeds, **options)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("options", [{}, {"disjoint": True}, {"subgraph_type": "induced"}],
                         ids=["plain", "disjoint", "induced"])  # fmt: skip
@pytest.mark.parametrize("form", ["adj_t", "store", "types"])
class TestRowsOfEdges:
    """Offsets and neighbors that a program has, and writes through NumPy, are seen in the next epoch, or refused."""

    def test_others_are_sampled_in_the_next_epoch(self, form, options, dtype):
        arrays = [*make_rows_of_edges(dtype)]
        loader = open_rows(form, arrays, **options)
        list(loader)

        arrays[1].numpy()[:] = 7

        for batch in loader:
            own, edge_index = (batch["a"], batch["a", "to", "a"].edge_index) if form == "types" else (
                batch, batch.adj_t.to_dense().t().nonzero().t() if form == "adj_t" else batch.edge_index)  # fmt: skip
            assert own.n_id[edge_index[0]].unique().tolist() == [7]

    @pytest.mark.parametrize("which", [0, 1], ids=["offsets", "neighbors"])
    def test_wrong_ones_are_refused_in_the_next_epoch(self, form, options, dtype, which):
        arrays = [*make_rows_of_edges(dtype)]
        loader = open_rows(form, arrays, **options)
        list(loader)

        arrays[which].numpy()[9:30] = 10**8

        with pytest.raises(ValueError, match=r"indptr.* not decrease|must lie in \[0, 60\).* got 100000000"):
            list(loader)
        with pytest.raises(ValueError, match=r"indptr.* not decrease|must lie in \[0, 60\).* got 100000000"):
            loader([2, 3])

    @pytest.mark.parametrize("which", [0, 1], ids=["offsets", "neighbors"])
    def test_wrong_ones_within_an_epoch_are_refused_or_not_read(self, form, options, dtype, which):
        arrays = [*make_rows_of_edges(dtype)]
        loader, seen = open_rows(form, arrays, **options), []

        def step(batch, _):
            seen.append(batch)
            arrays[which].numpy()[9:] = 10**8

        # Refused where they are read in the program's memory.
        is_read = dtype == torch.int32 if which else form == "adj_t" and not options and dtype == torch.int64
        if is_read:
            with pytest.raises(ValueError, match=r"indptr must not decrease|must lie in \[0, 60\).* got 100000000"):
                train(loader, step)
        else:
            train(loader, step)
            assert len(seen) == len(loader)


def test_a_list_of_edges_in_a_store_that_is_written_is_seen():
    store, graph = FeatureStore(device="cpu"), make_data()
    store[None, "x", None] = torch.zeros(NUM_NODES, 4)
    loader = NeighborLoader((store, graph), [3], torch.arange(20), batch_size=8, device="cpu")
    list(loader)

    graph.edge_index.numpy()[0] = 7

    assert {*torch.cat([batch.n_id[batch.edge_index[0]] for batch in loader]).tolist()} == {7}

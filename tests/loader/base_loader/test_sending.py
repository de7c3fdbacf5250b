"""Loaders, samplers and topologies that are sent to other processes make there the batches they make here."""

import copy
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing as mp
from torch.multiprocessing.reductions import StorageWeakRef
from torch_geometric.data import HeteroData
from torch_geometric.sampler import HeteroSamplerOutput, NodeSamplerInput

from pyg_direct import CSRTopo, GraphSageSampler, HGTLoader, LinkNeighborLoader, NeighborLoader, ShaDowKHopSampler
from pyg_direct.loader import NeighborSampler as LayerLoader, base_loader
from pyg_direct.runtime.host.shared_memory import find_shared
from pyg_direct.sampler import HGTSampler, NeighborSampler, hgt_sampler, neighbor_sampler
from tests.batches import hash_batches, make_data
from tests.hetero_data import make_hetero


def make(name, **options):
    common = {"batch_size": 16, "seed": 1, "device": "cpu", **options}
    if name == "plain":
        return NeighborLoader(make_data(), [3, 2], shuffle=True, **common)
    if name == "disjoint":
        return NeighborLoader(make_data(), [3, 2], disjoint=True, **common)
    if name == "types":
        data = make_hetero()
        return NeighborLoader(data, [3, 2], data.node_types[0], **common)
    if name == "links":
        return LinkNeighborLoader(make_data(), [3], neg_sampling="binary", **{**common, "batch_size": 200})
    return LayerLoader(make_data().edge_index, [3], **common)


def words(batches):
    return [str(batch if isinstance(batch, tuple) else batch.to_dict()) for batch in batches]


@pytest.mark.parametrize("name", ["plain", "disjoint", "types", "links", "layers"])
@pytest.mark.parametrize("is_used", [False, True])
def test_a_loader_that_was_sent_makes_the_same_batches(name, is_used):
    loader = make(name)
    if is_used:
        list(loader)
    state = None if name == "layers" else loader.state_dict()

    sent = pickle.loads(bytes(ForkingPickler.dumps(loader)))

    assert state is None or sent.state_dict() == state
    assert words(sent) == words(loader)


@pytest.mark.parametrize("name", ["disjoint", "types", "links", "hgt", "shadow"])
def test_a_loader_and_its_sampler_take_the_same_device_where_they_come_to(name, monkeypatch):
    if name in ("hgt", "shadow"):
        loader = HGTLoader(make_hetero(), [3], "author") if name == "hgt" else ShaDowKHopSampler(make_data(), 1, 3)
    else:
        loader = make(name, device=None)
    letter, there = pickle.dumps(loader), torch.device("meta")
    for module in (base_loader, neighbor_sampler, hgt_sampler):
        monkeypatch.setattr(module, "resolve_device", lambda device: there)

    sent = pickle.loads(letter)

    assert sent.device == sent._sampler.device == there


@pytest.mark.parametrize("is_used", [False, True])
def test_samplers_that_were_sent_draw_the_same(is_used):
    sage = GraphSageSampler(CSRTopo(make_data().edge_index), [3, 2], device="cpu", seed=1)
    if is_used:
        sage.sample([3, 4])

    sent = pickle.loads(bytes(ForkingPickler.dumps(sage)))

    assert str(sent.sample([1, 2])) == str(sage.sample([1, 2]))
    assert sent.sample_layer([1], 3, key=1)[0].tolist() == sage.sample_layer([1], 3, key=1)[0].tolist()


def test_a_sampler_of_pygs_interface_is_sent_and_copied():
    data = make_data()
    sampler = NeighborSampler(data, [3], device="cpu", seed=1)
    sampler.open_plan()

    sent, shallow = pickle.loads(bytes(ForkingPickler.dumps(sampler))), copy.copy(sampler)

    assert shallow._opened is sampler._opened
    assert sent.num_neighbors.values == [3]
    assert sent._opened is not sampler._opened


def test_an_hgt_sampler_is_sent_without_what_other_loaders_opened_and_copied():
    data = make_hetero()
    beside = NeighborLoader(data, [3], "author", batch_size=16, device="cpu")
    list(beside)
    sampler = HGTSampler(data, [3], device="cpu", seed=1)
    index = NodeSamplerInput(None, torch.tensor([1, 2]), None, "author")

    sent, shallow = pickle.loads(pickle.dumps(sampler)), copy.copy(sampler)

    assert shallow._plan is sampler._plan
    assert str(sent.sample_from_nodes(index, key=7)) == str(sampler.sample_from_nodes(index, key=7))


def test_a_topology_is_moved_once():
    topo = CSRTopo(make_data().edge_index)
    before = [StorageWeakRef(array.untyped_storage()) for array in (topo.indptr, topo.indices, topo.eid)]

    letters = [bytes(ForkingPickler.dumps(topo)) for _ in range(3)]

    # Nor held twice.
    assert all(storage.expired() for storage in before)
    memory = find_shared(topo.indices)
    assert memory is not None
    assert topo._sent["_indices"][1] is memory
    for letter in letters:
        other = pickle.loads(letter)
        for name in ("indptr", "indices", "eid"):
            assert getattr(other, name).tolist() == getattr(topo, name).tolist()
        assert other.indices.dtype == topo.indices.dtype


def test_a_topology_is_pickled_whole_for_files():
    topo = CSRTopo(make_data().edge_index)

    letter = pickle.dumps(topo)

    assert len(letter) > topo.num_bytes
    assert pickle.loads(letter).indices.tolist() == topo.indices.tolist()


def sample(rank, loader, sage, queue):
    loader._ranks.ranks = (rank, 2)
    queue.put((rank, [hash_batches([batch]) for batch in loader], str(sage.sample([1, 2]))))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_starts")
def test_spawned_processes_share_an_epoch_of_one_loader():
    loader = make("plain", ranks="auto")
    sage = GraphSageSampler(CSRTopo(make_data().edge_index), [3, 2], device="cpu", seed=1)
    queue = mp.get_context("spawn").SimpleQueue()

    mp.spawn(sample, args=(loader, sage, queue), nprocs=2)

    got = {rank: (hashes, drawn) for rank, hashes, drawn in (queue.get() for _ in range(2))}
    expected = [hash_batches([batch]) for batch in make("plain")]
    assert [got[number % 2][0][number // 2] for number in range(len(expected))] == expected
    assert got[0][1] == got[1][1] == str(sage.sample([1, 2]))


def test_samples_and_layers_are_sent_as_pygs_alone():
    data = HeteroData(a={"num_nodes": 9}, a__to__a={"edge_index": torch.randint(9, (2, 40))})
    seeds = NodeSamplerInput(None, torch.arange(4), None, "a")
    samples = [sampler(data, [3, 2], device="cpu", seed=1) for sampler in (NeighborSampler, HGTSampler)]
    made = [sampler.sample_from_nodes(seeds) for sampler in samples]
    layers = next(iter(LayerLoader(data["a", "to", "a"].edge_index, [2, 2], device="cpu")))

    sent = pickle.dumps([made, layers])
    got, _ = pickle.loads(sent)

    assert b"pyg_direct" not in sent
    assert [type(out) for out in got] == [HeteroSamplerOutput] * 2
    for out, again in zip(made, got, strict=True):
        assert type(copy.copy(out)) is type(out)
        assert torch.equal(again.row["a", "to", "a"], out.row["a", "to", "a"])
        assert again.metadata == out.metadata == (None, None)
        assert again.num_sampled_nodes == out.num_sampled_nodes

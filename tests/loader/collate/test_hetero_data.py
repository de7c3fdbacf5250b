"""Batches of a `HeteroData`: what PyG's loader gives, on the device."""

import copy

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData
from torch_geometric.loader import NeighborLoader as PygNeighborLoader
from torch_geometric.nn import SAGEConv, to_hetero
from torch_geometric.sampler import NumNeighbors

from pyg_direct import HGTLoader, LinkNeighborLoader, NeighborLoader
from pyg_direct.errors import ArgumentError
from pyg_direct.sampler.keyed_sampler import Drawn
from tests.hetero_data import check_rows, make_hetero, name_edges
from tests.hetero_graphs import make_parts

SEEDS = ("paper", torch.tensor([3, 17, 0, 29]))


@pytest.mark.parametrize("subgraph_type", ["directional", "induced"])
def test_rows_and_edges_are_those_of_the_graph(real_device, subgraph_type):
    data = make_hetero()

    batches = list(NeighborLoader(data, [3, 2], "paper", subgraph_type=subgraph_type, batch_size=16, shuffle=True,
                                  seed=4, device=real_device))  # fmt: skip

    assert sorted(torch.cat([batch["paper"].input_id for batch in batches]).tolist()) == list(range(40))
    for batch in batches:
        check_rows(data, batch)
        assert batch["paper"].n_id[: batch["paper"].batch_size].tolist() == batch["paper"].input_id.tolist()
        assert batch["paper"].x.device.type == real_device.type


@pytest.mark.sparse
@pytest.mark.parametrize("subgraph_type", ["directional", "induced"])
def test_with_all_neighbors_it_is_the_batch_of_pyg(real_device, subgraph_type):
    data = make_hetero()
    options = {"input_nodes": SEEDS, "batch_size": 4, "subgraph_type": subgraph_type}

    (batch,) = NeighborLoader(data, [-1, -1], **options, device=real_device)

    (expected,) = PygNeighborLoader(data, [-1, -1], **options)
    assert name_edges(batch) == name_edges(expected)
    assert batch.input_type == expected.input_type
    assert (batch.node_types, batch.edge_types) == (expected.node_types, expected.edge_types)
    for part, other in zip(batch.stores, expected.stores, strict=True):
        # torch_sparse, unlike pyg-lib, does not count.
        counts = {"num_sampled_nodes", "num_sampled_edges"}
        assert set(part.keys()) - counts == set(other.keys()) - counts
        for key, value in other.items():
            if isinstance(value, torch.Tensor):
                assert (part[key].dtype, part[key].shape) == (value.dtype, value.shape), key
    for kind in data.node_types:
        assert sorted(batch[kind].n_id.tolist()) == sorted(expected[kind].n_id.tolist())


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("own", [None, "e_id", "num_sampled_edges", "n_id", "num_nodes", "name", "batch", "rows", "row",
                                 "rows and tags"])  # fmt: skip
def test_batches_have_the_values_that_they_have_where_samples_pass_the_program(real_device, own, disjoint):
    data = make_hetero()
    for store in data.edge_stores:
        for key in {*store.keys()} - {"edge_index"}:
            del store[key]
        if own in ("e_id", "num_sampled_edges"):
            store[own] = torch.arange(store.num_edges) + 7
    for store in data.node_stores:
        count = store.num_nodes
        if own in ("n_id", "num_nodes", "name", "batch"):
            store[own] = {"num_nodes": count, "name": "a name"}.get(own, torch.arange(count) + 7)
        if own == "rows and tags":
            store.tags = [f"tag {number}" for number in range(count)]
    for number, store in enumerate(data.edge_stores):
        if own in ("rows", "rows and tags") or (own == "row" and number == 0):
            store.weight = torch.arange(store.num_edges) / 4 + number
            store.time = torch.arange(store.num_edges) * 3 + number
            store.wide = torch.arange(4 * store.num_edges).view(-1, 2, 2)
    options = {"input_nodes": SEEDS, "batch_size": 4, "seed": 0, "device": real_device,
               "disjoint": disjoint}  # fmt: skip

    (batch,) = NeighborLoader(data, [2, 2], **options)

    (expected,) = NeighborLoader(data, [2, 2], transform_sampler_output=lambda out: out, **options)
    assert (batch.node_types, batch.edge_types) == (expected.node_types, expected.edge_types)
    for part, other in zip(batch.stores, expected.stores, strict=True):
        assert part._parent() is batch
        assert list(part.keys()) == list(other.keys())
        for key, value in other.items():
            assert torch.equal(part[key], value) if isinstance(value, torch.Tensor) else part[key] == value, key


def test_counts_are_those_of_hops_and_nodes_stand_hop_after_hop(real_device):
    data = make_hetero()

    (batch,) = NeighborLoader(data, [2, 3], SEEDS, batch_size=4, device=real_device)

    for kind in data.node_types:
        assert len(batch[kind].num_sampled_nodes) == 3
        assert sum(batch[kind].num_sampled_nodes) == batch[kind].num_nodes
    for edge_type in data.edge_types:
        first, second = batch[edge_type].num_sampled_edges
        assert first + second == batch[edge_type].num_edges
        source, target = batch[edge_type].edge_index.cpu()
        reach = batch[edge_type[0]].num_sampled_nodes
        expands = batch[edge_type[2]].num_sampled_nodes
        assert bool((target[:first] < expands[0]).all())
        assert bool((source[:first] < reach[0] + reach[1]).all())
        assert bool(((target[first:] >= expands[0]) & (target[first:] < expands[0] + expands[1])).all())


def test_fanouts_may_differ_by_relation(real_device):
    data = make_hetero()
    fanouts = NumNeighbors({("author", "writes", "paper"): [1, 0]}, default=[0, 0])

    (batch,) = NeighborLoader(data, fanouts, SEEDS, batch_size=4, device=real_device)

    degrees = torch.bincount(data["author", "writes", "paper"].edge_index[1], minlength=40)[SEEDS[1]]
    assert batch["author", "writes", "paper"].num_edges == int((degrees > 0).sum())
    assert sum(batch[kind].num_edges for kind in data.edge_types) == batch["author", "writes", "paper"].num_edges


@pytest.mark.filterwarnings("ignore:.*keeps its direction")
def test_bidirectional_batches_have_every_edge_both_ways(real_device):
    data = make_hetero()

    (batch,) = NeighborLoader(data, [3, 3], SEEDS, batch_size=4, subgraph_type="bidirectional", device=real_device)

    named = name_edges(batch)
    writes = named["author", "writes", "paper"]
    assert sorted((b, a) for a, b in writes) == named["paper", "rev_writes", "author"]
    assert len(set(writes)) == len(writes)
    for edge_type in (("author", "writes", "paper"), ("paper", "cites", "paper")):
        assert not {"e_id", "edge_attr", "num_sampled_edges"} & set(batch[edge_type].keys())
    assert torch.equal(batch["paper"].x.cpu(), data["paper"].x[batch["paper"].n_id.cpu()])


def test_disjoint_trees_share_no_nodes(real_device):
    data = make_hetero()

    (batch,) = NeighborLoader(data, [3, 3], SEEDS, batch_size=4, disjoint=True, device=real_device)

    check_rows(data, batch)
    assert batch["paper"].batch[:4].tolist() == [0, 1, 2, 3]
    for edge_type in data.edge_types:
        source, target = batch[edge_type].edge_index
        assert torch.equal(batch[edge_type[0]].batch[source], batch[edge_type[2]].batch[target])
    for kind in data.node_types:
        pairs = torch.stack([batch[kind].batch, batch[kind].n_id]).cpu()
        assert pairs.unique(dim=1).shape == pairs.shape


def test_models_see_the_whole_neighborhood(real_device):
    data = make_hetero(make_parts(seed=3))
    del data["nobody"], data["author", "knows", "author"]
    data["author", "rev_in", "venue"].edge_index = torch.zeros(2, 1, dtype=torch.int64)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = SAGEConv((-1, -1), 8), SAGEConv((-1, -1), 4)

        def forward(self, x, edge_index):
            return self.second(self.first(x, edge_index).relu(), edge_index)

    model = to_hetero(Model(), data.metadata()).to(real_device)
    (batch,) = NeighborLoader(data, [-1, -1], SEEDS, batch_size=4, device=real_device)

    with torch.no_grad():
        got = model(batch.x_dict, batch.edge_index_dict)["paper"][:4]
        whole = copy.copy(data).to(real_device)
        expected = model(whole.x_dict, whole.edge_index_dict)["paper"][SEEDS[1]]

    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-2)


def test_equal_seeds_give_equal_batches_whatever_is_made_ahead(real_device):
    data = make_hetero()
    options = {"input_nodes": "author", "batch_size": 8, "shuffle": True, "seed": 9, "device": real_device}

    ahead = [name_edges(b) for b in NeighborLoader(data, [2, 2], **options, prefetch=3)]

    assert ahead == [name_edges(b) for b in NeighborLoader(data, [2, 2], **options, prefetch=0)]
    assert ahead != [name_edges(b) for b in NeighborLoader(data, [2, 2], **{**options, "seed": 8})]


def test_an_epoch_is_resumed(real_device):
    data = make_hetero()
    make = lambda: NeighborLoader(data, [2, 2], "paper", batch_size=8, shuffle=True, seed=9, device=real_device)  # noqa: E731
    loader = make()
    iterator = iter(loader)
    next(iterator), next(iterator)
    state, rest = loader.state_dict(), [name_edges(b) for b in iterator]

    other = make()
    other.load_state_dict(state)

    assert [name_edges(b) for b in other] == rest


def test_edits_between_epochs_take_effect(real_device):
    data = make_hetero()
    loader = NeighborLoader(data, [-1], SEEDS, batch_size=4, device=real_device)
    list(loader)

    data["author", "writes", "paper"].edge_index = torch.tensor([[7, 8], [3, 5]])
    data["author", "writes", "paper"].edge_attr = torch.tensor([70, 80])
    data["paper"].x = -data["paper"].x

    (batch,) = loader
    assert name_edges(batch)["author", "writes", "paper"] == [(7, 3)]
    assert torch.equal(batch["paper"].x.cpu(), data["paper"].x[batch["paper"].n_id.cpu()])


@pytest.mark.sparse
def test_a_sparse_adjacency_gives_one(real_device):
    sparse = pytest.importorskip("torch_sparse")
    data, plain = make_hetero(), make_hetero()
    writes = ("author", "writes", "paper")
    source, target = data[writes].edge_index
    data[writes].adj_t = sparse.SparseTensor(row=target, col=source, value=torch.arange(150.0), sparse_sizes=(40, 25))
    del data[writes].edge_index, data[writes].edge_attr

    (batch,) = NeighborLoader(data, [-1, -1], SEEDS, batch_size=4, device=real_device)

    (expected,) = NeighborLoader(plain, [-1, -1], SEEDS, batch_size=4, device=real_device)
    row, col, value = batch[writes].adj_t.coo()
    ends = batch["author"].n_id[col].tolist(), batch["paper"].n_id[row].tolist()
    assert sorted(zip(*ends, strict=True)) == name_edges(expected)[writes]
    assert sorted(value.tolist()) == sorted(expected[writes].e_id.tolist())


def test_memory_mapped_features_are_read_from_their_file(real_device, tmp_path):
    data = make_hetero()
    np.save(tmp_path / "x.npy", data["paper"].x.numpy())
    expected, data["paper"].x = data["paper"].x, np.load(tmp_path / "x.npy", mmap_mode="r")

    (batch,) = NeighborLoader(data, [3], SEEDS, batch_size=4, device=real_device)

    assert torch.equal(batch["paper"].x.cpu(), expected[batch["paper"].n_id.cpu()])


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["cuda", "unified", "pinned", "auto"])
def test_batches_on_the_gpu_are_those_of_the_cpu(placement):
    options = {"input_nodes": "paper", "batch_size": 8, "shuffle": True, "seed": 3, "disjoint": True}

    batches = list(NeighborLoader(make_hetero(), [3, 2], **options, placement=placement, prefetch=2))

    for batch, other in zip(batches, NeighborLoader(make_hetero(), [3, 2], **options, device="cpu"), strict=True):
        for part, expected in zip(batch.stores, other.stores, strict=True):
            for key, value in expected.items():
                same = torch.equal(part[key].cpu(), value) if isinstance(value, torch.Tensor) else part[key] == value
                assert same, key


def test_transforms_are_called(real_device):
    seen = []

    def forget_edges(out):
        out.row = {kind: row[:0] for kind, row in out.row.items()}
        out.col = {kind: col[:0] for kind, col in out.col.items()}
        out.edge = {kind: edge[:0] for kind, edge in out.edge.items()}
        return out

    loader = NeighborLoader(make_hetero(), [2], SEEDS, batch_size=4, transform=lambda b: seen.append(b) or b,
                            transform_sampler_output=forget_edges, device=real_device)  # fmt: skip

    (batch,) = loader

    assert seen == [batch]
    assert batch["author", "writes", "paper"].num_edges == 0
    assert batch["author", "writes", "paper"].edge_attr.numel() == 0


@pytest.mark.parametrize("form", [lambda mask: mask, lambda mask: mask.numpy(), lambda mask: mask.tolist()])
def test_a_mask_chooses_seeds_whatever_it_is_made_of(real_device, form):
    mask = torch.arange(40) % 7 == 3

    batches = list(NeighborLoader(make_hetero(), [1], ("paper", form(mask)), batch_size=4, device=real_device))

    assert torch.cat([batch["paper"].input_id for batch in batches]).tolist() == mask.nonzero().view(-1).tolist()


def test_no_seeds_are_an_empty_epoch(real_device):
    none = torch.empty(0, dtype=torch.int64)

    assert list(NeighborLoader(make_hetero(), [2], ("paper", none), shuffle=True, device=real_device)) == []


def test_a_call_gives_the_batch_around_positions(real_device):
    loader = NeighborLoader(make_hetero(), [2], ("paper", [5, 9]), device=real_device)

    batch = loader([1])

    assert batch["paper"].n_id[0] == 9
    assert "paper.x" in str(loader.report())


def test_sparse_rows_follow_the_nodes(real_device):
    data = make_hetero()
    data["paper"].words = torch.eye(40).to_sparse()

    (batch,) = NeighborLoader(data, [3], SEEDS, batch_size=4, device=real_device)

    assert batch["paper"].words.layout == torch.sparse_coo
    assert torch.equal(batch["paper"].words.to_dense().argmax(1), batch["paper"].n_id)


def test_a_batch_has_stores_of_its_own(real_device):
    data = make_hetero()
    data.note = "kept"
    before = {key: list(store.keys()) for key, store in zip(data.node_types, data.node_stores, strict=True)}

    batch = next(iter(NeighborLoader(data, [3, 2], SEEDS, batch_size=4, device=real_device)))
    batch["paper"].extra = 1
    batch["author"].x = None

    assert {key: list(store.keys()) for key, store in zip(data.node_types, data.node_stores, strict=True)} == before
    assert batch.note == "kept"
    assert all(store._parent() is batch for store in batch.stores)
    assert set(vars(batch)) == set(vars(data))
    again = copy.deepcopy(batch).to("cpu")
    assert "x" not in again["author"]
    assert torch.equal(again["paper"].x, batch["paper"].x.cpu())


def test_the_parts_of_a_batch_are_written_to_apart(real_device):
    batch = next(iter(NeighborLoader(make_hetero(), [3, 2], SEEDS, batch_size=4, device=real_device)))
    pairs = [pair for pair in batch.edge_index_dict.values() if pair.numel() > 0]
    others = [pair.clone() for pair in pairs[1:]]

    pairs[0].zero_()

    assert all(pair.is_contiguous() for pair in pairs)
    assert [pair._version for pair in pairs] == [1] + [0] * len(others)
    for pair, other in zip(pairs[1:], others, strict=True):
        assert torch.equal(pair, other)


@pytest.mark.parametrize("mode", ["nodes", "binary", "triplet"])
def test_the_memory_of_a_batch_is_listed_with_that_of_its_seeds(mode, monkeypatch):
    data, times, writes = make_hetero(make_parts(times="node")), torch.arange(4), ("author", "writes", "paper")
    if mode == "nodes":
        loader = NeighborLoader(data, [3, 2], SEEDS, times, time_attr="time", batch_size=4, device="cpu")
    else:
        labels = None if mode == "triplet" else torch.ones(4, dtype=torch.int64)
        loader = LinkNeighborLoader(data, [3, 2], (writes, data[writes].edge_index[:, :4]), labels, times + 50,
                                    neg_sampling=mode, time_attr="time", batch_size=4, device="cpu")  # fmt: skip
    noted = []
    monkeypatch.setattr("pyg_direct.loader.sampler_loader.note_memory", lambda batch, memory: noted.extend(memory))
    loader._prepare()
    sample, place = Drawn(loader._ask(torch.arange(4), 1)), loader._place_inputs

    def place_elsewhere(batch, out):
        # What comes from the host is copied, as it is to a GPU.
        loader.device = torch.device("meta")
        place(batch, out)
        loader.device = torch.device("cuda")

    monkeypatch.setattr(loader, "_place_inputs", place_elsewhere)
    batch = loader._fetch(sample, 0, None)

    known = {value.untyped_storage()._cdata for value in noted if isinstance(value, torch.Tensor)}
    made = [value for store in batch.stores for value in store.values() if isinstance(value, torch.Tensor)]
    assert any(value.is_meta for value in made)
    assert all(value.untyped_storage()._cdata in known for value in made if value.numel() > 0)


def pair_names(first, second):
    """A graph with a type `c`, and two parts whose rows have equal names once joined: of zeros and of ones."""
    data, pair = HeteroData(), torch.arange(6).repeat(2, 1)
    data["c"].x = torch.randn(6, 2)
    for kind, _ in (first, second):
        for end in [kind] if isinstance(kind, str) else [kind[0], kind[-1]]:
            data[end].num_nodes = 6
    for kind, _ in (first, second):
        data[(kind, "to", "c") if isinstance(kind, str) else kind].edge_index = pair
    for value, (kind, key) in enumerate((first, second)):
        data[kind][key] = torch.full((6,), value)
    return data


ODD_NAMES = {
    "spaces": ((("a", "b to", "c"), "edge_attr"), (("a b", "to", "c"), "edge_attr")),
    "a type and a relation": (("a to c", "when"), (("a", "to", "c"), "when")),
    "dots": (("a", "b.x"), ("a.b", "x")),
}


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("make", ["node", "hgt", "link"])
def test_names_that_are_equal_once_joined_have_rows_of_their_own(real_device, name, make):
    first, second = ODD_NAMES[name]
    data = pair_names(first, second)
    options = {"batch_size": 3, "device": real_device, "seed": 1}
    loader = {
        "node": lambda: NeighborLoader(data, [2], "c", super_batch=2, **options),
        "hgt": lambda: HGTLoader(data, [9], "c", **options),
        "link": lambda: LinkNeighborLoader(data, [2], data.edge_types[0], **options),
    }[make]()
    loader.record()

    batches = list(loader)

    assert len(batches) == 2
    for batch in batches:
        for value, (kind, key) in enumerate((first, second)):
            assert (batch[kind][key] == value).all(), (kind, key)
    assert len(loader.report().features) == 3


@pytest.mark.filterwarnings("ignore:There exist type names")
def test_fanouts_of_relations_that_are_equal_once_joined_stay_their_own(real_device):
    first, second = ("a", "b__to", "c"), ("a__b", "to", "c")
    data = pair_names((first, "weight"), (second, "weight"))

    (batch,) = NeighborLoader(data, {first: [0], second: [1]}, "c", batch_size=6, device=real_device)

    assert (batch[first].num_edges, batch[second].num_edges) == (0, 6)
    with pytest.raises(ArgumentError, match=r"num_neighbors must have fanouts for every relation .* none for .'a__b'"):
        NeighborLoader(data, {first: [0]}, "c", device=real_device)

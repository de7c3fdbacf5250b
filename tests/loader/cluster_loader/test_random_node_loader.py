"""`RandomNodeLoader` makes PyG's batches: the same nodes in the same order, the same edges and attributes."""

import pickle

import pytest
import torch
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import RandomNodeLoader as PygRandomNodeLoader

from pyg_direct import RandomNodeLoader
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError


def make_data(num_nodes=50, num_edges=400):
    generator = torch.Generator().manual_seed(1)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    return Data(x=torch.rand(num_nodes, 3, generator=generator), y=torch.arange(num_nodes), edge_index=edge_index,
                edge_attr=torch.arange(num_edges), train_mask=torch.arange(num_nodes) < 30, name="graph",
                level=torch.ones(2))  # fmt: skip


def make_hetero():
    generator, data = torch.Generator().manual_seed(1), HeteroData()
    sizes = {"paper": 30, "author": 40, "venue": 5}
    for kind, size in sizes.items():
        data[kind].x = torch.rand(size, 3, generator=generator)
        data[kind].name = torch.arange(size)
    data["alone"].num_nodes = 6
    for kind in (("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "in", "venue")):
        ends = [torch.randint(sizes[end], (200,), generator=generator) for end in kind[::2]]
        data[kind].edge_index, data[kind].edge_attr = torch.stack(ends), torch.arange(200)
    return data


def list_edges(store):
    """Edges with their attribute, in an order that only these tell."""
    return sorted(zip(*store.edge_index.tolist(), store.edge_attr.tolist(), strict=True))


def assert_same(ours, theirs):
    """Equal but for the order of edges."""
    assert set(ours.keys()) == set(theirs.keys())
    for key, value in theirs.items():
        if key not in ("edge_index", "edge_attr"):
            same = torch.equal(ours[key].cpu(), value) if isinstance(value, torch.Tensor) else ours[key] == value
            assert same, key
    if "edge_index" in theirs:
        assert list_edges(ours) == list_edges(theirs)


@pytest.mark.parametrize("num_parts", [1, 3, 7, 60])
def test_batches_are_pygs(real_device, num_parts):
    data = make_data()

    ours = RandomNodeLoader(data, num_parts, device=real_device)
    theirs = PygRandomNodeLoader(data, num_parts)

    assert len(ours) == len(theirs)
    for batch, expected in zip(ours, theirs, strict=True):
        assert_same(batch._store, expected._store)
        assert batch.x.device.type == real_device.type
        batch.validate()


@pytest.mark.filterwarnings("ignore:The node types {'alone'} are isolated")
def test_batches_of_a_graph_with_types_are_pygs(real_device):
    data = make_hetero()

    for batch, expected in zip(RandomNodeLoader(data, 4, device=real_device), PygRandomNodeLoader(data, 4),
                               strict=True):  # fmt: skip
        assert batch.node_types == expected.node_types
        assert batch.edge_types == expected.edge_types
        for kind in (*data.node_types, *data.edge_types):
            assert_same(batch[kind], expected[kind])
        batch.validate()


@pytest.mark.parametrize("make", [make_data, make_hetero])
def test_chosen_nodes_are_pygs_whatever_their_order(real_device, make):
    data = make()
    chosen = torch.randperm(50, generator=torch.Generator().manual_seed(2))[:20]

    batch = RandomNodeLoader(data, 2, device=real_device).collate_fn(chosen.tolist())

    expected = PygRandomNodeLoader(data, 2).collate_fn(chosen)
    for ours, theirs in zip(batch.stores, expected.stores, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("make", [make_data, make_hetero])
def test_epochs_cut_all_nodes_into_other_parts_as_the_seed_says(real_device, make):
    def list_nodes(batch):
        if isinstance(batch, Data):
            return batch.y.tolist()
        return [(kind, name) for kind in ("paper", "author", "venue") for name in batch[kind].name.tolist()]

    epochs = []
    loader = RandomNodeLoader(make(), 4, shuffle=True, seed=3, device=real_device)
    for _ in range(2):
        epochs.append([list_nodes(batch) for batch in loader])
    again = RandomNodeLoader(make(), 4, shuffle=True, seed=3, device="cpu", prefetch=0)

    assert [list_nodes(batch) for batch in again] == epochs[0]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        nodes = [node for part in epoch for node in part]
        assert len(nodes) == len(set(nodes)) == (50 if make is make_data else 75)


@pytest.mark.parametrize("make", [make_data, make_hetero])
def test_without_a_seed_nodes_are_shuffled_as_by_pyg(real_device, make):
    loaders = (RandomNodeLoader(make(), 4, shuffle=True, device=real_device),
               PygRandomNodeLoader(make(), 4, shuffle=True))  # fmt: skip
    epochs, drawn = [], []
    for loader in loaders:
        torch.manual_seed(5)
        epochs.append([batch for _ in range(2) for batch in loader])
        drawn.append(torch.rand(1))

    for got, batch in zip(*epochs, strict=True):
        for one, other in zip(got.node_stores, batch.node_stores, strict=True):
            assert one.num_nodes == other.num_nodes
            assert "x" not in other or torch.equal(one.x.cpu(), other.x)
    assert torch.equal(*drawn)


def test_an_epoch_goes_on_where_its_state_was_taken():
    make = lambda: RandomNodeLoader(make_data(), 5, shuffle=True, seed=3, device="cpu")  # noqa: E731
    whole = [batch.y.tolist() for batch in make()]
    loader = make()
    batches = iter(loader)
    next(batches), next(batches)

    other = make()
    other.load_state_dict(loader.state_dict())

    assert [batch.y.tolist() for batch in other] == whole[2:]


def test_sent_loaders_make_the_same_batches():
    for data in (make_data(), make_hetero()):
        loader = RandomNodeLoader(data, 3, shuffle=True, seed=4, device="cpu")
        expected = [str(batch) for batch in loader]

        sent = pickle.loads(pickle.dumps(loader))
        sent.load_state_dict({"seed": 4, "epoch": 0, "batch": 0})

        assert [str(batch) for batch in sent] == expected


def test_batches_say_that_their_edges_are_sorted_by_target():
    from pyg_direct.nn.sorted_edges import find_sorted

    (batch,) = RandomNodeLoader(make_data(), 1, device="cpu")

    assert torch.equal(batch.edge_index[1].sort().values, batch.edge_index[1])
    assert find_sorted(batch.edge_index) is not None


@pytest.mark.filterwarnings("ignore:rows of data were written")
def test_rows_that_are_written_are_in_the_next_batch(real_device):
    data = make_data()
    loader = RandomNodeLoader(data, 5, device=real_device)

    for batch in loader:
        assert torch.equal(batch.x.cpu(), data.x[batch.y.cpu()])
        data.x += 1


def test_adjacency_stays_one_and_trees_of_a_batch_of_graphs_stay():
    graphs = Batch.from_data_list([make_data(10, 40), make_data(15, 60)])

    for batch, expected in zip(RandomNodeLoader(graphs, 3, device="cpu"), PygRandomNodeLoader(graphs, 3), strict=True):
        assert_same(batch._store, expected._store)
        assert type(batch) is type(expected)
    data = make_data()
    data.adj_t = torch.sparse_coo_tensor(data.edge_index.flip(0), torch.arange(400.0), (50, 50)).to_sparse_csr()
    del data.edge_index, data.edge_attr
    dense = data.adj_t.to_dense()
    for batch in RandomNodeLoader(data, 3, device="cpu"):
        assert torch.equal(batch.adj_t.to_dense(), dense[batch.y][:, batch.y])


def test_a_graph_that_changed_is_read_anew_unless_nodes_are_missing():
    data = make_data()
    loader = RandomNodeLoader(data, 2, device="cpu")
    list(loader)
    data.edge_index, data.edge_attr = data.edge_index[:, :100], data.edge_attr[:100]

    assert max(int(batch.edge_attr.max()) for batch in loader) < 100
    data.x, data.y, data.train_mask = data.x[:40], data.y[:40], data.train_mask[:40]
    with pytest.raises(ArgumentError, match=r"data must have the 50 nodes that it had when .*, got 40: make a new one"):
        list(loader)


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"data": [1]}, ArgumentTypeError, "data must be a Data or a HeteroData, got list"),
    ({"num_parts": 0}, ArgumentError, "num_parts must be an integer of at least 1, got 0"),
    ({"num_parts": 2.0}, ArgumentError, "num_parts must be an integer of at least 1, got 2.0"),
    ({"batch_size": 3}, ArgumentError, "batch_size must not be given, as it follows from num_parts, got 3"),
    ({"data": Data(edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=0)}, ArgumentError, "must have nodes"),
    ({"data": Data(x=torch.rand(3, 2), edge_index=torch.tensor([[0], [3]]))}, IdError, "3"),
    ({"filter_per_worker": True}, ArgumentTypeError, "has no option filter_per_worker"),
])  # fmt: skip
def test_bad_arguments_are_named(options, error, words):
    with pytest.raises(error, match=words):
        list(RandomNodeLoader(**{"data": make_data(), "num_parts": 2, "device": "cpu", **options}))


@pytest.mark.parametrize(("index", "error"), [([50], IdError), ([-1], IdError), ([0.5], ArgumentTypeError)])
def test_positions_outside_the_graph_are_refused(index, error):
    with pytest.raises(error, match="index"):
        RandomNodeLoader(make_data(), 2, device="cpu").collate_fn(index)


def test_hooks_that_would_not_be_called_are_refused():
    class Mine(RandomNodeLoader):
        def collate_fn(self, index):
            return index

    with pytest.raises(NotImplementedError, match=r"collate_fn of .*Mine would not be called"):
        Mine(make_data(), 2, device="cpu")

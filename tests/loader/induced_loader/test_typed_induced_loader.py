"""Clusters of a graph with types: nodes of all types together, and batches as PyG's own `subgraph` makes them."""

import pickle

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from pyg_direct import ClusterData, ClusterLoader
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError

SIZES = {"paper": 30, "author": 40, "venue": 5}


def make_data():
    generator, data = torch.Generator().manual_seed(1), HeteroData()
    for kind, size in SIZES.items():
        data[kind].x = torch.rand(size, 3, generator=generator)
        data[kind].name = torch.arange(size)
    data["alone"].num_nodes = 6
    for kind in (("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "in", "venue")):
        ends = [torch.randint(SIZES[end], (200,), generator=generator) for end in kind[::2]]
        data[kind].edge_index, data[kind].edge_attr = torch.stack(ends), torch.arange(200)
    return data


def make_clusters(data=None, num_parts=7, **options):
    return ClusterData(make_data() if data is None else data, num_parts, log=False, **options)


def split(clusters, chosen):
    """Nodes of some clusters, by type."""
    partition, sizes = clusters.partition, {kind: clusters.data[kind].num_nodes for kind in clusters.data.node_types}
    begins = partition.partptr.tolist()
    joint = [node for number in chosen for node in partition.node_perm[begins[number] : begins[number + 1]].tolist()]
    found, first = {}, 0
    for kind, size in sizes.items():
        found[kind] = torch.tensor([node - first for node in joint if first <= node < first + size], dtype=torch.int64)
        first += size
    return found


def list_edges(store):
    return sorted(zip(*store.edge_index.tolist(), store.edge_attr.tolist(), strict=True))


def assert_same(batch, expected):
    """Equal but for the order of edges."""
    assert batch.node_types == expected.node_types
    assert batch.edge_types == expected.edge_types
    for kind in (*expected.node_types, *expected.edge_types):
        assert set(batch[kind].keys()) == set(expected[kind].keys())
        for key, value in expected[kind].items():
            if key not in ("edge_index", "edge_attr"):
                same = torch.equal(batch[kind][key].cpu(), value) if isinstance(value, torch.Tensor) else (
                    batch[kind][key] == value)  # fmt: skip
                assert same, (kind, key)
    for kind in expected.edge_types:
        assert list_edges(batch[kind]) == list_edges(expected[kind])


@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_batches_are_the_subgraphs_of_their_clusters(real_device, batch_size):
    data = make_data()
    clusters = make_clusters(data)

    batches = list(ClusterLoader(clusters, batch_size=batch_size, device=real_device))

    assert len(batches) == -(-7 // batch_size)
    for number, batch in enumerate(batches):
        chosen = range(number * batch_size, min(7, (number + 1) * batch_size))
        assert_same(batch, data.subgraph(split(clusters, chosen)))
        assert batch["paper"].x.device.type == real_device.type
        for kind in batch.edge_types:
            targets = batch[kind].edge_index[1]
            assert bool((targets.diff() >= 0).all())


def test_each_node_is_in_one_cluster():
    clusters = make_clusters()

    assert len(clusters) == 7
    for kind, size in SIZES.items():
        assert sorted(node for cluster in map(clusters.__getitem__, range(7))
                      for node in cluster[kind].name.tolist()) == list(range(size))  # fmt: skip
    assert sum(clusters[number]["alone"].num_nodes for number in range(7)) == 6
    with pytest.raises(IndexError):
        clusters[7]


def test_a_cluster_is_the_batch_of_it_alone():
    clusters = make_clusters()

    for number, batch in enumerate(ClusterLoader(clusters, device="cpu")):
        assert_same(batch, clusters[number])


def test_few_edges_are_cut_whatever_their_types():
    # Four groups of two types, each of all pairs, and few edges between groups.
    data = HeteroData()
    data["a"].num_nodes = data["b"].num_nodes = 40
    order = {kind: torch.randperm(40, generator=torch.Generator().manual_seed(seed)) for seed, kind in enumerate("ab")}
    pairs = torch.tensor([(i, j) for group in range(4) for i in range(10 * group, 10 * group + 10)
                          for j in range(10 * group, 10 * group + 10)]).t()  # fmt: skip
    between = torch.tensor([(10 * group, (10 * group + 10) % 40) for group in range(4)]).t()
    data["a", "to", "b"].edge_index = torch.stack([order["a"][pairs[0]], order["b"][pairs[1]]])
    data["a", "near", "a"].edge_index = order["a"][torch.cat([pairs, between], 1)]

    clusters = make_clusters(data, 4)

    assert clusters.partition.partptr.diff().tolist() == [20] * 4
    for kind in data.edge_types:
        assert sum(clusters[number][kind].edge_index.shape[1] for number in range(4)) == 400
    assert all(clusters[number]["b"].num_nodes == 10 for number in range(4))


def look(loader):
    return [[batch[kind].name.tolist() for kind in SIZES] for batch in loader]


def make_loader(clusters=None, **options):
    return ClusterLoader(make_clusters() if clusters is None else clusters,
                         **{"batch_size": 2, "shuffle": True, "seed": 3, "device": "cpu", **options})  # fmt: skip


def test_epochs_shuffle_clusters_as_the_seed_says_for_any_processes():
    loader = make_loader()
    epochs = [look(loader) for _ in range(2)]

    again = pickle.loads(pickle.dumps(make_loader(prefetch=0)))
    parts = [look(make_loader(ranks=(rank, 2))) for rank in range(2)]

    assert [look(again) for _ in range(2)] == epochs
    assert epochs[0] != epochs[1]
    assert parts == [epochs[0][0::2], epochs[0][1::2]]


def test_an_epoch_goes_on_where_its_state_was_taken():
    loader = make_loader()
    running = iter(loader)
    next(running)
    state, rest = loader.state_dict(), look(running)
    other = make_loader()
    other.load_state_dict(state)

    assert look(other) == rest


def test_given_clusters_are_batches_and_places_are_told():
    data = make_data()
    clusters = make_clusters(data)
    loader = make_loader(clusters)

    assert_same(loader._collate([5, 0]), data.subgraph(split(clusters, [5, 0])))
    assert loader.report().places[0].startswith("topology: HeteroTopo")
    with pytest.raises(IdError, match=r"index must lie in \[0, 7\), got 7"):
        loader._collate([7])


def test_what_changes_in_the_graph_is_in_the_next_epoch():
    data = make_data()
    loader = make_loader(make_clusters(data))
    list(loader)

    data["paper"].x = torch.zeros(30, 1)

    assert all(batch["paper"].x.eq(0).all() for batch in loader)
    data["paper"].x, data["paper"].name = torch.zeros(20, 1), torch.arange(20)
    with pytest.raises(ArgumentError, match="data must have the 81 nodes that it had"):
        iter(loader)
    with pytest.raises(ArgumentError, match="the 81 nodes that it had when its clusters were made, got 71"):
        make_loader(loader.cluster_data)


def test_a_saved_partition_is_read_again(tmp_path, monkeypatch):
    first = make_clusters(save_dir=str(tmp_path))
    monkeypatch.setattr(ClusterData, "_metis", lambda *args: pytest.fail("METIS ran"))

    again = make_clusters(save_dir=str(tmp_path))

    assert torch.equal(again.partition.node_perm, first.partition.node_perm)
    other = make_data()
    other["paper", "in", "venue"].edge_index = other["paper", "in", "venue"].edge_index[:, :9]
    del other["paper", "in", "venue"].edge_attr
    with pytest.raises(ArgumentError, match=r"the 81 nodes and 409 edges .* got one of 81 nodes and 600 edges"):
        make_clusters(other, save_dir=str(tmp_path))


def test_a_graph_may_have_no_edges():
    data = HeteroData()
    data["a"].name, data["a"].num_nodes, data["b"].num_nodes = torch.arange(3), 3, 2

    loader = ClusterLoader(make_clusters(data, 2), batch_size=2, device="cpu")

    assert sorted(loader._collate([0, 1])["a"].name.tolist()) == [0, 1, 2]


def spoil(**changes):
    data = make_data()
    for name, value in changes.items():
        data["paper", "cites", "paper"][name] = value
    return data


def make_unknown():
    data = HeteroData()
    data["a", "to", "b"].edge_index = torch.tensor([[0], [1]])
    return data


BAD = {
    "outside": (lambda: spoil(edge_index=torch.tensor([[0], [30]])), IdError,
                r"data\[\('paper', 'cites', 'paper'\)\].edge_index must lie in \[0, 30\), got 30"),
    "shape": (lambda: spoil(edge_index=torch.zeros(3, 2, dtype=torch.int64)), ArgumentError, r"edge_index must"),
    "dtype": (lambda: spoil(edge_index=torch.zeros(2, 2)), ArgumentTypeError, "dtype int64"),
    "none": (lambda: spoil(edge_index=[[0], [1]]), ArgumentTypeError, "edge_index must be a tensor, got list"),
    "adjacency": (lambda: spoil(adj_t=torch.eye(30).to_sparse_csr()), NotImplementedError, "with adj_t"),
    "unknown": (make_unknown, ArgumentError, "data must know the number of 'a' nodes"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:Unable to accurately infer")
@pytest.mark.parametrize("name", BAD)
def test_a_graph_that_makes_no_clusters_is_named(name):
    make, kind, words = BAD[name]

    with pytest.raises(kind, match=words):
        make_clusters(make())


def test_options_without_a_meaning_for_types_are_refused():
    with pytest.raises(ArgumentError, match="keep_inter_cluster_edges must be False for a HeteroData"):
        make_clusters(keep_inter_cluster_edges=True)
    assert isinstance(make_clusters(Data(x=torch.ones(9, 1), edge_index=torch.tensor([[0], [1]])), 2)[0], Data)

"""`ClusterData` and `ClusterLoader` hold PyG's partition and make PyG's batches, in PyG's order."""

import builtins
import copy
import pickle

import pytest
import torch
import torch_geometric
from torch_geometric.data import Batch, Data
from torch_geometric.loader import ClusterData as PygClusterData, ClusterLoader as PygClusterLoader
from torch_geometric.utils import sort_edge_index

from pyg_direct import ClusterData, ClusterLoader
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError


def make_data(num_nodes=60, num_edges=500, **more):
    generator = torch.Generator().manual_seed(1)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    return Data(x=torch.rand(num_nodes, 3, generator=generator), y=torch.arange(num_nodes), edge_index=edge_index,
                edge_attr=torch.arange(num_edges), train_mask=torch.arange(num_nodes) < 30, name="graph",
                level=torch.ones(2), **more)  # fmt: skip


def make_clusters(data=None, num_parts=7, **options):
    return ClusterData(make_data() if data is None else data, num_parts, log=False, **options)


def assert_equal(batch, expected):
    assert set(batch.keys()) == set(expected.keys())
    for key, value in expected.items():
        same = torch.equal(batch[key].cpu(), value) if isinstance(value, torch.Tensor) else batch[key] == value
        assert same, key


class Given(PygClusterData):
    """PyG's class with clusters that are given, in the place of its METIS."""

    def _metis(self, edge_index, num_nodes):
        return self.given


def make_pygs(data, like, **options):
    """PyG's clusters with the nodes of others."""
    cluster = torch.empty(data.num_nodes, dtype=torch.int64)
    sizes = like.partition.partptr.diff()
    cluster[like.partition.node_perm] = torch.arange(len(like)).repeat_interleave(sizes)
    Given.given = cluster
    return Given(data, len(like), log=False, **options)


@pytest.mark.parametrize("sparse_format", ["csr", "csc"])
@pytest.mark.parametrize("keep", [False, True])
def test_partition_and_clusters_are_pygs(sparse_format, keep):
    data = make_data()

    ours = make_clusters(data, sparse_format=sparse_format, keep_inter_cluster_edges=keep)

    theirs = make_pygs(data, ours, sparse_format=sparse_format, keep_inter_cluster_edges=keep)
    for name, value in vars(theirs.partition).items():
        own = getattr(ours.partition, name)
        assert torch.equal(own, value) if isinstance(value, torch.Tensor) else own == value, name
    assert len(ours) == len(theirs) == 7
    for number in range(7):
        assert_equal(ours[number], theirs[number])


@pytest.mark.parametrize("sparse_format", ["csr", "csc"])
@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_batches_are_pygs(real_device, sparse_format, batch_size):
    clusters = make_clusters(sparse_format=sparse_format)

    ours = ClusterLoader(clusters, batch_size=batch_size, device=real_device)

    theirs = PygClusterLoader(clusters, batch_size=batch_size)
    assert len(ours) == len(theirs)
    for batch, expected in zip(ours, theirs, strict=True):
        assert_equal(batch, expected)
        assert batch.x.device.type == real_device.type


def test_a_batch_has_all_edges_among_its_nodes(real_device):
    data = make_data()

    for batch in ClusterLoader(make_clusters(data), batch_size=2, shuffle=True, seed=1, device=real_device):
        expected = data.subgraph(batch.y.cpu())
        edges, attr = sort_edge_index(expected.edge_index, expected.edge_attr)
        assert sorted(batch.edge_attr.tolist()) == sorted(attr.tolist())
        assert batch.num_edges == edges.shape[1]
        assert torch.equal(batch.y[batch.edge_index].cpu(), data.edge_index[:, batch.edge_attr.cpu()])


def test_given_clusters_are_pygs_whatever_their_order(real_device):
    clusters = make_clusters()

    batch = ClusterLoader(clusters, device=real_device)._collate([5, 0, 3])

    assert_equal(batch, PygClusterLoader(clusters)._collate([5, 0, 3]))


def test_epochs_shuffle_clusters_as_the_seed_says(real_device):
    clusters = make_clusters()
    loader = ClusterLoader(clusters, batch_size=2, shuffle=True, seed=3, device=real_device)

    epochs = [[batch.y.tolist() for batch in loader] for _ in range(2)]

    again = ClusterLoader(clusters, batch_size=2, shuffle=True, seed=3, device="cpu", prefetch=0)
    assert [batch.y.tolist() for batch in again] == epochs[0]
    assert epochs[0] != epochs[1]
    assert all(sorted(node for nodes in epoch for node in nodes) == list(range(60)) for epoch in epochs)


def test_without_a_seed_clusters_are_shuffled_as_by_pyg(real_device):
    clusters = make_clusters()
    loaders = (ClusterLoader(clusters, batch_size=2, shuffle=True, device=real_device),
               PygClusterLoader(clusters, batch_size=2, shuffle=True))  # fmt: skip
    orders, drawn = [], []
    for loader in loaders:
        torch.manual_seed(5)
        orders.append([[batch.y.tolist() for batch in loader] for _ in range(2)])
        drawn.append(torch.rand(1))

    assert orders[0] == orders[1]
    assert torch.equal(*drawn)


def test_only_large_batches_are_made_ahead_on_a_cpu_unless_the_program_says_so():
    many = make_clusters(Data(edge_index=torch.arange(4000).view(2, 2000), num_nodes=4000))

    chosen = [ClusterLoader(many, batch_size=size, device="cpu").prefetch for size in (1, 2)]

    assert chosen == [0, 1]
    assert ClusterLoader(many, device="cpu", prefetch=3).prefetch == 3


def test_an_epoch_goes_on_where_its_state_was_taken_also_in_another_process():
    loader = ClusterLoader(make_clusters(), batch_size=2, shuffle=True, seed=3, device="cpu")
    whole = [batch.y.tolist() for batch in loader]
    loader.load_state_dict({"seed": 3, "epoch": 0, "batch": 0})
    batches = iter(loader)
    next(batches)

    sent = pickle.loads(pickle.dumps(loader))
    sent.load_state_dict(loader.state_dict())

    assert [batch.y.tolist() for batch in sent] == whole[1:]


def test_few_edges_are_cut():
    # Four cliques in a ring, in an order that tells nothing.
    order = torch.randperm(80, generator=torch.Generator().manual_seed(1))
    pairs = [(a, b) for c in range(4) for a in range(20 * c, 20 * c + 20) for b in range(20 * c, a)]
    pairs += [(20 * c, (20 * c + 20) % 80) for c in range(4)]
    edges = order[torch.tensor(pairs).t()]
    data = Data(edge_index=torch.cat([edges, edges.flip(0)], 1), num_nodes=80)

    for recursive in (False, True):
        clusters = make_clusters(data, 4, recursive=recursive)
        assert clusters.partition.partptr.tolist() == [0, 20, 40, 60, 80]
        assert sum(cluster.num_edges for cluster in clusters) == data.num_edges - 8
        assert clusters[0].num_nodes == 20


def test_a_batch_of_graphs_keeps_which_graph_a_node_is_of():
    graphs = Batch.from_data_list([make_data(20, 90), make_data(30, 150)])
    clusters = make_clusters(graphs, 5)

    for batch, expected in zip(ClusterLoader(clusters, batch_size=2, device="cpu"),
                               PygClusterLoader(clusters, batch_size=2), strict=True):  # fmt: skip
        assert_equal(batch, expected)


def test_clusters_may_be_empty_and_nodes_without_attributes():
    data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=3)

    loader = ClusterLoader(make_clusters(data, 5), batch_size=2, device="cpu")

    assert [batch.num_nodes for batch in loader] == [2, 1, 0]
    assert sum(batch.num_edges for batch in loader) in (0, 2)


def test_a_saved_partition_is_read_again_also_pygs(tmp_path, monkeypatch):
    data = make_data()
    first = make_clusters(data, save_dir=str(tmp_path))
    theirs = make_pygs(data, first, save_dir=str(tmp_path / "theirs"))
    monkeypatch.setattr(ClusterData, "_metis", lambda *args: pytest.fail("METIS ran"))

    again = make_clusters(data, save_dir=str(tmp_path))
    others = make_clusters(data, save_dir=str(tmp_path / "theirs"))

    assert (tmp_path / "part_7" / "metis.pt").exists()
    for found in (again, others):
        assert torch.equal(found.partition.node_perm, theirs.partition.node_perm)
        assert torch.equal(found.data.x, first.data.x)
    recursive = tmp_path / "part_7_recursive"
    recursive.mkdir()
    (tmp_path / "part_7" / "metis.pt").rename(recursive / "mine.pt")
    assert len(make_clusters(data, save_dir=str(tmp_path), filename="mine.pt", recursive=True)) == 7


def test_a_saved_partition_of_another_graph_or_none_is_refused(tmp_path):
    make_clusters(save_dir=str(tmp_path))

    with pytest.raises(ArgumentError, match=r"the 60 nodes and 400 edges .* got one of 60 nodes and 500 edges"):
        make_clusters(make_data(60, 400), save_dir=str(tmp_path))
    with pytest.raises(ArgumentError, match=r"into 7 clusters as csc, got .* as csr: delete .*metis\.pt"):
        make_clusters(save_dir=str(tmp_path), sparse_format="csc")
    torch.save({"a": 1}, tmp_path / "part_7" / "metis.pt")
    with pytest.raises(ArgumentError, match="got dict: delete"):
        make_clusters(save_dir=str(tmp_path))
    (tmp_path / "part_7" / "metis.pt").write_bytes(b"no file of torch's")
    with pytest.raises(ArgumentError, match="filename must be a whole partition that ClusterData has saved"):
        make_clusters(save_dir=str(tmp_path))


def test_progress_is_told_as_pyg_does(capsys):
    ClusterData(make_data(), 3)
    assert capsys.readouterr().err == "Computing METIS partitioning...\nDone!\n"

    make_clusters()
    assert capsys.readouterr().err == ""


def test_what_is_not_installed_is_named_unless_pyg_has_a_metis(monkeypatch):
    data = make_data()
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "pymetis":
            raise ModuleNotFoundError("No module named 'pymetis'", name="pymetis")
        return real(name, *args, **kwargs)

    monkeypatch.setattr("pyg_direct.loader.cluster_loader.find_spec", lambda name: None)
    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr(torch_geometric.typing, "WITH_METIS", False)
    monkeypatch.setattr(torch_geometric.typing, "WITH_TORCH_SPARSE", False)
    with pytest.raises(ModuleNotFoundError, match=r"ClusterData needs"):
        make_clusters(data)

    monkeypatch.setattr(torch_geometric.typing, "WITH_METIS", True)
    monkeypatch.setattr(PygClusterData, "_metis", lambda self, edges, count: torch.arange(count) % 7)
    assert make_clusters(data).partition.partptr.diff().tolist() == [9, 9, 9, 9, 8, 8, 8]


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"data": [1]}, ArgumentTypeError, "data must be a Data or a HeteroData, got list"),
    ({"data": Data(x=torch.rand(3, 2))}, ArgumentTypeError, "data.edge_index must be a tensor, got NoneType"),
    ({"data": Data(x=torch.rand(3, 2), edge_index=torch.tensor([[0], [3]]))}, IdError, r"must lie in \[0, 3\), got 3"),
    ({"data": Data(x=torch.rand(3, 2), edge_index=torch.tensor([[0.0], [3.0]]))}, ArgumentTypeError, "dtype int64"),
    ({"num_parts": 0}, ArgumentError, "num_parts must be an integer of at least 1, got 0"),
    ({"sparse_format": "coo"}, ArgumentError, "sparse_format must be one of csr, csc, got 'coo'"),
    ({"recursive": 3}, ArgumentTypeError, "recursive must be True or False, got 3"),
    ({"data": make_data(adj_t=torch.eye(60).to_sparse_csr())}, NotImplementedError, "edge_index and adj_t"),
])  # fmt: skip
def test_bad_arguments_of_clusters_are_named(options, error, words):
    with pytest.raises(error, match=words):
        make_clusters(**{"data": make_data(), **options})


def test_bad_arguments_of_loaders_are_named():
    clusters = make_clusters()
    with pytest.raises(ArgumentTypeError, match="cluster_data must be a ClusterData, got Data"):
        ClusterLoader(make_data(), device="cpu")
    with pytest.raises(IdError, match=r"index must lie in \[0, 7\), got 7"):
        ClusterLoader(clusters, device="cpu")._collate([7])
    wrong = copy.copy(clusters)
    wrong.partition = copy.copy(clusters.partition)
    wrong.partition.partptr = torch.tensor([0, 9, 5, 60])
    with pytest.raises(ArgumentError, match=r"partptr must not decrease from 0 to the 60 nodes, got \[0, 9, 5, 60\]"):
        ClusterLoader(wrong, device="cpu")
    wrong.partition = copy.copy(clusters.partition)
    wrong.partition.index = clusters.partition.index + 60
    with pytest.raises(IdError, match="indices must lie in"):
        ClusterLoader(wrong, device="cpu")


def test_hooks_that_would_not_be_called_are_refused():
    class Mine(ClusterLoader):
        def _collate(self, batch):
            return batch

    with pytest.raises(NotImplementedError, match=r"_collate of .*Mine would not be called"):
        Mine(make_clusters(), device="cpu")
    loader = ClusterLoader(make_clusters(), device="cpu")
    loader._collate = lambda batch: batch
    with pytest.raises(NotImplementedError, match="_collate of ClusterLoader would not be called"):
        iter(loader)

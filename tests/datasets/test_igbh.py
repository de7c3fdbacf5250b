"""The graph of IGBH's shape, in memory and in files: sizes, degrees, classes that a network learns, equal bytes."""

import hashlib
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn import HeteroConv, SAGEConv

from pyg_direct import Feature, NeighborLoader
from pyg_direct.datasets import igbh, load_igbh, synthetic, synthetic_igbh, write_igbh
from pyg_direct.datasets.igbh import NODES, RELATIONS, permute_ids
from pyg_direct.errors import ArgumentError, FileError


@pytest.fixture(scope="module")
def graph():
    return synthetic_igbh(1e-4, num_features=16, num_classes=7, feature_signal=4.0)


def test_sizes_are_the_published_ones_times_the_scale(graph):
    assert {kind: graph[kind].num_nodes for kind in graph.node_types} == {
        kind: max(1, int(count * 1e-4)) for kind, count in NODES.items()}  # fmt: skip
    assert len(graph.edge_types) == 11
    for source, name, target, count, source_hub, _, is_reversed in RELATIONS:
        edges = graph[source, name, target].edge_index
        expected = min(int(count * 1e-4), graph[source].num_nodes) if source_hub == 0 else int(count * 1e-4)
        assert edges.shape == (2, expected)
        assert int(edges.min()) >= 0
        assert int(edges[0].max()) < graph[source].num_nodes
        assert int(edges[1].max()) < graph[target].num_nodes
        if is_reversed:
            assert torch.equal(graph[target, f"rev_{name}", source].edge_index, edges.flip(0))


def share_of_busiest(ends, count):
    """Share of the edges that the busiest hundredth of the nodes has."""
    degrees = ends.bincount(minlength=count).sort(descending=True).values
    return float(degrees[: max(1, count // 100)].sum() / degrees.sum())


def expected_share(hub):
    """Share of the edges of the busiest hundredth by a power law with exponent 3, cut off at `hub` mean degrees."""
    cut = 1 / (hub - 1)
    return 1 - ((1 - (0.01 * (1 - cut**2) + cut**2) ** 0.5) / (1 - cut)) ** 2


def test_degrees_are_skewed_and_a_paper_has_one_journal(graph):
    citing, cited = graph["paper", "cites", "paper"].edge_index
    journals = graph["paper", "published", "journal"].edge_index[0].bincount()
    count = graph["paper"].num_nodes

    assert cited.bincount().max() > 50 * cited.bincount().float().mean()
    assert share_of_busiest(citing, count) == pytest.approx(expected_share(50), abs=0.01)
    assert share_of_busiest(cited, count) == pytest.approx(expected_share(2000), abs=0.01)
    assert journals.max() == 1


def test_ids_say_nothing_about_degree_or_class(graph):
    cited = graph["paper", "cites", "paper"].edge_index[1].bincount(minlength=graph["paper"].num_nodes).double()
    y, number = graph["paper"].y.double(), torch.arange(graph["paper"].num_nodes).double()

    for values in (cited, y):
        assert abs(float(torch.corrcoef(torch.stack([number, values]))[0, 1])) < 0.03
        assert abs(float(torch.corrcoef(torch.stack([values[1:], values[:-1]]))[0, 1])) < 0.03


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1000, 4097])
def test_a_permutation_has_every_id_once_and_an_inverse(count):
    ids = torch.arange(count)

    places = permute_ids(ids, count, "0/nodes")

    assert places.sort().values.tolist() == ids.tolist()
    assert torch.equal(permute_ids(places, count, "0/nodes", is_inverse=True), ids)
    assert count < 64 or not torch.equal(places, permute_ids(ids, count, "1/nodes"))


def test_neighbors_are_mostly_of_the_same_class(graph):
    y, (source, target) = graph["paper"].y, graph["paper", "cites", "paper"].edge_index
    alike = (y[source] == y[target]).float().mean()
    at_random = (y.bincount().double() / len(y)).square().sum()

    assert float(alike) > 0.5 + 0.4 * float(at_random)


def test_features_tell_most_of_a_class_apart(graph):
    x, y = graph["paper"].x.float(), graph["paper"].y
    centroids = torch.stack([x[y == c].mean(0) for c in range(7)])

    guess = torch.cdist(x, centroids).argmin(1)

    assert 0.5 < float((guess == y).float().mean()) < 0.999


def fit(predict, parameters, y, train_idx):
    """Train on some nodes; returns the share of the others that are classified right."""
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(predict()[train_idx], y[train_idx]).backward()
        optimizer.step()
    rest = torch.ones(len(y), dtype=torch.bool)
    rest[train_idx] = False
    return float((predict().argmax(1) == y)[rest].float().mean())


def test_a_network_over_edges_learns_more_than_one_over_features():
    graph = synthetic_igbh(1e-5, num_features=16, num_classes=7, feature_signal=2.0, dtype=torch.float32)
    x, y, train_idx = graph.x_dict, graph["paper"].y, graph["paper"].train_idx
    torch.manual_seed(0)
    edges = {kind: graph[kind].edge_index for kind in graph.edge_types if kind[2] == "paper"}
    # Other types have no layer of their own here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = HeteroConv({kind: SAGEConv((16, 16), 7) for kind in edges})
    mlp = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 7))

    by_edges = fit(lambda: layer(x, edges)["paper"], layer.parameters(), y, train_idx)
    by_features = fit(lambda: mlp(x["paper"]), mlp.parameters(), y, train_idx)

    assert by_features > 0.3
    assert by_edges > by_features + 0.1


def test_equal_seeds_give_equal_graphs_and_others_do_not():
    graph, again, other = (synthetic_igbh(1e-5, num_features=16, num_classes=7, seed=seed) for seed in (0, 0, 1))

    assert all(torch.equal(graph[kind].edge_index, again[kind].edge_index) for kind in graph.edge_types)
    assert all(torch.equal(graph[kind].x, again[kind].x) for kind in graph.node_types)
    assert not torch.equal(graph["paper"].x, other["paper"].x)
    assert not torch.equal(graph["author"].x[:100], graph["paper"].x[:100])


def test_rows_may_take_eight_bits_or_be_left_out():
    narrow = synthetic_igbh(1e-6, num_features=8, dtype=torch.float8_e4m3fn)

    assert narrow["author"].x.dtype == torch.float8_e4m3fn
    assert "x" not in synthetic_igbh(1e-6, topology_only=True)["author"]


def test_wrong_values_are_named():
    with pytest.raises(ArgumentError, match="homophily"):
        synthetic_igbh(1e-6, homophily=2.0)


SMALL = {"num_features": 16, "num_classes": 7}


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of about a thousand, so that a tiny graph has many."""
    monkeypatch.setattr(synthetic, "CHUNK_VALUES", 1 << 12)
    monkeypatch.setattr(synthetic, "CHUNK_EDGES", {"cpu": 1 << 10})
    monkeypatch.setattr(igbh, "_CHUNK_NODES", 1 << 10)


def hash_files(folder):
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_files_have_the_graph_in_memory(dtype, tmp_path, small_chunks):
    graph = synthetic_igbh(3e-6, dtype=dtype, seed=3, **SMALL)

    read = load_igbh(write_igbh(tmp_path / "igbh", 3e-6, dtype=dtype, seed=3, **SMALL))

    assert set(read.node_types) == set(graph.node_types)
    assert set(read.edge_types) == set(graph.edge_types)
    for kind in graph.node_types:
        assert read[kind].x.dtype == dtype
        assert torch.equal(read[kind].x.view(torch.uint8), graph[kind].x.view(torch.uint8))
    assert all(torch.equal(read["paper"][name], graph["paper"][name]) for name in ("y", "train_idx", "val_idx"))
    for kind in graph.edge_types:
        assert read[kind].edge_index.dtype == torch.int32
        assert torch.equal(read[kind].edge_index.long(), graph[kind].edge_index)


@pytest.mark.full
def test_files_have_equal_bytes_for_any_threads_and_after_an_interruption(tmp_path, small_chunks, monkeypatch):
    whole = hash_files(write_igbh(tmp_path / "whole", 3e-6, **SMALL))
    draw, calls = igbh._Recipe.draw_edges, []

    def fail_once(*args):
        calls.append(args)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return draw(*args)

    monkeypatch.setattr(igbh._Recipe, "draw_edges", fail_once)
    with pytest.raises(KeyboardInterrupt):
        write_igbh(tmp_path / "cut", 3e-6, **SMALL)
    with pytest.raises(FileError, match="that write_igbh finished"):
        load_igbh(tmp_path / "cut")
    with pytest.raises(ArgumentError, match="folder must be new"):
        write_igbh(tmp_path / "cut", 4e-6, **SMALL)
    left = {path: path.stat().st_mtime_ns for path in (tmp_path / "cut").rglob("*.npy")}
    continued = hash_files(write_igbh(tmp_path / "cut", 3e-6, threads=3, **SMALL))

    assert continued == whole
    assert "paper/x.npy" in whole
    assert len(left) > 8
    assert {path: path.stat().st_mtime_ns for path in left} == left
    count = len(calls)
    write_igbh(tmp_path / "cut", 3e-6, **SMALL)
    assert len(calls) == count


class LargestTensor(TorchDispatchMode):
    """Counts the bytes of the largest tensor that an operation returns."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self.most = max(self.most, tensor.nbytes)
        return out


@pytest.mark.full
def test_no_tensor_is_larger_than_a_chunk_whatever_the_scale(tmp_path, small_chunks):
    most, sizes = [], []
    for scale in (1e-6, 2e-6):
        with LargestTensor() as largest:
            folder = write_igbh(tmp_path / str(scale), scale, **SMALL)
        most.append(largest.most)
        sizes.append((folder / "paper__cites__paper" / "edge_index.npy").stat().st_size)

    assert sizes[1] > 1.8 * sizes[0] > 1.8 * most[0]
    assert most[1] == most[0] == 3 * 8 << 10  # three numbers of 64 bits for each edge of a chunk


def test_chunks_are_drawn_in_order_and_few_ahead():
    begun, ahead = [], []

    def chunks():
        for number in range(20):
            begun.append(number)
            yield lambda number=number: torch.tensor([number])

    drawn = []
    for chunk in igbh._draw_ahead(chunks(), threads=3):
        drawn.append(int(chunk))
        ahead.append(len(begun) - len(drawn))

    assert drawn == list(range(20))
    assert max(ahead) <= 3


def test_batches_of_files_are_those_of_the_graph_in_memory(tmp_path):
    graph, folder = synthetic_igbh(3e-6, **SMALL), write_igbh(tmp_path, 3e-6, **SMALL)
    read = load_igbh(folder)
    feature = Feature(device="cpu").from_file(folder / "author" / "x.npy")

    first, second = (next(iter(NeighborLoader(data, [5, 3], ("paper", data["paper"].train_idx), batch_size=16,
                                              shuffle=True, seed=0, device="cpu")))
                     for data in (graph, read))  # fmt: skip

    for kind in graph.node_types:
        assert torch.equal(first[kind].n_id, second[kind].n_id)
        assert torch.equal(first[kind].x, second[kind].x)
    assert torch.equal(feature[first["author"].n_id], first["author"].x)
    assert np.load(folder / "paper" / "y.npy").dtype == np.int64

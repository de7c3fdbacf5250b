"""Ids outside a graph are refused with where the number of nodes came from, and short tables with their name."""

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.testing import MyGraphStore

from pyg_direct import CSRTopo, FeatureStore, NeighborLoader
from pyg_direct.errors import ArgumentError, IdError
from pyg_direct.sampler import graph_reader

EDGES = torch.tensor([[1, 9], [0, 1]])


@pytest.mark.parametrize("options", [{}, {"disjoint": True}])
@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"x": torch.zeros(5, 2)}, "data.num_nodes is not set, so the rows of data.x tell it; give data.x a row for"),
        ({"num_nodes": 5}, "data.num_nodes was set to 5; edges may only name nodes below it"),
        ({"y": torch.zeros(10), "node_role": torch.zeros(5)}, "so the rows of data.node_role tell it"),
    ],
)
def test_the_attribute_that_tells_the_number_of_nodes_is_named(attributes, words, options):
    data = Data(edge_index=EDGES, **attributes)

    with pytest.raises(IdError, match=rf"edge_index must lie in \[0, 5\) \(num_nodes\), got 9: .*{words}"):
        list(NeighborLoader(data, [2], device="cpu", **options))


def test_the_type_whose_nodes_are_too_few_is_named():
    data = HeteroData({"a": {"x": torch.zeros(5, 2)}, "b": {"num_nodes": 2}, ("a", "to", "b"): {"edge_index": EDGES}})

    with pytest.raises(IdError, match=r"\(num_nodes\['a'\]\), got 9: .*the rows of data\['a'\].x tell it"):
        list(NeighborLoader(data, [2], "b", device="cpu"))


def test_negative_ids_are_no_matter_of_the_number_of_nodes():
    data = Data(x=torch.zeros(5, 2), edge_index=torch.tensor([[-1], [0]]))

    with pytest.raises(IdError, match=r"got -1$"):
        list(NeighborLoader(data, [2], device="cpu"))


@pytest.mark.parametrize(
    ("kind", "name", "rows", "words"),
    [
        ("a", "x", 9, "the table 'x' of 'a' in the feature store must have a row for each of the 10 nodes .* got 9"),
        (("a", "to", "a"), "w", 1, r"'w' of \('a', 'to', 'a'\) .* must have a row for each of the 2 edges .* got 1"),
    ],
)
def test_tables_with_too_few_rows_are_named_before_the_first_batch(kind, name, rows, words):
    features, graph = FeatureStore("cpu"), MyGraphStore()
    graph.put_edge_index(tuple(EDGES), edge_type=("a", "to", "a"), layout="coo", size=(10, 10))
    features.put_tensor(torch.zeros(rows, 2), group_name=kind, attr_name=name, index=None)

    with pytest.raises(ArgumentError, match=words):
        NeighborLoader((features, graph), [2], ("a", torch.tensor([0])), device="cpu")


def test_a_short_table_of_a_graph_without_types_is_named():
    features, graph = FeatureStore("cpu"), MyGraphStore()
    graph.put_edge_index(tuple(EDGES), edge_type=None, layout="coo", size=(10, 10))
    features.put_tensor(torch.zeros(9, 2), group_name=None, attr_name="x", index=None)

    with pytest.raises(ArgumentError, match=r"the table 'x' in the feature store must have .* 10 nodes .* got 9"):
        NeighborLoader((features, graph), [2], torch.tensor([0]), device="cpu")


@pytest.mark.parametrize("kind", [None, ("a", "to", "a")])
def test_neighbor_lists_in_a_mapped_file_are_sampled_in_place(tmp_path, kind):
    topology = CSRTopo(torch.randint(10, (2, 60), generator=torch.Generator().manual_seed(0)), num_nodes=10)
    np.save(tmp_path / "row.npy", topology.indices.numpy())
    mapped = torch.from_numpy(np.load(tmp_path / "row.npy", mmap_mode="c"))

    def load(row):
        features, graph = FeatureStore("cpu"), MyGraphStore()
        features[None if kind is None else "a", "x", None] = torch.arange(10.0).view(10, 1)
        graph.put_edge_index((row, topology.indptr), edge_type=kind, layout="csc", size=(10, 10))
        return NeighborLoader((features, graph), [3, 2], torch.arange(10) if kind is None else ("a", torch.arange(10)),
                              batch_size=3, shuffle=True, seed=0, device="cpu")  # fmt: skip

    loader = load(mapped)
    for batch, expected in zip(loader, load(topology.indices.clone()), strict=True):
        for part, other in zip(batch.stores, expected.stores, strict=True):
            assert all(torch.equal(part[key], other[key]) for key in part if isinstance(part[key], torch.Tensor))
    assert loader.node_sampler._open_topology().indices.data_ptr() == mapped.data_ptr()


@pytest.mark.parametrize("options", [{}, {"disjoint": True}])
@pytest.mark.parametrize("length", [9, 11])
def test_a_mask_of_another_length_is_refused_and_labels_of_another_length_are_not_cut(length, options):
    data = Data(x=torch.zeros(10, 2), y=torch.zeros(length), edge_index=EDGES)
    mask = torch.ones(length, dtype=torch.bool)

    with pytest.raises(ArgumentError, match=rf"input_nodes must have shape \[10\] as a mask, got \[{length}\]"):
        NeighborLoader(data, [2], mask, device="cpu", **options)

    assert next(iter(NeighborLoader(data, [2], device="cpu", **options))).y.shape == (length,)


@pytest.mark.parametrize("is_typed", [False, True])
def test_a_topology_that_is_let_go_as_it_is_found_is_still_found(monkeypatch, is_typed):
    data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    device = torch.device("cpu")

    def read():
        return graph_reader.read_parts(data).open("in", False) if is_typed else graph_reader.read_topology(data, device)

    held = [read()]

    def look(edges, content, real=graph_reader.has_content):
        # As where another thread drops the last loader that had it.
        held.clear()
        return real(edges, content)

    monkeypatch.setattr(graph_reader, "has_content", look)

    found = read()

    assert held == []
    assert found is not None
    assert found.place("cpu", device) is not None


def make_timed():
    data = HeteroData()
    data["a"].num_nodes = data["b"].num_nodes = 3
    data["a", "to", "b"].edge_index = data["b", "of", "a"].edge_index = torch.tensor([[0, 1], [1, 2]])
    data["a", "to", "b"].seen = torch.tensor([4, 5])
    return data


def test_relations_without_times_are_said_beside_those_that_have_some(monkeypatch):
    said = []
    monkeypatch.setattr(graph_reader, "announce", said.append)
    data = make_timed()

    graph_reader.read_parts(data, "seen")
    assert said == ["time_attr='seen': ('b', 'of', 'a') without it; all of these edges are sampled"]

    data["b", "of", "a"].seen = torch.tensor([4, 5])
    graph_reader.read_parts(data, "seen")
    assert len(said) == 1


def test_attributes_are_listed_if_none_is_named_as_the_times():
    with pytest.raises(ArgumentError, match=r"time_attr must name .* got 'sen' of \['num_nodes', 'seen'\]"):
        graph_reader.read_parts(make_timed(), "sen")

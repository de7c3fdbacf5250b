"""The store lies where batches are, or in host memory; batches are PyG's, moved."""

from collections import namedtuple

import pytest
import torch
from torch_geometric.data import Batch
from torch_geometric.loader import DataLoader as PygDataLoader

from pyg_direct.loader import DataLoader
from pyg_direct.loader.collate.graph_batches import GraphCollection, copy_once
from pyg_direct.loader.collate.graph_columns import move_all
from pyg_direct.loader.collate.graph_sources import read_source
from tests.loader.data_loader.small_graphs import InMemory, assert_equal_batches, make_molecules, make_pairs, make_typed

GRAPHS = {
    "molecules": lambda: make_molecules(23, name=lambda i, n, e: str(i), size=lambda i, n, e: i,
                                        parts=lambda i, n, e: {"a": torch.rand(n), "b_index": torch.arange(n)}),
    "pairs": lambda: make_pairs(23),
    "typed": lambda: make_typed(23),
}  # fmt: skip
PLACES = [("cpu", "auto"), *(pytest.param("cuda", placement, marks=pytest.mark.gpu)
                             for placement in ("auto", "cuda", "unified", "pinned"))]  # fmt: skip


@pytest.mark.parametrize("form", [list, InMemory])
@pytest.mark.parametrize(("device", "placement"), PLACES)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", GRAPHS)
def test_batches_are_pygs_moved(name, prefetch, device, placement, form):
    graphs = form(GRAPHS[name]())
    options = {"batch_size": 5, "shuffle": True, "follow_batch": ["x", "edge_index", "parts"]}
    loader = DataLoader(graphs, device=device, placement=placement, prefetch=prefetch, **options)

    torch.manual_seed(3)
    got = list(loader)

    torch.manual_seed(3)
    for own, expected in zip(got, PygDataLoader(graphs, **options), strict=True):
        assert_equal_batches(own, expected.to(device))


def describe(value):
    """What a value is on any device: shapes and dtypes instead of numbers."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.layout
    if isinstance(value, dict):
        return {key: describe(part) for key, part in value.items()}
    return [describe(part) for part in value] if isinstance(value, (list, tuple)) else value


def list_devices(value):
    if isinstance(value, torch.Tensor):
        return {value.device.type}
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return set().union(*map(list_devices, parts))


@pytest.mark.parametrize("name", [*GRAPHS, "sparse"])
def test_all_of_a_batch_is_made_where_the_store_is(name):
    # A device without numbers, which every machine has.
    place = torch.device("meta")
    graphs = (
        GRAPHS[name]()
        if name in GRAPHS
        else make_molecules(
            9, adj_t=lambda i, n, e: torch.eye(n).to_sparse_csr(), adj=lambda i, n, e: torch.eye(n).to_sparse_coo()
        )
    )
    collection = GraphCollection(read_source(graphs), ["x", "edge_index"], None)
    collection.place(place)

    batch = collection.collate(torch.tensor([3, 0, 7]))

    expected = Batch.from_data_list([graphs[i] for i in (3, 0, 7)], follow_batch=["x", "edge_index"])
    assert batch._slice_dict.keys() == expected._slice_dict.keys()
    for own, other in zip(batch.stores, expected.stores, strict=True):
        assert describe(own._mapping) == describe(other._mapping)
        assert list_devices(own._mapping) <= {"meta"}
    assert list_devices(batch._slice_dict) == list_devices(batch._inc_dict) == {"cpu"}


def test_what_pygs_code_made_is_moved_whole():
    Pair = namedtuple("Pair", ["a", "b"])
    value = {"a": [torch.ones(2), "text", 3], "b": Pair(torch.ones(1), (torch.ones(1),))}

    moved = move_all(value, torch.device("meta"))

    assert list_devices(moved) == {"meta"}
    assert moved["a"][1:] == ["text", 3]
    assert type(moved["b"]) is Pair
    assert move_all(value, torch.device("cpu")) is value


def test_loaders_over_one_data_set_share_its_copy():
    table, place = torch.arange(9), torch.device("meta")

    first = copy_once(table, place)

    assert copy_once(table, place) is first
    assert copy_once(table, torch.device("cpu")) is table
    table.add_(1)
    assert copy_once(table, place) is not first
    assert copy_once(table.clone(), place) is not copy_once(table, place)


@pytest.mark.gpu
def test_parts_of_a_data_set_on_a_gpu_share_it():
    dataset = InMemory(make_molecules(23))
    loaders = [DataLoader(part, 5, device="cuda") for part in (dataset[:9], dataset[9:])]

    for loader in loaders:
        list(loader)

    tables = [loader._graphs._stores[None].columns["x"].table for loader in loaders]
    assert tables[0] is tables[1]


@pytest.mark.gpu
def test_graphs_on_a_gpu_come_on_the_cpu_if_that_is_asked_for():
    graphs = [graph.to("cuda") for graph in make_molecules(5)]

    (batch,) = DataLoader(graphs, 5, device="cpu")

    assert_equal_batches(batch, Batch.from_data_list(graphs).to("cpu"))


def test_the_store_takes_little_more_than_the_graphs():
    graphs = make_molecules(3000, x=lambda i, n, e: torch.zeros(23, 1, dtype=torch.int64),
                            edge_index=lambda i, n, e: torch.zeros(2, 49 + i % 2, dtype=torch.int64),
                            edge_attr=lambda i, n, e: torch.zeros(49 + i % 2, dtype=torch.int64))  # fmt: skip
    num_bytes = sum(value.nbytes for graph in graphs for _, value in graph)
    loader = DataLoader(graphs, 128, device="cpu")

    (batch, *_) = loader

    collection, source = loader._graphs, loader._graphs.source
    marks = source._marks
    pointers = len(source.graphs) + len(marks._values) + len(marks._mappings)
    beside = collection._spans.nbytes + marks._counts.nbytes + 8 * pointers + source.numbers.nbytes
    assert marks._writes is marks._counts
    assert collection.count_bytes() == num_bytes
    assert num_bytes + beside <= 1.1 * num_bytes
    assert batch.num_graphs == 128

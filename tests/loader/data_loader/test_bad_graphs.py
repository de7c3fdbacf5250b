"""Graphs that do not fit together are refused by their number, before an epoch begins."""

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import DataLoader as PygDataLoader

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.loader import DataLoader
from tests.loader.data_loader.small_graphs import InMemory, assert_equal_batches, make_molecules


def spoil(name, value, number=5):
    """Graphs of which one has another value."""
    graphs = make_molecules(8, pos=lambda i, n, e: torch.rand(n, 3), d=lambda i, n, e: {"a": torch.rand(2)},
                            parts=lambda i, n, e: [torch.rand(1), torch.rand(1)], size=lambda i, n, e: i)  # fmt: skip
    if value is None:
        del graphs[number][name]
    else:
        graphs[number][name] = value
    return graphs


LISTS = {
    "absent": (lambda: spoil("y", None), ArgumentError, "graph 0 has y, graph 5 has not"),
    "absent from the first": (lambda: spoil("y", None, 0), ArgumentError, "graph 1 has y, graph 0 has not"),
    "more": (lambda: spoil("extra", 1), ArgumentError, "graph 5 has extra, graph 0 has not; .*exclude_keys"),
    "width": (lambda: spoil("pos", torch.rand(2, 4)), ArgumentError, r"pos of one width.*\(2, 4\) of graph 5"),
    "dimensions": (lambda: spoil("pos", torch.rand(2)), ArgumentError, r"pos of 2 dimensions.*\(2,\) of graph 5"),
    "dtype": (lambda: spoil("pos", torch.rand(2, 3).double()), ArgumentTypeError, "pos of one dtype.*64 of graph 5"),
    "kind": (lambda: spoil("y", 1.0), ArgumentTypeError, "y of one kind, Tensor as graph 0, got float of graph 5"),
    "text": (lambda: spoil("size", "big"), ArgumentTypeError, "size of one kind, int as graph 0, got str of graph 5"),
    "scalar": (lambda: spoil("y", torch.tensor(1.0)), ArgumentError, "y of 1 dimensions.*graph 5"),
    "keys": (lambda: spoil("d", {"b": torch.rand(2)}), ArgumentError, r"parts in d, \['a'\].*\['b'\] of graph 5"),
    "items": (lambda: spoil("parts", [torch.rand(1)]), ArgumentError, "parts in parts, 2 items.*got 1 of graph 5"),
    "nested dtype": (lambda: spoil("d", {"a": torch.ones(2, dtype=torch.int32)}), ArgumentTypeError,
                     r"d\['a'\] of one dtype.*graph 5"),
    "no graph": (lambda: [*make_molecules(3), 5], ArgumentTypeError, "got a int as graph 3"),
    "text as graph": (lambda: [*make_molecules(3), "CCO"], ArgumentTypeError, "got a str as graph 3"),
    "typed": (lambda: [*make_molecules(3), HeteroData()], ArgumentTypeError, "got a HeteroData as graph 3"),
    "no nodes known": (lambda: [Data(root_index=torch.tensor([0])) for _ in range(2)], ArgumentError,
                       "know their num_nodes, got graph 0"),
    "none": (lambda: [None, *make_molecules(3)], ArgumentTypeError, "must hold graphs, got None as graph 0"),
    "negative num_nodes": (lambda: [Data(num_nodes=2 - i) for i in range(4)], ArgumentError, "got -1 of graph 3"),
    "text as num_nodes": (lambda: [Data(num_nodes=n) for n in (2, "3")], ArgumentError, "got '3' of graph 1"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Unable to accurately infer")
@pytest.mark.parametrize("name", LISTS)
def test_a_graph_is_named(name):
    make, kind, words = LISTS[name]

    with pytest.raises(kind, match=words):
        DataLoader(make(), 2, device="cpu")


def test_attributes_that_are_left_out_need_not_fit():
    graphs = spoil("pos", torch.rand(2, 4))

    (batch,) = DataLoader(graphs, 8, exclude_keys=["pos"], device="cpu")

    assert "pos" not in batch


def test_one_graph_a_batch_has_none_to_fit():
    graphs = make_molecules(8, near=lambda i, n, e: torch.rand(n, n))

    for got, expected in zip(DataLoader(graphs, device="cpu"), PygDataLoader(graphs), strict=True):
        assert_equal_batches(got, expected)
    with pytest.raises(ArgumentError, match="near of one width"):
        DataLoader(graphs, batch_sampler=[[0], [1]], device="cpu")


def test_an_error_of_the_programs_class_names_the_graph():
    class Picky(Data):
        def __inc__(self, key, value, *args, **kwargs):
            if key == "y" and self.y.item() == 3:
                raise RuntimeError("not three")
            return super().__inc__(key, value, *args, **kwargs)

    graphs = [Picky(x=torch.rand(1, 1), y=torch.tensor([i])) for i in range(5)]

    with pytest.raises(ArgumentError, match="__inc__ of y, got graph 3, which says: not three"):
        DataLoader(graphs, 2, device="cpu")


class Listed(torch.utils.data.Dataset):
    """A data set of the program's, whose graphs are made one by one."""

    def __init__(self, graphs):
        self.graphs = graphs

    def __len__(self):
        return len(self.graphs)

    def __getitem__(self, number):
        return self.graphs[number]


def test_a_graph_that_is_made_when_a_batch_is_requested_is_named():
    loader = DataLoader(Listed(spoil("pos", torch.rand(2, 4), 6)), batch_sampler=[[3, 1, 6, 2]], device="cpu")

    with pytest.raises(ArgumentError, match="got graph 6, which cannot be joined with graph 3: Sizes of tensors"):
        list(loader)


def test_an_error_of_all_graphs_stays_what_it_is():
    with pytest.raises(TypeError, match="found invalid type"):
        list(DataLoader(Listed([object()] * 3), 2, device="cpu"))


def break_slices(change):
    dataset = InMemory(make_molecules(8, name=lambda i, n, e: str(i)))
    change(dataset)
    return dataset


SLICES = {
    "descend": (lambda data: data.slices["x"].__setitem__(3, 0), "slices of x must ascend.*for graph 2"),
    "beyond": (lambda data: data.slices["x"].__setitem__(8, 9999), "slices of x must stay within.*9999.*for graph 7"),
    "negative": (lambda data: data.slices["x"].__setitem__(0, -1), "slices of x must ascend.*for graph 0"),
    "count": (lambda data: data.slices.update(y=data.slices["y"][:-1]), "slices of y must have 9 .*as slices of x"),
    "values": (lambda data: data._data.name.pop(), "one name for each of its 8 graphs, got 7"),
}  # fmt: skip


@pytest.mark.parametrize("name", SLICES)
def test_slices_that_contradict_are_named(name):
    change, words = SLICES[name]

    with pytest.raises(ArgumentError, match=words):
        DataLoader(break_slices(change), 2, device="cpu")


def test_counts_of_nodes_that_contradict_are_named():
    dataset = InMemory([Data(num_nodes=i, y=torch.ones(1)) for i in range(5)])
    dataset._data._num_nodes.pop()

    with pytest.raises(ArgumentError, match="one _num_nodes for each of its"):
        DataLoader(dataset, 2, device="cpu")


@pytest.mark.parametrize("index", [7, -1])
def test_an_index_of_no_graph_is_named(index):
    dataset = InMemory(make_molecules(7))
    dataset._indices = [0, index]

    with pytest.raises(ArgumentError, match=f"numbers of its 7 graphs, got {index}"):
        DataLoader(dataset, 2, device="cpu")

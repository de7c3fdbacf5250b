"""Graphs that a program writes to: batches have them as PyG's loader does, and what torch does not count is found."""

import warnings
from itertools import zip_longest

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader as PygDataLoader

from pyg_direct.errors import LoaderWarning
from pyg_direct.loader import DataLoader
from tests.loader.data_loader.small_graphs import InMemory, assert_equal_batches, make_molecules


def add_rows(graphs):
    for graph in graphs:
        graph.x.add_(1)


def assign_rows(graphs):
    for graph in graphs:
        graph.x = graph.x + 1


def add_an_attribute(graphs):
    for graph in graphs:
        graph.seen = len(graph) + 1


WRITES = {"in place": add_rows, "anew": assign_rows, "another attribute": add_an_attribute}


def go_over(dataset, write, **options):
    """Batches of ours and of PyG's, with a write after each, and what was warned of."""
    ours, theirs = iter(DataLoader(dataset, 4, device="cpu", **options)), iter(PygDataLoader(dataset, 4))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for got, batch in zip_longest(ours, theirs):
            assert_equal_batches(got, batch)
            write()
    return [each.message for each in told if isinstance(each.message, LoaderWarning)]


class TestWithinAnEpoch:
    @pytest.mark.parametrize("prefetch", [0, 1, 3])
    @pytest.mark.parametrize("name", WRITES)
    def test_later_batches_have_them_and_a_warning_says_so_once(self, name, prefetch):
        graphs = make_molecules(23)

        (said,) = go_over(graphs, lambda: WRITES[name](graphs), prefetch=prefetch)

        assert "were written while an epoch runs" in str(said)

    def test_joined_tensors_are_looked_at(self):
        dataset = InMemory(make_molecules(23))

        (said,) = go_over(dataset, lambda: dataset._data.x.add_(1), prefetch=2)

        assert "were written while an epoch runs" in str(said)

    def test_later_epochs_have_them_without_another_word(self):
        graphs = make_molecules(9)
        loader = DataLoader(graphs, 3, device="cpu")
        with pytest.warns(LoaderWarning, match="were written"):
            [add_rows(graphs) for _ in loader]

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                for got, batch in zip(loader, PygDataLoader(graphs, 3), strict=True):
                    assert_equal_batches(got, batch)
                    add_rows(graphs)

    def test_numbers_beside_tensors_do_not_count_as_written(self):
        graphs = [Data(x=torch.rand(2, 1), name=f"graph {i}", number=i, y=torch.rand(1)) for i in range(9)]

        assert not go_over(graphs, lambda: None, prefetch=1)


UNCOUNTED = {"numpy": lambda rows: np.add(rows.numpy(), 1, out=rows.numpy()), "data": lambda rows: rows.data.add_(1)}


@pytest.mark.parametrize("write", UNCOUNTED.values(), ids=UNCOUNTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_writes_that_torch_does_not_count_are_found_when_an_epoch_begins(write, dtype):
    graphs = [Data(x=torch.zeros(1 + i % 3, 2, dtype=dtype)) for i in range(50)]
    if dtype is torch.bfloat16 and write is UNCOUNTED["numpy"]:
        write = lambda rows: np.copyto(rows.view(torch.int16).numpy(), 1)  # noqa: E731
    loader = DataLoader(graphs, 50, device="cpu")
    list(loader)

    for graph in graphs:
        write(graph.x)

    (got,) = loader
    assert_equal_batches(got, Batch.from_data_list(graphs))


@pytest.mark.parametrize("write", UNCOUNTED.values(), ids=UNCOUNTED)
def test_those_to_joined_tensors_are_found_too(write):
    dataset = InMemory(make_molecules(7))
    loader = DataLoader(dataset, 7, device="cpu")
    before = loader._graphs
    list(loader)

    write(dataset._data.x)

    (got,) = loader
    assert loader._graphs is not before
    assert_equal_batches(got, Batch.from_data_list(list(dataset)))


@pytest.mark.parametrize("write", [lambda dataset, graphs: graphs[5].x.add_(1),
                                   lambda dataset, graphs: dataset._data.x.add_(1),
                                   lambda dataset, graphs: graphs[4].update({"y": torch.ones(1)})],
                         ids=["a graph", "the data set", "anew"])  # fmt: skip
def test_graphs_of_a_data_set_in_a_list_are_read_again_if_either_is_written(write):
    dataset = InMemory(make_molecules(50))
    graphs = [dataset[number] for number in range(50)]
    loader = DataLoader(graphs, 50, device="cpu")
    before = loader._graphs
    list(loader)
    assert loader._graphs is before

    write(dataset, graphs)

    (got,) = loader
    assert loader._graphs is not before
    assert_equal_batches(got, Batch.from_data_list(graphs))

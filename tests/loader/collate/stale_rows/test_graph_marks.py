"""Marks of the graphs of a list find each change of a graph, and take few bytes."""

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from pyg_direct.loader.collate.stale_rows import GraphMarks
from pyg_direct.ops.rows.graph_rows import LoopChoice


@pytest.fixture(params=["torch", "loops"], autouse=True)
def readers(request, monkeypatch):
    """Writes read with and without prefetched objects."""
    monkeypatch.setattr(LoopChoice, "seconds", 1e9 if request.param == "loops" else 0.0)


def make_graphs(count=700, uneven=False):
    graphs = [Data(x=torch.zeros(1 + i % 3, 2), y=torch.zeros(1), name=f"graph {i}") for i in range(count)]
    if uneven:
        graphs[5].more = 1
    return graphs


def make_views(count=700):
    rows = torch.zeros(count, 2)
    return [Data(x=rows[i : i + 1]) for i in range(count)]


def make_typed(count=80):
    graphs = []
    for number in range(count):
        graphs.append(HeteroData())
        graphs[-1]["a"].x = torch.zeros(2, 1)
        graphs[-1]["a", "to", "a"].edge_index = torch.zeros(2, number % 3, dtype=torch.int64)
    return graphs


MAKERS = {"apart": make_graphs, "uneven": lambda: make_graphs(uneven=True), "views": make_views, "typed": make_typed}


def store_of(graph):
    return graph["a"] if isinstance(graph, HeteroData) else graph


CHANGES = {
    "in place": lambda store: store.x.add_(1),
    "anew": lambda store: setattr(store, "x", store.x + 1),
    "added": lambda store: setattr(store, "other", 3),
    "deleted": lambda store: store.pop("x"),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_graphs_that_nobody_changed_are_current(make):
    graphs = make()
    store_of(graphs[1]).x.add_(1)

    marks = GraphMarks(graphs)

    assert marks.are_current()
    assert not marks.were_written(range(len(graphs)))


@pytest.mark.parametrize("number", [0, 77, -1])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_each_change_of_each_graph_is_found(make, change, number):
    graphs = make()
    marks = GraphMarks(graphs)

    change(store_of(graphs[number]))

    assert not marks.are_current()
    assert marks.were_written([number % len(graphs)])


def test_only_the_given_graphs_are_looked_at():
    graphs = make_graphs()
    marks = GraphMarks(graphs)

    graphs[9].x.add_(1)

    assert not marks.were_written([8, 10])
    assert marks.were_written([8, 9])


def test_many_writes_are_counted():
    graphs = make_graphs(3)
    for _ in range(300):
        graphs[1].x.add_(1)
    marks = GraphMarks(graphs)
    assert marks.are_current()

    graphs[1].x.add_(1)

    assert not marks.are_current()
    assert marks.were_written([1])


def test_tensors_without_counters_stand_beside_others():
    graphs = make_graphs(3)
    with torch.inference_mode():
        graphs[1].x = torch.zeros(2, 2)
    marks = GraphMarks(graphs)
    assert marks.are_current()

    graphs[2].x.add_(1)

    assert marks.were_written([2])
    assert not marks.are_current()


def test_a_write_through_numpy_is_found_in_a_small_list():
    graphs = make_graphs(20)
    marks = GraphMarks(graphs)

    np.add(graphs[7].x.numpy(), 1, out=graphs[7].x.numpy())

    assert not marks.are_current()


def test_no_graphs_are_current():
    assert GraphMarks([]).are_current()
    assert GraphMarks([Data(), Data()]).are_current()

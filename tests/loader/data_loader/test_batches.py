"""Batches are PyG's in everything: classes, keys, their order, dtypes, values, and what they are taken apart by."""

import numpy as np
import pytest
import torch
from torch.utils.data import Subset
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader as PygDataLoader

from pyg_direct.loader import DataLoader
from tests.loader.data_loader.small_graphs import (
    InMemory,
    PairData,
    assert_equal_batches,
    make_molecules,
    make_pairs,
    make_typed,
)


def adjacency(number, nodes, edges):
    return torch.eye(nodes).to_sparse_csr()


def wide_adjacency(number, nodes, edges):
    """Two columns more than rows, and two numbers an item."""
    crow = torch.arange(nodes + 1) * 2
    columns = torch.stack([torch.arange(nodes), torch.arange(nodes) + 2], 1).view(-1)
    return torch.sparse_csr_tensor(crow, columns, torch.rand(2 * nodes, 2), (nodes, nodes + 2, 2))


def with_orders(graphs):
    """Every third graph has its attributes in another order."""
    for graph in graphs[::3]:
        values = dict(graph._store._mapping)
        graph._store._mapping.clear()
        for key in reversed(values):
            graph[key] = values[key]
    return graphs


def bare(count, **more):
    return [Data(edge_index=torch.tensor([[0, i % 3], [1, 0]]), **{name: make(i) for name, make in more.items()})
            for i in range(count)]  # fmt: skip


class Numbered(Data):
    """Increments that are floats, and a dimension that depends on the graph."""

    def __inc__(self, key, value, *args, **kwargs):
        return 0.5 if key == "z" else super().__inc__(key, value, *args, **kwargs)

    def __cat_dim__(self, key, value, *args, **kwargs):
        return int(self.num_nodes == 2) if key == "square" else super().__cat_dim__(key, value, *args, **kwargs)


class Marked(Data):
    """Writes an attribute as it is made."""

    def __init__(self, x=None, **kwargs):
        super().__init__(x=x, **kwargs)
        self.marks = ["made"]


class Needy(Data):
    """Cannot be made without an argument."""

    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        self.size_of = size


DATA_SETS = {
    "molecules": lambda: make_molecules(13),
    "one graph": lambda: make_molecules(1),
    "strings": lambda: make_molecules(13, smiles=lambda i, n, e: "C" * i, tags=lambda i, n, e: ["a", i]),
    "numbers": lambda: make_molecules(13, size=lambda i, n, e: i, weight=lambda i, n, e: i / 2,
                                      both=lambda i, n, e: i if i % 2 else 0.5, is_ring=lambda i, n, e: i > 3,
                                      root_index=lambda i, n, e: 0),
    "scalars": lambda: make_molecules(13, y=lambda i, n, e: torch.tensor(float(i)),
                                      root_index=lambda i, n, e: torch.tensor(0)),
    "positions": lambda: make_molecules(13, pos=lambda i, n, e: torch.rand(n, 3),
                                        face=lambda i, n, e: torch.zeros(3, e, dtype=torch.int32),
                                        wide=lambda i, n, e: torch.rand(n, 2, 3)),
    "dense": lambda: make_molecules(13, image=lambda i, n, e: torch.rand(2, 3)),
    "nested": lambda: make_molecules(13, parts=lambda i, n, e: {"a": torch.rand(n), "b_index": torch.arange(n),
                                                               "c": {"d": i, "e": "s"}},
                                     list_index=lambda i, n, e: [torch.arange(n), torch.arange(e)],
                                     own_index=lambda i, n, e: {0: torch.arange(n), "of": [torch.arange(n)]},
                                     arrays=lambda i, n, e: np.arange(i), nothing=lambda i, n, e: []),
    "sparse": lambda: make_molecules(13, adj_t=adjacency),
    "sparse values": lambda: make_molecules(13, adj_t=wide_adjacency, x=lambda i, n, e: torch.rand(n + 1, 2)),
    "sparse elsewhere": lambda: make_molecules(13, adj=lambda i, n, e: torch.rand(n, n).relu().to_sparse_coo(),
                                               weights=lambda i, n, e: torch.eye(3).to_sparse_csr(),
                                               adj_t=lambda i, n, e: torch.eye(n).to_sparse_csr().to(
                                                   torch.float64 if i % 4 else torch.float32)),
    "own batch": lambda: make_molecules(13, sub_batch=lambda i, n, e: torch.arange(n),
                                        batch=lambda i, n, e: torch.zeros(n, dtype=torch.long),
                                        ptr=lambda i, n, e: torch.tensor([0, n])),
    "node counts": lambda: bare(13, num_nodes=lambda i: 3 + i),
    "guessed counts": lambda: bare(13, y=lambda i: torch.tensor([i])),
    "nodes alone": lambda: [Data(num_nodes=i) for i in range(5)],
    "no nodes": lambda: [Data(x=torch.rand(i % 2, 2), edge_index=torch.zeros(2, 0, dtype=torch.long))
                         for i in range(9)],
    "none known": lambda: [Data(y=torch.tensor([i]), name=str(i)) for i in range(9)],
    "node tensors": lambda: bare(9, node_mask=lambda i: torch.ones(3, dtype=torch.bool)),
    "empty vectors": lambda: make_molecules(9, edge_w=lambda i, n, e: torch.rand(e, 3) if e else torch.empty(0)),
    "gradients": lambda: make_molecules(9, w=lambda i, n, e: torch.ones(n, requires_grad=True)),
    "small integers": lambda: make_molecules(9, mask_index=lambda i, n, e: torch.zeros(n, dtype=torch.bool),
                                             byte_index=lambda i, n, e: torch.zeros(2, n, dtype=torch.uint8),
                                             float_index=lambda i, n, e: torch.rand(n)),
    "orders": lambda: with_orders(make_molecules(13)),
    "pairs": lambda: make_pairs(13),
    "depends on the graph": lambda: [Numbered(x=torch.rand(1 + i % 2, 1), z=torch.arange(2), square=torch.rand(2, 2))
                                     for i in range(9)],
    "marked": lambda: [Marked(torch.rand(i, 1)) for i in range(1, 9)],
    "needy": lambda: [Needy(i, x=torch.rand(i, 1)) for i in range(1, 9)],
    "typed": lambda: make_typed(13),
    "types of num_nodes alone": lambda: make_typed(13, names_authors=False),
}  # fmt: skip
OPTIONS = [{}, {"follow_batch": ["x", "edge_index", "y", "parts", "list_index", "whole", "smiles"]},
           {"exclude_keys": ["x", "edge_attr", "marks", "num_nodes"]}]  # fmt: skip


def pairs_of(dataset, **options):
    return zip(DataLoader(dataset, device="cpu", **options), PygDataLoader(dataset, **options), strict=True)


@pytest.mark.filterwarnings("ignore:Unable to accurately infer", "ignore:Sparse CSR", "ignore:.*invariant checks")
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "follow", "exclude"])
@pytest.mark.parametrize("name", DATA_SETS)
def test_batches_of_lists_are_those_of_pyg(name, options, joining):
    graphs = DATA_SETS[name]()

    for got, expected in pairs_of(graphs, batch_size=4, **options):
        assert_equal_batches(got, expected)


# PyG's own data sets cannot hold them, or not give them back.
NO_DATASET = {"empty vectors", "needy", "types of num_nodes alone"}


@pytest.mark.filterwarnings("ignore:Unable to accurately infer", "ignore:Sparse CSR", "ignore:.*invariant checks")
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "follow", "exclude"])
@pytest.mark.parametrize("name", [name for name in DATA_SETS if name not in NO_DATASET])
def test_batches_of_data_sets_in_memory_are_those_of_pyg(name, options, joining):
    dataset = InMemory(DATA_SETS[name]())

    for got, expected in pairs_of(dataset, batch_size=4, **options):
        assert_equal_batches(got, expected)


SELECTIONS = {
    "slice": lambda dataset: dataset[2:9],
    "list": lambda dataset: dataset[[5, 2, 2, 8]],
    "mask": lambda dataset: dataset[torch.arange(13) % 2 == 0],
    "shuffled": lambda dataset: dataset.shuffle(),
    "subset": lambda dataset: Subset(dataset, [7, 1, 1, 12, 3]),
    "subset of a selection": lambda dataset: Subset(dataset[torch.arange(12, 2, -1)], [0, 5, 2]),
    "subset of a subset": lambda dataset: Subset(Subset(dataset, [7, 1, 1, 12, 3]), torch.tensor([4, 1, 0])),
    "none": lambda dataset: dataset[[]],
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_selections_of_a_data_set_have_its_graphs(name):
    dataset = SELECTIONS[name](InMemory(make_molecules(13)))

    compared = [assert_equal_batches(got, expected) for got, expected in pairs_of(dataset, batch_size=2)]

    assert len(compared) == -(-len(dataset) // 2)


@pytest.mark.parametrize("name", ["subset", "subset of a subset"])
def test_subsets_of_a_list_have_its_graphs(name):
    graphs = make_molecules(13)
    dataset = SELECTIONS[name](graphs)

    for got, expected in pairs_of(dataset, batch_size=2):
        assert_equal_batches(got, expected)
    # The others are not joined.
    assert DataLoader(dataset, device="cpu")._graphs.source.count == len({7, 1, 12, 3} & set(range(13))) - (
        "of" in name)  # fmt: skip


def test_graphs_of_a_data_set_in_a_list_may_have_one_edge():
    dataset = InMemory([Data(x=torch.rand(2, 1), edge_index=torch.tensor([[0] * n, [1] * n])) for n in (1, 2, 1, 0)])

    for got, expected in pairs_of([dataset[number] for number in range(4)], batch_size=2):
        assert_equal_batches(got, expected)


def test_a_batch_is_used_as_pygs_is():
    graphs = make_molecules(7)
    (batch,) = DataLoader(graphs, 7, device="cpu")

    moved = Batch.from_data_list(batch.to_data_list())

    assert_equal_batches(moved, Batch.from_data_list(graphs))
    assert [len(part.x) for part in batch[2:4]] == [len(graph.x) for graph in graphs[2:4]]
    assert batch.clone().x.data_ptr() != batch.x.data_ptr()


def test_what_is_done_to_a_batch_stays_in_it(joining):
    graphs = make_molecules(7)
    loader = DataLoader(graphs, 7, follow_batch=["x"], device="cpu")
    expected = Batch.from_data_list(graphs, follow_batch=["x"])

    (batch,) = loader
    for value in batch._store._mapping.values():
        value.zero_()
    batch.new = 1

    (again,) = loader
    assert_equal_batches(again, expected)
    assert "new" not in again
    assert_equal_batches(batch.to_data_list() and again, expected)


def test_graphs_that_were_changed_are_read_anew():
    graphs = make_molecules(7)
    loader = DataLoader(graphs, 7, device="cpu")
    list(loader)

    changes = [lambda: graphs[3].x.add_(1), lambda: graphs[2].update({"x": graphs[2].x + 5}),
               lambda: graphs.append(make_molecules(1)[0]), lambda: graphs.reverse(),
               lambda: [graph.update({"z": torch.ones(1)}) for graph in graphs]]  # fmt: skip
    for change in changes:
        change()
        (batch, *_) = loader
        assert_equal_batches(batch, Batch.from_data_list(graphs[:7]))


@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_epoch_keeps_the_graphs_that_it_began_with(prefetch):
    graphs = make_molecules(6)
    loader, expected = DataLoader(graphs, 2, device="cpu", prefetch=prefetch), list(PygDataLoader(graphs, 2))
    running = iter(loader)
    first = next(running)

    graphs[:] = make_molecules(3, seed=1)
    other = list(loader)

    for got, batch in zip([first, *running], expected, strict=True):
        assert_equal_batches(got, batch)
    for got, batch in zip(other, PygDataLoader(graphs, 2), strict=True):
        assert_equal_batches(got, batch)


def test_a_data_set_in_memory_is_used_as_it_is_and_follows_what_is_written():
    dataset = InMemory(make_molecules(7))
    loader = DataLoader(dataset, 7, device="cpu")

    assert loader._graphs._stores[None].columns["x"].table is dataset._data.x
    dataset._data.x.add_(3)
    assert_equal_batches(next(iter(loader)), Batch.from_data_list(list(dataset)))
    dataset._data.y = dataset._data.y * 2
    dataset._data_list = None
    assert_equal_batches(next(iter(loader)), Batch.from_data_list(list(dataset)))


def test_nested_numbers_with_keys_that_are_none_of_pygs_are_refused_as_there():
    graphs = make_molecules(3, d=lambda i, n, e: {1: 2.0})

    for make in (lambda: PygDataLoader(graphs, 3), lambda: DataLoader(graphs, 3, device="cpu")):
        with pytest.raises(TypeError, match="not iterable"):
            list(make())


class Turned(Data):
    """Dimensions that no other graph has, or that change with the graph."""

    def __cat_dim__(self, key, value, *args, **kwargs):
        given = {"scalar": -1, "sheet": (0, 1), "last": -2, "deep": 1, "adj_t": 0 if self.x.size(0) % 2 else (0, 1)}
        return given.get(key, super().__cat_dim__(key, value, *args, **kwargs))

    def __inc__(self, key, value, *args, **kwargs):
        steps = {"last": True, "deep": torch.tensor([1, 2, 3]), "wide": torch.tensor([[[[1]]]]), "y": 2**40}
        return steps.get(key, super().__inc__(key, value, *args, **kwargs))


@pytest.mark.parametrize("form", [list, InMemory])
@pytest.mark.parametrize("names", [["scalar"], ["last"], ["deep"], ["wide"], ["y"], ["scalar", "y", "deep"]])
def test_odd_dimensions_and_increments_are_pygs(names, form, joining):
    values = {"scalar": lambda i: torch.tensor(i), "last": lambda i: torch.ones(1 + i % 2, 3),
              "deep": lambda i: torch.arange(6).view(2, 3), "wide": lambda i: torch.ones(2, 2, dtype=torch.int64),
              "y": lambda i: torch.tensor([i], dtype=torch.int32)}  # fmt: skip
    graphs = [Turned(x=torch.rand(1 + i, 1), **{name: values[name](i) for name in names}) for i in range(6)]

    try:
        expected = list(PygDataLoader(form(graphs), 3))
    except (RuntimeError, IndexError) as error:
        with pytest.raises(type(error)):
            list(DataLoader(form(graphs), 3, device="cpu"))
        return
    for got, batch in zip(DataLoader(form(graphs), 3, device="cpu"), expected, strict=True):
        assert_equal_batches(got, batch)


def test_matrices_that_are_joined_in_two_ways_are_refused_as_by_pyg():
    graphs = [Turned(x=torch.rand(1 + i, 1), adj_t=torch.eye(1 + i).to_sparse_csr()) for i in range(4)]

    for got, expected in pairs_of(graphs, batch_size=1):
        assert_equal_batches(got, expected)


def test_a_data_set_of_old_form_is_pygs():
    dataset = InMemory(make_molecules(6))
    dataset._data.num_nodes = torch.tensor([len(graph.x) for graph in make_molecules(6)])
    dataset.slices["num_nodes"] = torch.arange(7)

    for got, expected in pairs_of(dataset, batch_size=4):
        assert_equal_batches(got, expected)


def test_attributes_that_a_class_writes_and_a_data_set_lacks_are_pygs():
    dataset = InMemory([Marked(torch.rand(i, 1)) for i in range(1, 9)])
    del dataset.slices["marks"]

    for got, expected in pairs_of(dataset, batch_size=4):
        assert_equal_batches(got, expected)


def test_a_data_set_that_is_filled_anew_is_read_anew():
    dataset = InMemory(make_molecules(6))
    loader = DataLoader(dataset, 3, device="cpu")
    list(loader)

    dataset.data, dataset.slices = dataset.collate(make_molecules(4, seed=9))
    loader = DataLoader(dataset, 3, device="cpu")
    expected = list(PygDataLoader(dataset, 3))

    for got, batch in zip(loader, expected, strict=True):
        assert_equal_batches(got, batch)


def test_graphs_that_a_program_put_into_a_data_set_are_its_graphs():
    dataset = InMemory(make_molecules(7))
    dataset._data_list = make_molecules(7, seed=5)

    for got, expected in pairs_of(dataset, batch_size=3):
        assert_equal_batches(got, expected)


def test_each_graph_is_asked_once():
    asked = []

    class Counting(Data):
        def __inc__(self, key, value, *args, **kwargs):
            asked.append(key)
            return super().__inc__(key, value, *args, **kwargs)

    graphs = [Counting(x=torch.rand(2, 1), edge_index=torch.zeros(2, 1, dtype=torch.long)) for _ in range(6)]
    loader = DataLoader(graphs, 2, device="cpu")
    for _ in range(3):
        list(loader)

    assert len(asked) == 12


def test_types_may_be_absent_from_no_graph():
    graphs = make_typed(4)
    del graphs[2]["author", "writes", "paper"]

    with pytest.raises(ValueError, match=r"graph 0 has the type \('author', 'writes', 'paper'\), graph 2 has not"):
        DataLoader(graphs, 2, device="cpu")


def test_pairs_are_of_their_class():
    (batch,) = DataLoader(make_pairs(3), 3, device="cpu")

    assert isinstance(batch, PairData)
    assert isinstance(batch, Batch)
    (typed,) = DataLoader(make_typed(3), 3, device="cpu")
    assert isinstance(typed, HeteroData)

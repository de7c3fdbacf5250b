"""Random data sets, classes and options: each batch is PyG's."""

import random

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import Subset
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader as PygDataLoader

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.loader import DataLoader
from tests.loader.data_loader.small_graphs import InMemory, PairData, assert_equal_batches, joined_by

DTYPES = [torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64, torch.bool, torch.float16]
NAMES = ["x", "pos", "edge_attr", "y", "z", "node_mask", "root_index", "n_id", "face", "sub_batch", "edge_type", "w"]


class Odd(Data):
    """Increments and dimensions of many kinds, by name and by graph."""

    def __inc__(self, key, value, *args, **kwargs):
        given = {"z": 3, "w": torch.tensor(2), "edge_type": torch.tensor([1]), "y": self.num_nodes or 0}
        return given[key] if key in given else super().__inc__(key, value, *args, **kwargs)

    def __cat_dim__(self, key, value, *args, **kwargs):
        given = {"pos": -1, "w": None, "n_id": 1}
        if key in given and isinstance(value, torch.Tensor) and value.dim() > 1:
            return given[key]
        return super().__cat_dim__(key, value, *args, **kwargs)


def draw_tensor(rng, dtype, shape):
    values = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    return values.to(dtype)


def choose_kind(rng, name):
    """A maker of values of one attribute: (rng, rows) -> value."""
    dtype, wide, fixed = rng.choice(DTYPES), rng.choice([(), (1,), (3,), (2, 2)]), rng.randrange(1, 4)
    kinds = {
        "rows": lambda rng, n: draw_tensor(rng, dtype, (n, *wide)),
        "fixed": lambda rng, n: draw_tensor(rng, dtype, (fixed, *wide)),
        "columns": lambda rng, n: draw_tensor(rng, dtype, (2, n)),
        "scalar": lambda rng, n: draw_tensor(rng, dtype, ()),
        "number": lambda rng, n: rng.choice([n, 0.5 * n, n > 2]),
        "text": lambda rng, n: "a" * n,
        "list": lambda rng, n: [n, "b"],
        "dict": lambda rng, n: {"a": draw_tensor(rng, dtype, (n, *wide)), "b_index": torch.arange(n), "c": n},
        "tensors": lambda rng, n: [draw_tensor(rng, dtype, (n,)), torch.rand(2)],
    }
    few = ["columns"] if name in ("face", "root_index") and rng.random() < 0.8 else list(kinds)
    return kinds[rng.choice(few)]


def draw_graphs(seed):
    """A data set, the same for the same seed."""
    rng = random.Random(seed)
    count = rng.choice([1, 2, 3, 5, 8])
    kind = rng.choice([Data, Data, Odd, PairData])
    makers = {name: choose_kind(rng, name) for name in rng.sample(NAMES, rng.randrange(len(NAMES)))}
    has_edges, has_count = rng.random() < 0.8, rng.random() < 0.5
    graphs = []
    for _ in range(count):
        nodes = rng.randrange(0 if has_count else 1, 6)
        graph = kind()
        for name, make in makers.items():
            graph[name] = make(rng, nodes)
        if has_edges:
            graph.edge_index = draw_tensor(rng, torch.int64, (2, rng.randrange(1, 6)))
        if has_count or not makers:
            graph.num_nodes = nodes
        graphs.append(graph)
    return graphs


def draw_typed(seed):
    rng = random.Random(seed)
    kinds = ["a", "b"][: rng.choice([1, 2])]
    makers = {kind: {name: choose_kind(rng, name) for name in rng.sample(NAMES, 3)} for kind in kinds}
    relations = [(rng.choice(kinds), name, rng.choice(kinds)) for name in ("to", "of")]
    with_weight = rng.random() < 0.5
    graphs = []
    for _ in range(rng.choice([1, 2, 5])):
        graph = HeteroData()
        for kind in kinds:
            nodes = rng.randrange(1, 5)
            graph[kind].x = torch.rand(nodes, 2)
            for name, make in makers[kind].items():
                if name != "x":
                    graph[kind][name] = make(rng, nodes)
        for relation in relations:
            edges = rng.randrange(4)
            graph[relation].edge_index = draw_tensor(rng, rng.choice([torch.int64]), (2, edges))
            if with_weight:
                graph[relation].edge_attr = draw_tensor(rng, torch.float32, (edges, 2))
        graph.label = rng.randrange(9)
        graphs.append(graph)
    return graphs


def compare(graphs, seed):
    """Batches of ours and of PyG's; an error of PyG's is one of ours."""
    rng = random.Random(seed)
    options = {"batch_size": rng.choice([1, 2, 4]), "drop_last": rng.random() < 0.2,
               "follow_batch": rng.sample([*NAMES, "edge_index", "label"], rng.randrange(4)),
               "exclude_keys": rng.sample([*NAMES, "num_nodes", "edge_index"], rng.choice([0, 0, 1, 2]))}  # fmt: skip
    dataset = graphs
    form = rng.choice(["list", "memory", "memory", "subset"])
    if form == "memory":
        try:
            dataset = InMemory(graphs)
            [dataset.get(i) for i in range(len(graphs))]
        except (IndexError, KeyError, RuntimeError, TypeError, ValueError):
            dataset = graphs
    if form == "subset":
        dataset = Subset(dataset, [rng.randrange(len(graphs)) for _ in range(4)])
    torch.manual_seed(seed)
    try:
        expected = list(PygDataLoader(dataset, shuffle=True, **options))
    except Exception as error:
        with pytest.raises((type(error), ValueError)):
            list(DataLoader(dataset, shuffle=True, device="cpu", **options))
        return
    try:
        loader = DataLoader(dataset, shuffle=True, device="cpu", **options)
    except (ArgumentError, ArgumentTypeError):
        # By chance no batch had two that do not fit.
        with pytest.raises((IndexError, RuntimeError, TypeError, ValueError)):
            Batch.from_data_list(list(dataset), exclude_keys=options["exclude_keys"])
        return
    torch.manual_seed(seed)
    for got, batch in zip(loader, expected, strict=True):
        assert_equal_batches(got, batch)


@pytest.mark.filterwarnings("ignore:Unable to accurately infer")
@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**31))
def test_batches_of_random_graphs_are_pygs(seed):
    with joined_by(["torch", "loops"][seed % 2]):
        compare(draw_graphs(seed), seed)


@pytest.mark.filterwarnings("ignore:Unable to accurately infer")
@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**31))
def test_batches_of_random_typed_graphs_are_pygs(seed):
    with joined_by(["torch", "loops"][seed % 2]):
        compare(draw_typed(seed), seed)

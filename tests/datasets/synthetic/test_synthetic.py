"""Generated graphs: of the requested shape, skewed, undirected if requested, and worth training on."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_direct.datasets import PRESETS, NodeDataset, fill_features, synthetic_graph
from pyg_direct.errors import ArgumentError, ArgumentTypeError, DeviceError


@pytest.fixture(scope="module")
def graph() -> NodeDataset:
    """12,245 nodes and 618,590 edges: two chunks of edges."""
    return synthetic_graph("products", scale=0.005, seed=3)


def same(one: NodeDataset, other: NodeDataset) -> list[bool]:
    names = ("edge_index", "x", "y", "train_idx", "val_idx", "test_idx")
    return [torch.equal(getattr(one, name), getattr(other, name)) for name in names]


def sorted_edges(edge_index: Tensor, num_nodes: int) -> Tensor:
    return (edge_index[0].long() * num_nodes + edge_index[1]).sort().values


def measure_homophily(graph: NodeDataset) -> float:
    return (graph.y[graph.edge_index[0]] == graph.y[graph.edge_index[1]]).float().mean().item()


def average_neighbors(graph: NodeDataset) -> Tensor:
    source, target = graph.edge_index
    total = torch.zeros_like(graph.x).index_add_(0, target, graph.x[source])
    return total / torch.bincount(target, minlength=graph.num_nodes).clamp(min=1)[:, None]


def ridge_accuracy(x: Tensor, graph: NodeDataset) -> float:
    """Test accuracy of ridge regression from `x` to the classes."""
    x = torch.cat([x, torch.ones(len(x), 1)], dim=1)
    train = x[graph.train_idx]
    classes = torch.nn.functional.one_hot(graph.y[graph.train_idx], graph.num_classes).float()
    penalty = 0.1 * train.var() * len(train) * torch.eye(x.shape[1])
    weight = torch.linalg.solve(train.T @ train + penalty, train.T @ classes)
    predicted = (x[graph.test_idx] @ weight).argmax(dim=1)
    return (predicted == graph.y[graph.test_idx]).float().mean().item()


@pytest.mark.parametrize("preset", PRESETS)
def test_equal_seeds_give_equal_graphs(device: torch.device, preset: str) -> None:
    first = synthetic_graph(preset, scale=0.0005, seed=7, device=device)

    second = synthetic_graph(preset, scale=0.0005, seed=7, device=device)

    assert all(same(first, second))
    assert first.edge_index.device.type == first.x.device.type == device.type


def test_another_seed_gives_another_graph(graph: NodeDataset) -> None:
    # 2**32 apart: torch's CPU generator reads 32 bits of its seed
    other = synthetic_graph("products", scale=0.005, seed=3 + 2**32)

    assert not any(same(graph, other))


def test_topology_is_the_same_without_features(graph: NodeDataset) -> None:
    bare = synthetic_graph("products", scale=0.005, seed=3, topology_only=True)

    assert bare.x is None
    assert torch.equal(bare.edge_index, graph.edge_index)
    assert torch.equal(bare.y, graph.y)


@pytest.mark.parametrize("preset", PRESETS)
def test_scale_multiplies_nodes_and_edges(preset: str) -> None:
    shape = PRESETS[preset]

    graph = synthetic_graph(preset, scale=0.001)

    assert graph.num_nodes == int(shape.num_nodes * 0.001) == len(graph.y) == len(graph.x)
    assert abs(graph.num_edges - shape.num_edges * 0.001) < 2
    assert (graph.num_features, graph.num_classes) == (shape.num_features, shape.num_classes)


def test_sizes_can_be_given_one_by_one() -> None:
    graph = synthetic_graph(
        "papers100M",
        num_nodes=300,
        num_edges=7001,
        num_features=5,
        num_classes=9,
        index_dtype=torch.int32,
        dtype=torch.half,
    )

    assert graph.edge_index.shape == (2, 7001)
    assert graph.x.shape == (300, 5)
    assert (graph.edge_index.dtype, graph.x.dtype, graph.y.dtype) == (torch.int32, torch.half, torch.int64)
    assert 0 <= graph.edge_index.min() <= graph.edge_index.max() < 300
    assert 0 <= graph.y.min() <= graph.y.max() < 9


@pytest.mark.parametrize("num_nodes", [1, 2, 5])
@pytest.mark.parametrize("num_edges", [0, 40])
def test_tiny_graphs_are_drawn(num_nodes: int, num_edges: int) -> None:
    graph = synthetic_graph("reddit", num_nodes=num_nodes, num_edges=num_edges, homophily=0.5)

    loops = (graph.edge_index[0] == graph.edge_index[1]).sum()
    assert graph.edge_index.shape == (2, num_edges)
    assert loops == (num_edges if num_nodes == 1 else 0)


@pytest.mark.parametrize("preset", PRESETS)
def test_undirected_graphs_hold_the_reverse_of_every_edge(device: torch.device, preset: str) -> None:
    graph = synthetic_graph(preset, scale=0.001, device=device, topology_only=True)

    forward = sorted_edges(graph.edge_index, graph.num_nodes)
    backward = sorted_edges(graph.edge_index.flip(0), graph.num_nodes)
    assert torch.equal(forward, backward) == (preset != "papers100M")


@pytest.mark.parametrize("preset", PRESETS)
def test_few_nodes_hold_many_edges_and_some_hold_none(preset: str) -> None:
    graph = synthetic_graph(preset, num_nodes=20_000, topology_only=True)

    degree = torch.bincount(graph.edge_index.flatten(), minlength=graph.num_nodes)
    degree = degree.sort(descending=True).values
    assert degree[: graph.num_nodes // 100].sum() > 0.15 * degree.sum()
    assert degree[graph.num_nodes // 2] < 0.5 * degree.float().mean()
    assert degree[-1] == 0


def test_ids_say_nothing_about_degree_or_class(graph: NodeDataset) -> None:
    ids = torch.arange(graph.num_nodes)
    degree = torch.bincount(graph.edge_index[0], minlength=graph.num_nodes)

    # ranks, because one hub would outweigh all other nodes
    order = torch.stack([ids, degree.argsort().argsort(), graph.y]).float()

    assert torch.corrcoef(order)[0, 1:].abs().max() < 4 / graph.num_nodes**0.5


def test_classes_have_unequal_sizes(graph: NodeDataset) -> None:
    share = torch.bincount(graph.y, minlength=47) / graph.num_nodes

    assert share.min() > 0
    assert share.max() > 10 * share.min()


@pytest.mark.parametrize("homophily", [0.0, 0.3, 1.0])
def test_edges_stay_in_their_class_as_often_as_asked(device: torch.device, homophily: float) -> None:
    graph = synthetic_graph("products", scale=0.002, homophily=homophily, device=device, topology_only=True)

    # a random edge meets its own class by chance
    chance = (torch.bincount(graph.y) / graph.num_nodes).square().sum().item()
    assert measure_homophily(graph) == pytest.approx(homophily + (1 - homophily) * chance, abs=0.01)


@pytest.mark.parametrize("preset", PRESETS)
def test_split_is_disjoint_and_in_proportion(preset: str) -> None:
    shape = PRESETS[preset]

    graph = synthetic_graph(preset, scale=0.001, topology_only=True)

    parts = graph.train_idx, graph.val_idx, graph.test_idx
    joined = torch.cat(parts)
    assert len(joined.unique()) == len(joined)
    assert 0 <= joined.min() <= joined.max() < graph.num_nodes
    for part, count in zip(parts, (shape.num_train, shape.num_val, shape.num_test), strict=True):
        assert len(part) == pytest.approx(count * 0.001, abs=2)


def test_neighbors_tell_more_about_a_class_than_features(graph: NodeDataset) -> None:
    raw = ridge_accuracy(graph.x, graph)

    averaged = ridge_accuracy(average_neighbors(graph), graph)

    assert 0.2 < raw < 0.6
    assert raw + 0.1 < averaged < 0.95


def test_features_can_be_written_into_other_memory(graph: NodeDataset) -> None:
    rows = torch.full((graph.num_nodes, 2 * graph.num_features), float("nan"), dtype=torch.half)
    signal = PRESETS["products"].feature_signal

    fill_features(rows[:, ::2], graph.y, seed=3, num_classes=47, feature_signal=signal)

    assert torch.equal(rows[:, ::2], graph.x.half())
    assert rows[:, 1::2].isnan().all()


def test_data_has_the_split_as_masks(graph: NodeDataset) -> None:
    data = graph.to_data()

    assert data.validate()
    assert data.x is graph.x
    assert torch.equal(data.train_mask.nonzero()[:, 0], graph.train_idx)
    assert torch.equal(data.val_mask.nonzero()[:, 0], graph.val_idx)
    assert torch.equal(data.test_mask.nonzero()[:, 0], graph.test_idx)


def test_dataset_moves_as_a_whole(device: torch.device, graph: NodeDataset) -> None:
    moved = graph.to(device)

    assert moved.edge_index.device.type == moved.x.device.type == moved.test_idx.device.type == device.type
    assert all(same(moved.to("cpu"), graph))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"preset": "cora"}, ArgumentError, "preset must be one of products, reddit, papers100M, got 'cora'"),
        ({"scale": 0}, ArgumentError, "scale must be a finite number above 0, got 0"),
        ({"scale": "1"}, ArgumentTypeError, "scale must be a number, got '1'"),
        ({"num_nodes": 0}, ArgumentError, "num_nodes must be at least 1, got 0"),
        ({"num_nodes": 2.0}, ArgumentTypeError, "num_nodes must be an integer, got 2.0"),
        (
            {"num_nodes": 2**31, "index_dtype": torch.int32},
            ArgumentError,
            "index_dtype must hold ids below 2147483648",
        ),
        ({"num_edges": 3}, ArgumentError, "num_edges must be even in an undirected graph, got 3"),
        ({"num_features": 0}, ArgumentError, "num_features must be at least 1, got 0"),
        ({"num_classes": -1}, ArgumentError, "num_classes must be at least 1, got -1"),
        ({"seed": -1}, ArgumentError, "seed must be at least 0, got -1"),
        ({"homophily": 1.5}, ArgumentError, "homophily must lie between 0 and 1, got 1.5"),
        (
            {"feature_signal": float("nan")},
            ArgumentError,
            "feature_signal must be a finite number of at least 0, got nan",
        ),
        ({"dtype": torch.int8}, ArgumentError, "dtype must be a floating-point dtype, got torch.int8"),
        (
            {"index_dtype": torch.int16},
            ArgumentError,
            "index_dtype must be torch.int32 or torch.int64, got torch.int16",
        ),
        ({"device": "gpu"}, ArgumentError, "device must name a torch device, got 'gpu'"),
        ({"device": "meta"}, ArgumentError, "device must be a CPU or a CUDA device, got 'meta'"),
        ({"device": 0.5}, ArgumentTypeError, "device must be a torch.device, a name or a GPU index, got 0.5"),
        ({"device": "cuda:99"}, DeviceError, "device='cuda:99' asks for"),
    ],
)
def test_argument_outside_its_rule_is_named(
    arguments: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error) as raised:
        synthetic_graph(**({"scale": 0.001} | arguments))

    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("out", "y", "message"),
    [
        (
            torch.empty(3, 2),
            torch.zeros(2).long(),
            r"out must be \[N, F\] and y \[N\], got \[3, 2\] and \[2\]",
        ),
        (torch.empty(2, 2), torch.zeros(2).int(), "y must be int64, got torch.int32"),
        (torch.empty(2, 2), [0, 1], "y must be a tensor, got list"),
        (torch.empty(2, 2), torch.tensor([0, 4]), r"y must lie in \[0, 4\), got 0 to 4"),
        (
            torch.empty(2, 2).int(),
            torch.zeros(2).long(),
            r"out.dtype must be a floating-point dtype, got torch.int32",
        ),
    ],
)
def test_features_refuse_tensors_that_do_not_fit(out: Tensor, y: Tensor, message: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        fill_features(out, y, seed=0, num_classes=4, feature_signal=1.0)

"""Arguments of loaders over a `HeteroData`: bad ones are named, and sizes that it does not tell are found."""

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NumNeighbors

from pyg_direct import LinkNeighborLoader, NeighborLoader
from pyg_direct.errors import ArgumentError, ArgumentTypeError, LoaderWarning
from tests.hetero_data import make_hetero


@pytest.mark.parametrize("index", [[40], [-1]])
def test_bad_positions_are_named(real_device, index):
    loader = NeighborLoader(make_hetero(), [2], "paper", device=real_device)

    with pytest.raises(ArgumentError, match=r"index must lie in \[0, 40\)"):
        loader(index)


def test_workers_are_absorbed_with_one_word():
    with pytest.warns(LoaderWarning, match="^num_workers=2: not needed") as caught:
        NeighborLoader(make_hetero(), [2], "paper", num_workers=2, device="cpu")

    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"input_nodes": None}, ArgumentTypeError, "input_nodes must be a node type or .* got None"),
        ({"input_nodes": [1, 2]}, ArgumentTypeError, "input_nodes must be a node type"),
        ({"input_nodes": "paper_"}, ArgumentError, "input_nodes must name a known node type, got 'paper_'"),
        ({"input_nodes": ("paper", [40])}, ArgumentError, r"input_nodes must lie in \[0, 40\), got 40"),
        ({"input_nodes": ("paper", torch.ones(39).bool())}, ArgumentError, r"shape \[40\] as a mask, got \[39\]"),
        ({"num_neighbors": {("paper", "cites", "paper"): [1]}}, ArgumentError, "got none for .'author'"),
        ({"num_neighbors": {("paper", "eats", "paper"): [1]}}, ArgumentError, "got .*'eats', 'paper'.: it has .'"),
        ({"num_neighbors": NumNeighbors({("paper", "cites", "paper"): [1]}, [1, 2])}, ArgumentError,
         "num_neighbors: the number of hops must be the same across all .*1 for .'paper', 'cites', 'paper'."),
        ({"num_neighbors": [1.5]}, ArgumentTypeError, "num_neighbors must hold integers"),
        ({"time_attr": "when"}, ArgumentError, "time_attr must name an attribute of nodes or edges, got 'when'"),
        ({"weight_attr": "w"}, ArgumentError, "weight_attr must name an attribute of edges, got 'w'"),
        ({"sampling": "poisson"}, ArgumentError, "sampling must be one of uniform, labor, got 'poisson'"),
        ({"subgraph_type": "whole"}, ArgumentError, "subgraph_type must be one of directional"),
        ({"temporal_strategy": "first"}, ArgumentError, "temporal_strategy must be one of uniform, last"),
        ({"placement": "cuda"}, ArgumentError, "placement must be one that device=cpu can read"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(options, error, words):
    arguments = {"data": make_hetero(), "num_neighbors": [2], "input_nodes": "paper", "device": "cpu", **options}

    with pytest.raises(error, match=words):
        NeighborLoader(**arguments)


def test_times_of_nodes_and_edges_are_not_mixed():
    data = make_hetero()
    data["paper"].when, data["author", "writes", "paper"].when = torch.zeros(40).long(), torch.zeros(5).long()

    with pytest.raises(ArgumentError, match="time_attr must name times of nodes or of edges, 'when' names both"):
        NeighborLoader(data, [2], "paper", time_attr="when", device="cpu")


def make_unsized():
    """Papers of unknown number, the highest met being 6."""
    data = HeteroData()
    data["author"].x = torch.zeros(3, 2)
    data["paper"].name = "nothing"
    data["author", "paper"].edge_index = torch.tensor([[0, 1, 2], [4, 6, 6]])
    data["paper", "author"].edge_index = torch.tensor([[5], [0]])
    return data


@pytest.mark.filterwarnings("ignore:Unable to accurately infer")
def test_a_type_of_unknown_size_has_the_nodes_that_edges_meet():
    loader = NeighborLoader(make_unsized(), [-1], ("paper", torch.tensor([6, 0])), batch_size=2, device="cpu")

    (batch,) = loader

    assert batch["paper"].n_id.tolist() == [6, 0]
    assert batch["author"].n_id.tolist() == [1, 2]
    assert loader.node_sampler.num_nodes == {"author": 3, "paper": 7}


@pytest.mark.filterwarnings("ignore:Unable to accurately infer")
def test_a_type_of_unknown_size_is_named_where_all_are_meant():
    with pytest.raises(ArgumentError, match=r"data must know the number of 'paper' nodes .*data\['paper'\].num_nodes"):
        NeighborLoader(make_unsized(), [2], "paper", device="cpu")


@pytest.mark.parametrize(("name", "values", "words"), [
    ("time_attr", torch.rand(40), "^time_attr='mine' of 'paper' must hold integers, got torch.float32"),
    ("time_attr", torch.arange(39), r"^time_attr='mine' of 'paper' must have shape \(40,\), got \(39,\)"),
    ("weight_attr", torch.full((1,), -2.0), r"^weight_attr='mine' of \('paper', 'cites', 'paper'\) must be finite and"),
])  # fmt: skip
def test_times_and_weights_are_called_what_the_user_calls_them(name, values, words):
    data = make_hetero()
    store = data["paper" if name == "time_attr" else ("paper", "cites", "paper")]
    store.mine = values if name == "time_attr" else values.expand(store.num_edges)

    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        next(iter(NeighborLoader(data, [2], ("paper", torch.arange(2)), device="cpu", **{name: "mine"},
                                 input_time=torch.arange(2) if name == "time_attr" else None)))  # fmt: skip


def test_times_of_a_graph_without_types_are_called_so_too():
    data = Data(num_nodes=3, edge_index=torch.tensor([[0, 1], [1, 2]]), mine=torch.rand(3))

    with pytest.raises(ArgumentTypeError, match=r"^time_attr='mine' must hold integers"):
        next(iter(NeighborLoader(data, [2], input_time=torch.arange(3), time_attr="mine", device="cpu")))


SEVERAL = r"input_nodes must be one node type or one \(node type, nodes\), got \['paper', 'author'\]: make .*zip"
CITES, WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")
RELATIONS = (
    r"edge_label_index must be one relation or one \(relation, links\), got \[\('paper', .* 'paper'\)\]: make .*zip"
)
LINKS = torch.tensor([[0, 1], [1, 2]])


@pytest.mark.parametrize("in_stores", [False, True])
@pytest.mark.parametrize(
    ("input_nodes", "words"),
    [
        (["paper", "author"], SEVERAL),
        (("paper", "author"), SEVERAL),
        ([("paper", [1]), ("author", [1])], SEVERAL),
        ({"paper": [1], "author": None}, SEVERAL),
        (["paper"], r"got \['paper'\]: give 'paper' or \('paper', nodes\)"),
        (torch.arange(3), r"input_nodes must be a node type or .* got Tensor: name the type that they are of"),
        (("paper", ["a"]), r"input_nodes of 'paper' must be ids or a mask, got \['a'\]"),
        (("paper", torch.zeros(2)), r"input_nodes must have dtype int64 or int32, got torch.float32: give its .long"),
    ],
)
def test_seeds_of_several_types_or_of_none_are_named(in_stores, input_nodes, words):
    data = make_hetero()
    graph = (data, data) if in_stores else data

    with pytest.raises(ArgumentTypeError, match=words):
        NeighborLoader(graph, [2], input_nodes, device="cpu")


@pytest.mark.parametrize("in_stores", [False, True])
@pytest.mark.parametrize(
    ("links", "words"),
    [
        ([CITES, WRITES], RELATIONS),
        ((CITES, WRITES), RELATIONS),
        ([(CITES, LINKS), (WRITES, LINKS)], RELATIONS),
        ({CITES: LINKS, WRITES: None}, RELATIONS),
        ([(CITES, LINKS)], r"got \[\('paper', 'cites', 'paper'\)\]: give \('paper', 'cites', 'paper'\) or"),
        (LINKS.tolist(), r"edge_label_index must name a relation, got \[0, 1\]: give \(\(source type, name"),
        (("paper", LINKS), "edge_label_index must name a relation, got 'paper': give"),
        ("cites", r"must be a relation or \(relation, links\) .* got 'cites': name the relation as"),
        ((CITES, "all"), r"edge_label_index must be links \[2, L\] or None, got 'all'"),
    ],
)
def test_links_of_several_relations_or_of_none_are_named(in_stores, links, words):
    data = make_hetero()
    graph = (data, data) if in_stores else data

    with pytest.raises(ArgumentTypeError, match=words):
        LinkNeighborLoader(graph, [2], links, device="cpu")


def test_a_relation_as_seeds_and_a_mask_of_another_type_are_named():
    with pytest.raises(ArgumentTypeError, match=r"got the relation \('paper', .*: LinkNeighborLoader samples around"):
        NeighborLoader(make_hetero(), [2], CITES, device="cpu")
    with pytest.raises(ArgumentError, match=r"input_nodes of 'author' must have shape \[\d+\] as a mask, got \[40\]"):
        NeighborLoader(make_hetero(), [2], ("author", torch.ones(40, dtype=torch.bool)), device="cpu")


@pytest.mark.parametrize("links", [[], [[], []], torch.empty(2, 0)])
def test_no_links_are_an_empty_epoch(links):
    assert list(LinkNeighborLoader(make_hetero(), [2], (CITES, links), device="cpu")) == []

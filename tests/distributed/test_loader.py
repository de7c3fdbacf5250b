"""Loaders of a graph in parts, in several processes, give the batches of one machine, bit for bit."""

import pytest
import torch

from pyg_direct import LinkNeighborLoader, NeighborLoader
from pyg_direct.distributed.loader import DistLinkNeighborLoader, DistNeighborLoader, DistSubGraphLoader
from pyg_direct.distributed.part import GraphPart
from pyg_direct.distributed.partition import partition_graph
from pyg_direct.errors import ArgumentError
from tests.distributed.ranks import as_dict, assert_equal, make_data, open_graph, write_data
from tests.hetero_data import make_hetero
from tests.hetero_graphs import make_parts
from tests.processes import run_ranks

NODE_CASES = {
    "plain": {},
    "replace": {"replace": True},
    "disjoint": {"disjoint": True},
    "weights": {"weight_attr": "weight"},
    "times": {"time_attr": "time"},
    "last times": {"time_attr": "time", "temporal_strategy": "last", "time_window": 20},
    "induced": {"subgraph_type": "induced"},
}
LINK_CASES = {
    "links": {},
    "binary": {"neg_sampling": "binary"},
    "triplet": {"neg_sampling": "triplet"},
    "timed links": {"neg_sampling": "binary", "time_attr": "time", "edge_label_time": torch.arange(90) % 50},
    "strict": {"neg_sampling": "binary", "strict_negatives": True, "exclude_target_edges": "reverse"},
    "excluded": {"exclude_target_edges": True},
}
COMMON = {"batch_size": 16, "shuffle": True, "seed": 3}


def make_loader(name, source, make_nodes, make_links):
    seeds = torch.arange(0, 300, 3)
    if name in NODE_CASES:
        return make_nodes(source, [4, -1, 2], seeds, **NODE_CASES[name], **COMMON)
    links = make_data().edge_index[:, :90]
    return make_links(source, [4, 3], links, **LINK_CASES[name], **COMMON)


def run_cases(rank, folders, cases, options):
    found = {}
    for folder, names in zip(folders, cases, strict=True):
        graph = open_graph(folder, **options)
        for name in names:
            loader = make_loader(name, graph, DistNeighborLoader, DistLinkNeighborLoader)
            loader.record()
            found[name] = [[as_dict(batch) for batch in loader] for _ in range(2)]
            report = loader.report()
            assert report.num_timed == len(report.seconds("fetch")) == sum(map(len, found[name]))
            assert report.features["x"].num_read > 0
            assert "rows of other parts: 0 fetched" not in str(report)
        graph.close()
    return found


@pytest.mark.parametrize(("count", "options", "only"), [
    (2, {}, None), (3, {"replicas": "30%"}, ["plain", "times", "binary"])
])  # fmt: skip
def test_batches_are_those_of_one_machine(tmp_path, count, options, only):
    data = make_data()
    write_data(tmp_path / "p", data, count)
    write_data(tmp_path / "timed", data, count, times=True, weights=True)
    is_timed = {name: "time" in name or "weight" in name for name in only or {**NODE_CASES, **LINK_CASES}}
    cases = [[name for name, timed in is_timed.items() if not timed], [n for n, timed in is_timed.items() if timed]]

    ranks = run_ranks(run_cases, count, [tmp_path / "p", tmp_path / "timed"], cases, options)

    for name in is_timed:
        alone = make_loader(name, data, NeighborLoader, LinkNeighborLoader)
        for epoch in range(2):
            expected = [as_dict(batch) for batch in alone]
            own = [found[name][epoch] for found in ranks]
            assert sum(map(len, own)) == len(expected)
            for number, batch in enumerate(expected):
                assert_equal(own[number % count][number // count], batch)


def run_hetero(rank, folder):
    found = []
    for share_rows in (False, True):
        with open_graph(folder, share_rows=share_rows) as graph:
            fanouts = {kind: [3, 2] for kind in graph.edge_types}
            nodes = DistNeighborLoader(graph, fanouts, ("paper", torch.arange(40)), batch_size=7, seed=1)
            ends = ("author", "writes", "paper"), torch.arange(20).repeat(2, 1)
            links = DistLinkNeighborLoader(graph, fanouts, ends, neg_sampling="triplet", strict_negatives=True,
                                           exclude_target_edges="reverse", batch_size=6, seed=1)  # fmt: skip
            found.append([[as_dict(batch) for batch in loader] for loader in (nodes, links)])
    return found


def test_batches_of_graphs_with_types(tmp_path):
    data = make_hetero(make_parts())
    edges = {kind: data[kind].edge_index for kind in data.edge_types}
    rows = {kind: {"x": data[kind].x} for kind in data.node_types if "x" in data[kind]}
    attr = {kind: {"edge_attr": data[kind].edge_attr} for kind in data.edge_types}
    partition_graph(tmp_path / "p", edges, 2, num_nodes={kind: data[kind].num_nodes for kind in data.node_types},
                    node_rows=rows, edge_rows=attr)  # fmt: skip

    ranks = run_ranks(run_hetero, 2, tmp_path / "p")

    fanouts = {kind: [3, 2] for kind in data.edge_types}
    nodes = NeighborLoader(data, fanouts, ("paper", torch.arange(40)), batch_size=7, seed=1)
    links = LinkNeighborLoader(data, fanouts, (("author", "writes", "paper"), torch.arange(20).repeat(2, 1)),
                               neg_sampling="triplet", strict_negatives=True, exclude_target_edges="reverse",
                               batch_size=6, seed=1)  # fmt: skip
    for place, loader in enumerate((nodes, links)):
        for number, batch in enumerate(loader):
            expected = {k: v for k, v in as_dict(batch).items() if k[1] != "num_nodes"}
            unknown = [k for k in as_dict(batch) if k[1] == "num_nodes"]
            for found in ranks[number % 2]:
                assert_equal(found[place][number // 2], expected,
                             drop=unknown + [(kind, "num_nodes") for kind in data.node_types])  # fmt: skip


def run_uneven(rank, folder):
    graph = open_graph(folder)
    # Different numbers of batches, none at all, and one who stops early.
    seeds = torch.arange(rank * 30)
    own = DistNeighborLoader(graph, [3, 2], seeds, batch_size=10, ranks="own", seed=1)
    counts = [len(list(own)), len(list(own))]
    every = DistNeighborLoader(graph, [3], batch_size=10, seed=1)
    for number, _ in enumerate(every):
        if number == 2 and rank == 1:
            break
    counts.append(number)
    # What comes after is in step again.
    last = DistSubGraphLoader(graph, [2], torch.arange(20), batch_size=20, seed=2)
    counts.append([batch.n_id.tolist() for batch in last])
    graph.close()
    return counts


def test_uneven_ranks_never_wait_for_each_other(tmp_path):
    write_data(tmp_path / "p", make_data(), 3)

    ranks = run_ranks(run_uneven, 3, tmp_path / "p")

    assert [found[:2] for found in ranks] == [[0, 0], [3, 3], [6, 6]]
    assert [found[2] for found in ranks] == [9, 2, 9]
    assert [len(found[3]) for found in ranks] == [1, 0, 0]


def test_a_part_holds_no_more_than_its_share(tmp_path):
    data, sizes = make_data(4000, 40_000), {}
    for count in (1, 2):
        write_data(tmp_path / str(count), data, count)
        parts = [GraphPart(tmp_path / str(count), part, device=torch.device("cpu")) for part in range(count)]
        for part in parts:
            part.place()
        sizes[count] = [part.num_bytes for part in parts]

    assert max(sizes[2]) <= 0.6 * sizes[1][0]


def run_errors(rank, folder):
    graph = open_graph(folder)
    found = []
    for arguments in ({"ranks": 3}, {"num_workers": 2}, {"time_attr": "time"}, {"weight_attr": "w"}, {"num": 1}):
        try:
            DistNeighborLoader(graph, [3], **arguments)
        except (ArgumentError, TypeError) as error:
            found.append(str(error))
    for links, options in ((None, {}), (torch.zeros(2, 1).long(), {"exclude_target_edges": "both"})):
        try:
            DistLinkNeighborLoader(graph, [3], links, **options)
        except ArgumentError as error:
            found.append(str(error))
    for path, options in ((folder, {"silence": 0}), (folder.parent / "three", {})):
        try:
            open_graph(path, **options)
        except ArgumentError as error:
            found.append(str(error))
    return found


def test_errors_name_the_argument(tmp_path):
    write_data(tmp_path / "p", make_data(), 2)
    write_data(tmp_path / "three", make_data(), 3)

    found, _ = run_ranks(run_errors, 2, tmp_path / "p")

    words = ["ranks must be", "num_workers must be 0", "time_attr must be None", "weight_attr must be None", "num",
             "edge_label_index must hold links", "exclude_target_edges must be",
             "silence must be above 0", "folder must hold a part for each of the 2 processes"]  # fmt: skip
    assert len(found) == len(words)
    for text, word in zip(found, words, strict=True):
        assert word in text

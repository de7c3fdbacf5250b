"""Batches of a captured exchange that overlap are those of one machine, with and without PyG's form between."""

import pytest
import torch

from pyg_direct import LinkNeighborLoader, NeighborLoader
from pyg_direct.distributed import dist_loader
from pyg_direct.distributed.dist_graph import DistGraph
from pyg_direct.distributed.dist_loader import DistLinkNeighborLoader, DistNeighborLoader, _DistLoader
from pyg_direct.distributed.partitioning.partition_graph import partition_graph
from tests.distributed.ranks import as_dict, assert_equal, make_data, write_data

OPTIONS = {"batch_size": 4, "shuffle": True, "seed": 3, "prefetch": 2}
# Threads would share the scratch of one simulated GPU.
ALONE = {**OPTIONS, "prefetch": 0, "device": "cpu"}


class OneRank:
    """A `Transport` of the only rank, which exchanges with itself."""

    is_captured = False

    def __init__(self, beside=None):
        self.beside = beside

    def exchange(self, to_send, received, stream):
        received.copy_(to_send)

    def exchange_with_others(self, to_send, received, stream):
        assert to_send.numel() == 0

    def hold(self, plan):
        pass


class Exchanging(DistGraph):
    """A graph whose only process exchanges with itself, in segments."""

    def _find_obstacle(self, *_):
        self.communicator.captured, transport = True, OneRank(OneRank())
        self.communicator.open_segments = lambda: transport
        return "it is tested"


@pytest.mark.sim
@pytest.mark.parametrize("options", [{}, {"replace": True, "input_id": torch.arange(100, 112)}], ids=["", "replace"])
def test_plain_batches_are_those_of_one_process(tmp_path, group, monkeypatch, options):
    monkeypatch.setattr(_DistLoader, "_overlaps", lambda loader: True)
    data = make_data(40, 90)
    del data.edge_attr, data.weight
    rows = {name: data[name] for name in ("x", "y", "train_mask", "time")}
    partition_graph(tmp_path / "p", data.edge_index, 1, num_nodes=40, node_rows=rows)

    with Exchanging(tmp_path / "p", device="cpu") as graph:
        loader = DistNeighborLoader(graph, [2, 2], torch.arange(12), **OPTIONS, **options)
        found = list(loader)
        assert loader._find_plain() is not None

    alone = NeighborLoader(data, [2, 2], torch.arange(12), **ALONE, **options)
    for batch, other in zip(found, alone, strict=True):
        assert_equal(as_dict(batch), as_dict(other))


@pytest.mark.sim
def test_batches_with_rows_of_edges_are_not_plain(tmp_path, group, monkeypatch):
    monkeypatch.setattr(_DistLoader, "_overlaps", lambda loader: True)
    data = make_data(40, 90)
    write_data(tmp_path / "p", data, 1)

    with Exchanging(tmp_path / "p", device="cpu") as graph:
        loader = DistNeighborLoader(graph, [2], torch.arange(8), **OPTIONS)
        found = list(loader)
        assert loader._find_plain() is None

    for batch, other in zip(found, NeighborLoader(data, [2], torch.arange(8), **ALONE), strict=True):
        assert_equal(as_dict(batch), as_dict(other))


@pytest.mark.sim
@pytest.mark.parametrize("options", [
    {"subgraph_type": "induced"}, {"time_attr": "time"}, {"time_attr": "time", "input_time": torch.arange(12) + 20},
    {"time_attr": "time", "input_start_time": torch.arange(12), "input_end_time": torch.arange(12) + 30},
], ids=["induced", "times of nodes", "given times", "windows"])  # fmt: skip
def test_batches_of_every_kind_overlap(tmp_path, group, monkeypatch, options):
    monkeypatch.setattr(_DistLoader, "_overlaps", lambda loader: True)
    # Times come in several requests.
    monkeypatch.setattr(dist_loader, "_TIMES_AT_ONCE", 5)
    data = make_data(40, 90)
    write_data(tmp_path / "p", data, 1, times=True)

    with Exchanging(tmp_path / "p", device="cpu") as graph:
        loader = DistNeighborLoader(graph, [2, 2], torch.arange(12), **OPTIONS, **options)
        found = list(loader)
        assert loader._is_grouped

    alone = NeighborLoader(data, [2, 2], torch.arange(12), **ALONE, **options)
    for batch, other in zip(found, alone, strict=True):
        assert_equal(as_dict(batch), as_dict(other))


@pytest.mark.sim
@pytest.mark.parametrize("options", [
    {"neg_sampling": "binary", "replace": True}, {"neg_sampling": "triplet", "disjoint": True},
    {"neg_sampling": "binary", "time_attr": "time", "edge_label_time": torch.arange(12) + 20},
    {"neg_sampling": "binary", "exclude_target_edges": "reverse"},
], ids=["binary", "triplet", "times", "excluded"])  # fmt: skip
def test_links_with_negatives_overlap(tmp_path, group, monkeypatch, options):
    monkeypatch.setattr(_DistLoader, "_overlaps", lambda loader: True)
    data = make_data(40, 90)
    write_data(tmp_path / "p", data, 1, times=True)

    with Exchanging(tmp_path / "p", device="cpu") as graph:
        loader = DistLinkNeighborLoader(graph, [2, 2], data.edge_index[:, :12], **OPTIONS, **options)
        found = list(loader)
        assert loader._is_grouped

    alone = LinkNeighborLoader(data, [2, 2], data.edge_index[:, :12], **ALONE, **options)
    for batch, other in zip(found, alone, strict=True):
        assert_equal(as_dict(batch), as_dict(other))


@pytest.mark.sim
@pytest.mark.parametrize("options", [{}, {"weight_attr": "weight", "neg_sampling": "binary"}], ids=["", "weights"])
def test_links_leave_their_edges_out_of_captured_hops(tmp_path, group, options):
    data = make_data(40, 90)
    write_data(tmp_path / "p", data, 1, weights=True)
    own = {**OPTIONS, **options, "exclude_target_edges": True}
    links = data.edge_index[:, :10]

    with Exchanging(tmp_path / "p", device="cpu") as graph:
        loader = DistLinkNeighborLoader(graph, [2, 2], links, **own)
        found = list(loader)
        assert loader._sampler.open_plan()._captured_plans

    for batch, other in zip(found, LinkNeighborLoader(data, [2, 2], links, **{**own, **ALONE}), strict=True):
        assert_equal(as_dict(batch), as_dict(other))

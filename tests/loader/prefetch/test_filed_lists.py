"""Neighbor lists in files, read hop by hop for many batches together."""

import os
import pickle
import threading

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.sampler import EdgeSamplerInput, NodeSamplerInput

from pyg_direct import (
    CSRTopo,
    Feature,
    FeatureStore,
    GraphStore,
    LinkNeighborLoader,
    NeighborLoader,
    save_rows,
)
from pyg_direct.errors import ArgumentError, FileError, IdError
from pyg_direct.features import range_reader
from pyg_direct.features.row_files import RowFile
from pyg_direct.sampler import NeighborSampler

NODES = 2000


def make_graph():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(NODES, (2, 40_000), generator=generator), torch.randn(NODES, 9, generator=generator)


EDGES, X = make_graph()
TOPOLOGY = CSRTopo(EDGES, num_nodes=NODES)


@pytest.fixture
def paths(tmp_path, monkeypatch):
    # Files that were just written are cached.
    monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: False)
    return {name: save_rows(tmp_path / f"{name}.npy", getattr(TOPOLOGY, name)) for name in ("indptr", "indices", "eid")}


@pytest.fixture
def device(real_device):
    """CPU and GPU: threads launch kernels at once here, which the simulator cannot."""
    return real_device


def open_lists(paths, **options):
    return CSRTopo.from_file(**paths, **{"host_cache_size": "20%", **options})


def open_loader(topology, device, ahead=None, kind=NeighborLoader, rows=X, **options):
    store = FeatureStore(device=device)
    store[None, "x", None] = rows.clone() if isinstance(rows, torch.Tensor) else rows
    seeds = {"input_nodes": torch.arange(0, NODES, 4)}
    if kind is LinkNeighborLoader:
        seeds = {"edge_label_index": (None, EDGES[:, :700]), "neg_sampling": "binary"}
    return kind((store, GraphStore(topology)), [5, 3], device=device, ahead=ahead,
                **{"batch_size": 32, "shuffle": True, "seed": 3, **seeds, **options})  # fmt: skip


def look(batches):
    """All tensors of batches."""
    return [[{key: value.cpu().numpy().tobytes() for key, value in part.items() if isinstance(value, torch.Tensor)}
             for part in batch.stores] for batch in batches]  # fmt: skip


def test_lists_in_files_are_not_read_whole_for_labor(paths, device):
    with pytest.raises(ArgumentError, match=r"sampling must be 'uniform' for neighbor lists in a file .*indices.npy"):
        open_loader(open_lists(paths), device, sampling="labor")


@pytest.mark.parametrize("kind", [NeighborLoader, LinkNeighborLoader])
@pytest.mark.parametrize(("ahead", "prefetch"), [(None, 2), (0, 1), (1, 2), (5, 0), (1000, 2), ("100K", 2)])
def test_batches_equal_those_of_lists_in_memory(paths, device, kind, ahead, prefetch):
    expected = open_loader(TOPOLOGY, device, 0, kind)
    loader = open_loader(open_lists(paths), device, ahead, kind, prefetch=prefetch)

    for _ in range(2):
        assert look(loader) == look(expected)
    reads = loader.tell().disk
    assert [own.path for own in reads] == [str(paths["indices"]), str(paths["eid"])]
    assert all(own.num_pages > 0 and own.num_saved > 0 for own in reads)


@pytest.mark.parametrize("options", [
    {"replace": True}, {"disjoint": True}, {"subgraph_type": "induced"}, {"subgraph_type": "bidirectional"},
    {"transform": lambda batch: batch}, {"super_batch": 4}, {"filter_per_worker": True}, {"batch_size": 7},
], ids=lambda options: next(iter(options)))  # fmt: skip
def test_other_options_keep_their_batches(paths, device, options):
    ahead = 0 if "super_batch" in options else None
    loaders = [open_loader(topology, device, ahead, **options) for topology in (open_lists(paths), TOPOLOGY)]

    assert look(loaders[0]) == look(loaders[1])


def test_links_are_left_out_of_their_batches(paths, device):
    loaders = [open_loader(topology, device, kind=LinkNeighborLoader, exclude_target_edges=True)
               for topology in (open_lists(paths), TOPOLOGY)]  # fmt: skip

    assert look(loaders[0]) == look(loaders[1])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_lists_of_any_file_and_dtype(tmp_path, device, monkeypatch, dtype, kind):
    monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: False)
    paths = {name: save_rows(tmp_path / f"{name}.{kind}", getattr(TOPOLOGY, name).to(torch.int64 if name == "indptr"
                                                                                     else dtype))
             for name in ("indptr", "indices", "eid")}  # fmt: skip

    assert look(open_loader(open_lists(paths), device)) == look(open_loader(TOPOLOGY, device))


def test_rows_and_lists_in_files_are_planned_together(paths, tmp_path, device):
    rows = Feature(device=device).from_file(save_rows(tmp_path / "x.npy", X))
    loader = open_loader(open_lists(paths), device, 6, rows=rows)

    assert look(loader) == look(open_loader(TOPOLOGY, device, 0))
    assert len(loader.tell().disk) == 3


def test_batches_that_read_together_read_fewer_pages(paths, device):
    pages = []
    for ahead in (0, 8):
        # Memory for one page.
        loader = open_loader(open_lists(paths, host_cache_size="1B"), device, ahead)
        look(loader)
        pages.append(loader.tell().disk[0].num_pages)

    assert pages[1] < pages[0] / 2


@pytest.mark.parametrize(("count", "is_direct"), [(1, True), (2, False)])
def test_processes_of_a_host_read_lists_through_its_page_cache(paths, device, monkeypatch, count, is_direct):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    seen, open_handle = set(), RowFile.open_handle
    monkeypatch.setattr(RowFile, "open_handle", lambda file, *, is_direct: (
        seen.add(is_direct), open_handle(file, is_direct=is_direct))[1])  # fmt: skip
    lists = open_lists(paths, host_cache_size=None)

    look(open_loader(lists, device, ranks=(0, count)))

    assert seen == {is_direct}
    assert lists.lists.indices.num_processes == count


def test_cached_files_are_not_planned(paths, device, monkeypatch):
    monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: True)
    loader = open_loader(open_lists(paths), device)

    assert loader._prepare() is not None
    assert loader._open_foresight(None, iter(())) is None
    assert look(loader) == look(open_loader(TOPOLOGY, device))


def test_an_epoch_is_resumed_inside_a_window(paths, device):
    whole = look(open_loader(TOPOLOGY, device))
    loader = open_loader(open_lists(paths), device, 5)
    batches = iter(loader)
    begun = [next(batches) for _ in range(7)]
    state = loader.state_dict()
    batches.close()
    resumed = open_loader(open_lists(paths), device, 6)
    resumed.load_state_dict(state)

    assert look(begun) + look(resumed) == whole


def test_a_loop_that_is_left_early_leaves_the_next_one_whole(paths, device):
    before = threading.enumerate()
    loader, expected = open_loader(open_lists(paths), device, 5), open_loader(TOPOLOGY, device)
    look(expected)
    batches = iter(loader)
    next(batches)
    batches.close()

    assert look(loader) == look(expected)
    begun = [thread for thread in threading.enumerate() if thread not in before]
    assert not [thread for thread in begun if thread.name.startswith("pyg_direct_ahead")]


def test_several_loaders_read_one_topology(paths, device):
    topology, expected = open_lists(paths), look(open_loader(TOPOLOGY, device))
    pairs = [*zip(open_loader(topology, device, 3), open_loader(topology, device, 5), strict=True)]

    assert [look([batch for batch, _ in pairs]), look([batch for _, batch in pairs])] == [expected, expected]


def test_a_pickled_loader_opens_the_files_itself(paths, device):
    loader = open_loader(open_lists(paths), device)

    assert look(pickle.loads(pickle.dumps(loader))) == look(open_loader(TOPOLOGY, device))


def test_samplers_alone_read_lists_in_files(paths, device):
    stores = FeatureStore(device=device), GraphStore(open_lists(paths))
    in_memory = FeatureStore(device=device), GraphStore(TOPOLOGY)
    samplers = [NeighborSampler(data, [4, 3], device=device, seed=1) for data in (stores, in_memory)]

    outs = [sampler.sample_from_nodes(NodeSamplerInput(None, torch.arange(40))) for sampler in samplers]
    links = [sampler.sample_from_edges(EdgeSamplerInput(None, EDGES[0, :30], EDGES[1, :30]), "triplet")
             for sampler in samplers]  # fmt: skip

    for own, expected in (outs, links):
        assert own.node.device.type == device.type
        for name in ("node", "row", "col", "edge"):
            assert torch.equal(getattr(own, name), getattr(expected, name))
        assert all(torch.equal(first, second) for first, second in zip(own.metadata, expected.metadata, strict=True)
                   if isinstance(first, torch.Tensor))  # fmt: skip


def test_batches_own_their_memory(paths, device):
    batch = next(iter(open_loader(open_lists(paths), device, 8)))

    for name in ("n_id", "e_id", "edge_index"):
        assert batch[name].untyped_storage().nbytes() == batch[name].nbytes


def test_a_neighbor_that_is_no_node_is_an_error_of_its_batch(paths, device):
    numbers = np.load(paths["indices"])
    numbers[:] = NODES
    np.save(paths["indices"], numbers)

    with pytest.raises(IdError, match=rf"neighbors in the file must lie in \[0, {NODES}\), got {NODES}"):
        next(iter(open_loader(open_lists(paths), device)))


@pytest.mark.parametrize("change", ["touched", "cut short", "taken away"])
def test_a_file_that_changes_is_an_error(paths, device, change):
    batches = iter(open_loader(open_lists(paths, host_cache_size="1B"), device, 3))
    next(batches)
    path = paths["indices"]
    if change == "touched":
        os.utime(path, ns=(0, 0))
    elif change == "cut short":
        os.truncate(path, 1000)
    else:
        path.unlink()

    with pytest.raises(FileError, match=r"indices\.npy (was taken away|changed) "):
        look(batches)


def test_a_disk_that_hangs_is_an_error_of_the_batch(paths, device, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(range_reader, "read_file_ranges_cpu", lambda *args: go_on.wait() and 0)
    monkeypatch.setattr(range_reader, "_LEAVE", 0.1)
    monkeypatch.setenv("PYG_DIRECT_DISK_TIMEOUT", "0.3")
    try:
        with pytest.raises(FileError, match=r"indices\.npy gave no bytes for 0\.3 seconds, at byte \d+"):
            next(iter(open_loader(open_lists(paths), device, 4)))
    finally:
        go_on.set()


def test_times_need_lists_in_memory(paths, device):
    store = FeatureStore(device=device)
    store[None, "time", None] = torch.arange(NODES)

    with pytest.raises(ArgumentError, match="must be None where neighbor lists lie in a file"):
        NeighborLoader((store, GraphStore(open_lists(paths))), [3], torch.arange(9), time_attr="time", device=device)


@pytest.mark.parametrize("placement", ["pinned", "unified"])
def test_lists_in_files_are_placed_nowhere_else(paths, placement):
    from pyg_direct.graph.hetero_topo import HeteroTopo

    with pytest.raises(ArgumentError, match="placement must be one of"):
        HeteroTopo(NODES, open_lists(paths)).place(placement)


def test_options_that_need_all_edges_are_refused(paths, device):
    with pytest.raises(ArgumentError, match="this option needs all edges in memory"):
        next(iter(open_loader(open_lists(paths), device, kind=LinkNeighborLoader, strict_negatives=True)))


def test_data_graphs_are_not_affected(device):
    data = Data(x=X, edge_index=EDGES)

    assert NeighborLoader(data, [2], torch.arange(9), device=device).tell().disk == []

"""Topologies whose neighbor lists stay in files."""

import multiprocessing
import pickle

import numpy as np
import pytest
import torch

from pyg_direct import CSRTopo, save_rows
from pyg_direct.errors import ArgumentError, ArgumentTypeError, FileError
from pyg_direct.features.row_files import RowFile

NODES = 300


@pytest.fixture
def files(tmp_path):
    edges = torch.randint(NODES, (2, 4000), generator=torch.Generator().manual_seed(0))
    topology = CSRTopo(edges, num_nodes=NODES)
    return topology, {name: save_rows(tmp_path / f"{name}.npy", getattr(topology, name))
                      for name in ("indptr", "indices", "eid")}  # fmt: skip


def are_equal(first, second):
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in ("indptr", "indices", "eid"))


def test_arrays_are_maps_of_the_files(files):
    expected, paths = files

    topology = CSRTopo.from_file(**paths)

    assert are_equal(topology, expected)
    assert (topology.node_count, topology.edge_count, topology.listed) == (NODES, 4000, "in")
    assert repr(topology) == "CSRTopo(300 nodes, 4,000 edges, lists in indices.npy)"
    assert not topology.is_given


def test_positions_are_ids_without_a_file_of_them(files):
    topology = CSRTopo.from_file(files[1]["indptr"], files[1]["indices"], direction="out")

    assert topology.eid is None
    assert topology.lists.edge_ids is None
    assert topology.listed == "out"


def test_lists_are_not_read_as_they_are_opened(files, monkeypatch):
    path = files[1]["indices"]
    numbers = np.load(path)
    numbers[7] = NODES + 5
    np.save(path, numbers)

    topology = CSRTopo.from_file(**files[1])

    assert topology.lists.indices.take(np.array([7])).tolist() == [NODES + 5]


def test_caches_are_of_the_size_that_was_asked_for(files):
    topology = CSRTopo.from_file(**files[1], host_cache_size="50%")
    assert [array._wanted_bytes for array in topology.lists.arrays] == [8000, 8000]
    topology = CSRTopo.from_file(**files[1], host_cache_size="1G")
    assert [array._wanted_bytes for array in topology.lists.arrays] == [16_000, 16_000]


def test_lists_are_cached_if_all_files_are(files, monkeypatch):
    lists = CSRTopo.from_file(**files[1]).lists
    for cached in (True, False):
        monkeypatch.setattr(RowFile, "is_cached",
                            lambda file, rows, cached=cached: cached or file.path.name != "eid.npy")  # fmt: skip
        assert lists.is_cached() == cached


def test_a_pickle_names_the_files(files):
    topology = CSRTopo.from_file(**files[1], host_cache_size=8192)

    data = pickle.dumps(topology)

    assert len(data) < 1000
    assert are_equal(pickle.loads(data), topology)
    assert pickle.loads(data).lists.indices._wanted_bytes == 8192


def test_another_process_opens_the_files(files):
    topology, context = CSRTopo.from_file(**files[1]), multiprocessing.get_context("fork")
    topology_queue, answers = context.Queue(), context.Queue()

    child = context.Process(target=lambda: answers.put(topology_queue.get().lists.indices.take(np.arange(9)).tolist()))
    child.start()
    topology_queue.put(topology)
    got = answers.get()
    child.join()

    assert got == topology.indices[:9].tolist()


@pytest.mark.parametrize(("name", "array", "words"), [
    ("indptr", torch.arange(5, dtype=torch.int32), r"indptr must name a file with an array \[n\] of int64, got \[5\]"),
    ("indices", torch.zeros(4000), r"indices must name a file with an array \[n\] of int32 or int64, got \[4000\] of"),
    ("eid", torch.zeros(4000, 1, dtype=torch.int32), r"eid must name a file with an array \[n\] of int32 or int64"),
])  # fmt: skip
def test_other_arrays_are_refused(files, tmp_path, name, array, words):
    with pytest.raises(FileError, match=words):
        CSRTopo.from_file(**{**files[1], name: save_rows(tmp_path / "other.npy", array)})


@pytest.mark.parametrize("name", ["indices", "eid"])
def test_files_of_other_lengths_are_refused(files, tmp_path, name):
    other = save_rows(tmp_path / "other.npy", torch.zeros(3999, dtype=torch.int32))

    with pytest.raises(ArgumentError, match=rf"indptr must run from 0 to the number of numbers in {name}='.*other.npy'"
                                            " 3999, got 0 to 4000"):  # fmt: skip
        CSRTopo.from_file(**{**files[1], name: other})


def test_offsets_that_decrease_are_refused(files, tmp_path):
    offsets = files[0].indptr.clone()
    offsets[5] = 4000

    with pytest.raises(ArgumentError, match="indptr must not decrease, got 4000 before"):
        CSRTopo.from_file(**{**files[1], "indptr": save_rows(tmp_path / "other.npy", offsets)})


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"direction": "both"}, ArgumentError, "direction must be 'in' or 'out', got 'both'"),
    ({"host_cache_size": "lots"}, ArgumentError, "host_cache_size must look like"),
    ({"host_cache_size": 1.5}, ArgumentTypeError, "host_cache_size must be a number of bytes"),
    ({"indptr": "nothing.npy"}, FileError, "path must name a file that can be read, got 'nothing.npy'"),
])  # fmt: skip
def test_other_arguments_are_refused(files, options, error, words):
    with pytest.raises(error, match=words):
        CSRTopo.from_file(**{**files[1], **options})
